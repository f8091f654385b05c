"""The reward pool: whole batches in order, failures counted, no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest

from megarl.errors import RewardError
from megarl.rewards.base import RewardInput
from megarl.rewards.pool import RewardPool

REWARD = """
    import asyncio, os, signal, subprocess, sys, time

    def score(prompt, response, answer, data_source, metadata):
        if response == "raise":
            raise ValueError("no such thing")
        if response == "hang":
            while True:
                pass
        if response == "slow import free sleep":
            time.sleep(60)
        if response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "exit":
            sys.exit(3)
        if response == "hard exit":
            os._exit(7)
        if response == "text":
            return "good"
        if response == "none":
            return None
        if response == "nan":
            return float("nan")
        if response == "no score":
            return {"accuracy": 1.0}
        if response == "bad extra":
            return {"score": 1.0, "note": "hello"}
        if response == "spawn":
            child = subprocess.Popen(["sleep", "60"])
            open(metadata, "w").write(str(child.pid))
            while True:
                time.sleep(1)
        print("noise on the output")
        return {"score": float(response), "accuracy": True, "pid": os.getpid()}

    async def score_async(prompt, response, **rest):
        if response == "hang":
            await asyncio.sleep(60)
        if response == "block":
            time.sleep(60)
        if response == "raise":
            raise KeyError("gone")
        await asyncio.sleep(0.2)
        return int(response)

    def narrow(response):
        return 1.0

    broken = 5
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "my_reward.py"
    path.write_text(textwrap.dedent(REWARD))
    return path


@pytest.fixture(scope="module")
def pool(reward_file):
    with RewardPool("function", path=f"{reward_file}:score", workers=2, timeout_s=1.0, failure_score=-1.0) as pool:
        pool.ready()
        yield pool


def _inputs(*responses: str) -> list[RewardInput]:
    return [RewardInput("q", response) for response in responses]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_the_order_of_the_samples(pool):
    results = pool.score(_inputs(*(str(i) for i in range(200))))
    assert [result.score for result in results] == list(range(200))
    assert all(result.failed is None and result.extra["accuracy"] == 1.0 for result in results)
    assert len({result.extra["pid"] for result in results}) == 2


def test_an_empty_batch_is_scored(pool):
    assert pool.score([]) == []


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ValueError: no such thing (my_reward.py:6)"),
        ("exit", "SystemExit: 3"),
        ("text", "TypeError: the reward returned str for score"),
        ("none", "TypeError: the reward returned NoneType"),
        ("nan", "ValueError: the reward returned nan"),
        ("no score", "a dict without 'score', its keys are ['accuracy']"),
        ("bad extra", "TypeError: the reward returned str for note"),
        ("die", "was killed by signal 9"),
        ("hard exit", "exited with code 7"),
        ("hang", "TimeoutError: no score within 1 s"),
    ],
)
def test_a_failure_is_counted_and_touches_no_other_sample(pool, response, reason):
    before = pool.num_failed
    results = pool.score(_inputs("0", "1", "2", response, "4", "5", "6", "7"))
    assert reason in results[3].failed
    assert [result.score for result in results] == [0, 1, 2, -1, 4, 5, 6, 7]
    assert [index for index, result in enumerate(results) if result.failed] == [3]
    assert pool.num_failed == before + 1


def test_a_batch_of_nothing_but_failures_comes_back(pool):
    results = pool.score(_inputs("die", "hang", "die", "raise", "hang"))
    assert all(result.failed and result.score == -1 for result in results)


def test_a_sample_that_cannot_be_sent_is_a_failure(pool):
    results = pool.score([RewardInput("q", "1", metadata=threading.Lock()), RewardInput("q", "2")])
    assert "cannot be pickled" in results[0].failed and results[1].score == 2


def test_processes_a_stuck_sample_started_end_with_it(pool, tmp_path):
    pid_file = tmp_path / "pid"
    results = pool.score([RewardInput("q", "spawn", metadata=str(pid_file)), RewardInput("q", "1")])
    assert "TimeoutError" in results[0].failed and results[1].score == 1
    assert not _is_alive(int(pid_file.read_text()))


def test_a_process_killed_between_batches_is_replaced_and_costs_no_sample(pool):
    os.kill(pool.pids[0], signal.SIGKILL)
    os.waitid(os.P_PID, pool.pids[0], os.WEXITED | os.WNOWAIT)
    assert [result.score for result in pool.score(_inputs("1", "2"))] == [1, 2]
    assert all(map(_is_alive, pool.pids))


def test_a_process_killed_from_outside_in_a_batch_costs_one_sample(reward_file):
    with RewardPool("function", path=f"{reward_file}:score", workers=1, timeout_s=20) as pool:
        pool.ready()
        victim = pool.pids[0]
        killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
        killer.start()
        results = pool.score(_inputs("1", "slow import free sleep", "3"))
        killer.join()
        assert [result.failed is not None for result in results] == [False, True, False]
        assert pool.failures == ["the scoring process was killed by signal 9"]


def test_interrupting_a_batch_leaves_no_answer_for_the_next(reward_file):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    with RewardPool("function", path=f"{reward_file}:score", workers=2, timeout_s=20) as pool:
        pool.ready()
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.score(_inputs(*["slow import free sleep"] * 4))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert [result.score for result in pool.score(_inputs("5", "6"))] == [5, 6]


def test_an_observer_is_asked_while_samples_are_scored_and_may_end_the_batch(reward_file):
    begin = time.monotonic()

    def enough():
        if time.monotonic() > begin + 0.5:
            raise KeyError("enough")

    with RewardPool("function", path=f"{reward_file}:score", workers=2, timeout_s=20) as pool:
        pool.ready()
        pool.observers.append(enough)
        with pytest.raises(KeyError):
            pool.score(_inputs(*["slow import free sleep"] * 4))
        assert time.monotonic() - begin < 15
        pool.observers.clear()
        assert [result.score for result in pool.score(_inputs("5", "6"))] == [5, 6]


def test_closing_leaves_no_process(reward_file):
    pool = RewardPool("function", path=f"{reward_file}:score", workers=3)
    pool.ready()
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(map(_is_alive, pids))
    with pytest.raises(RewardError, match="closed"):
        pool.score(_inputs("1"))


def test_no_process_outlives_a_parent_that_is_killed(reward_file, tmp_path):
    import subprocess
    import sys

    code = f"""
from megarl.rewards.pool import RewardPool
from megarl.rewards.base import RewardInput
pool = RewardPool("function", path={str(reward_file) + ":score"!r}, workers=2, timeout_s=60)
pool.ready()
print(*pool.pids, flush=True)
pool.score([RewardInput("q", "hang"), RewardInput("q", "hang")])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.stdout.close()
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while any(map(_is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(_is_alive, pids))


def test_asynchronous_functions_wait_together(reward_file):
    with RewardPool("function", path=f"{reward_file}:score_async", workers=2, timeout_s=1.0) as pool:
        pool.ready()
        started = time.monotonic()
        results = pool.score(_inputs("hang", *(str(i) for i in range(1, 40)), "raise"))
        assert time.monotonic() - started < 4  # 39 samples of 0.2 s and one time-out of 1 s
        assert [result.score for result in results] == [0.0, *range(1, 40), 0.0]
        assert "TimeoutError" in results[0].failed and "KeyError" in results[-1].failed
        assert pool.num_failed == 2


def test_asynchronous_code_that_blocks_its_loop_is_killed(reward_file):
    with RewardPool("function", path=f"{reward_file}:score_async", workers=1, timeout_s=0.5) as pool:
        results = pool.score(_inputs("block", "1", "2"))
        assert "TimeoutError" in results[0].failed
        assert [result.score for result in results[1:]] == [1, 2]


def test_scoring_can_be_awaited(pool):
    assert [result.score for result in asyncio.run(pool.score_async(_inputs("3")))] == [3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "function", "path": "no_such_module_xyz:score"}, "No module named 'no_such_module_xyz'"),
        ({"kind": "function", "path": "/no/such/file.py:score"}, "file does not exist"),
        ({"kind": "function", "path": "FILE:absent"}, "has no function 'absent'; it has score, score_async, narrow"),
        ({"kind": "function", "path": "FILE:broken"}, "has no function 'broken'"),
        ({"kind": "function", "path": "FILE:narrow"}, "called with the keywords prompt, response"),
        ({"kind": "function", "path": "FILE"}, "names no function"),
        ({"kind": "function"}, "needs a path"),
        ({"kind": "regex"}, "needs a pattern"),
        ({"kind": "judge"}, "no reward is of kind 'judge'"),
        ({"kind": "regex", "pattern": "(["}, "no regular expression"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(reward_file, arguments, message):
    if "path" in arguments:
        arguments["path"] = arguments["path"].replace("FILE", str(reward_file))
    with pytest.raises(RewardError) as raised, RewardPool(**arguments, workers=1) as pool:
        pool.ready()
    assert message in str(raised.value)


def test_a_process_that_dies_while_loading_is_an_error_not_a_loop(tmp_path):
    path = tmp_path / "dies.py"
    path.write_text("import os\nos._exit(9)\n")
    with (
        RewardPool("function", path=f"{path}:score", workers=1) as pool,
        pytest.raises(RewardError, match="could not be loaded: the scoring process exited with code 9"),
    ):
        pool.score(_inputs("1"))


def test_a_reward_that_loads_for_ever_is_an_error(tmp_path):
    path = tmp_path / "loads.py"
    path.write_text("import time\ntime.sleep(60)\n")
    with (
        RewardPool("function", path=f"{path}:score", workers=1, start_timeout_s=0.5) as pool,
        pytest.raises(RewardError, match="did not load the reward within"),
    ):
        pool.ready()
