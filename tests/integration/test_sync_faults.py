"""A weight update that fails in any phase, at either end, between the processes of a real engine and of two trainers.

Each ends in bounded time, names rank, phase and (where there is one) tensor, commits nowhere; the next one is exact.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from megarl.config.schema.roles import RolloutConfig
from megarl.errors import MegarlError, RolloutError, SyncError
from megarl.models.tiny import main as write_tiny
from megarl.parallel.grid import ParallelLayout
from megarl.platform import env
from megarl.rollout.engine import Request, WeightSpan
from megarl.rollout.sampling import Sampling
from megarl.weights.sync import SyncOptions, SyncSession, Transport
from tests.integration.faulty_ends import SLOW_S, FaultyTrainer
from tests.integration.sync_ends import HOST, EngineOnLoop, Loop, TrainerProcess, invoke

# vLLM's own, at import and at start; warnings of megarl stay errors.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.slow,
]

TP = 2
PROMPT = [70, 54, 57, 9]
# Of updates that are to succeed or to fail at once; those that wait for somebody slow have the second.
TIMEOUT_S, SHORT_S = 40.0, 2.0
# From what happened until the driver knows it.
REPORT_S = 8.0
COLLECTIVE_S = 57.0

DOWN, UP, QKV, NORM = (
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.norm.weight",
)


class Ends:
    """Two trainer ranks, a real engine of two ranks, and transformers' model of the weights."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from megarl.rollout.vllm.engine import VllmEngine

        self.directory, self.path = directory, directory / "weights.pt"
        self.hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).float().eval()
        self.loop = Loop()
        config = RolloutConfig(tp=TP, dtype="float32", kv_cache_gib=0.25, max_num_seqs=8)
        self.engine = EngineOnLoop(
            self.loop,
            VllmEngine(directory, config, device="cpu", max_model_len=64, collective_timeout_s=COLLECTIVE_S),
        )
        self.engine.call("start")
        self.trainers = [self.trainer(rank) for rank in range(2)]
        self.version = 0

    def trainer(self, rank: int) -> TrainerProcess:
        return TrainerProcess(self.directory, ParallelLayout(tp=2), rank, FaultyTrainer)

    def draw(self) -> None:
        """New weights in every trainer rank, under the next version."""
        self.version += 1
        torch.manual_seed(self.version)
        for parameter in self.hf.parameters():
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
        torch.save(self.hf.state_dict(), self.path)
        for trainer in self.trainers:
            trainer.call("load", self.path)

    def session(self, transport: Transport, timeout_s: float = TIMEOUT_S) -> SyncSession:
        options = SyncOptions(bucket_bytes=100_000, timeout_s=timeout_s, transport=transport)
        return SyncSession(
            self.trainers,
            [self.engine],
            partial(invoke, grace_s=0.5),
            host=HOST,
            ranks_per_receiver=TP,
            options=options,
        )

    def tell(self, end: str, rank: int, kind: str, place: str) -> None:
        if end == "trainer":
            self.trainers[rank].call("tell", kind, place)
        else:
            self.loop.run(self.engine.engine._llm.collective_rpc("megarl_tell", args=(rank, kind, place)))

    def process(self, end: str, rank: int) -> int:
        if end == "trainer":
            pid = self.trainers[rank].process.pid
            assert pid is not None
            return pid
        (pid,) = [pid for pid, name in self.engine.engine.processes.items() if name.endswith(f"rank {rank}")]
        return pid

    def sample(self) -> tuple[list[int], torch.Tensor, tuple[WeightSpan, ...]]:
        ((_, (one,)),) = self.engine.call("generate", [Request(0, PROMPT, 1)], Sampling(temperature=0, max_tokens=8), 1)
        return one.token_ids.tolist(), torch.from_numpy(one.log_probs), one.weight_versions

    @torch.no_grad()
    def assert_serves(self, version: int) -> None:
        """Greedy tokens and log-probs are those of transformers, under this version."""
        tokens, log_probs, spans = self.sample()
        logits = self.hf(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1)
        assert tokens == expected.indices.tolist()
        torch.testing.assert_close(log_probs, expected.values, rtol=0, atol=1e-3)
        assert spans == (WeightSpan(version, 0, len(tokens)),)

    def assert_refuses(self) -> None:
        with pytest.raises(RolloutError, match=f"refuses to sample: update to version {self.version} failed"):
            self.sample()

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.stop()
        self.engine.call("stop")
        self.loop.stop()
        gc.collect()  # what vLLM left open is found here, where it is no error


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny([str(directory)])
    env.update(env.rollout_environment("cpu", 1))
    from megarl.rollout.vllm import arguments

    made = arguments.AsyncEngineArgs
    with pytest.MonkeyPatch.context() as patch:
        worker = "tests.integration.faulty_worker.FaultyWorker"
        patch.setattr(arguments, "AsyncEngineArgs", lambda **given: made(**given | {"worker_extension_cls": worker}))
        ends = Ends(directory)
    yield ends
    ends.close()


def failed(ends: Ends, session: SyncSession, words: str) -> float:
    """Seconds until a new version's update failed with these words; the engine refuses to sample."""
    ends.draw()
    started = time.monotonic()
    with pytest.raises(SyncError, match=words):
        session.publish(ends.version)
    seconds = time.monotonic() - started
    ends.assert_refuses()
    return seconds


def heals(ends: Ends, session: SyncSession) -> None:
    """The next update is exact, and so is one after it."""
    session.options = SyncOptions(100_000, TIMEOUT_S, transport=session.options.transport)
    for _ in range(2):
        ends.draw()
        session.publish(ends.version)
        ends.assert_serves(ends.version)


@pytest.mark.parametrize(
    ("end", "kind", "place", "words"),
    [
        ("trainer", "raise", "offer", "actor rank 1 in phase prepare: RuntimeError: it was told to fail"),
        ("engine", "raise", "layout", "replica 0 rank 1 in phase prepare: RuntimeError: it was told to fail"),
        ("trainer", "raise", "open", "actor rank 1 in phase connect: RuntimeError: it was told to fail"),
        ("trainer", "raise", "connect", "actor rank 1 in phase connect: RuntimeError: it was told to fail"),
        ("engine", "raise", "connect", "replica 0 rank 1 in phase connect: RuntimeError: it was told to fail"),
        ("engine", "raise", "start", "replica 0 rank 1 in phase prepare: RuntimeError: it was told to fail"),
        ("trainer", "raise", DOWN, f"actor rank 1 in phase transfer at {DOWN}: RuntimeError: it was told to fail"),
        ("engine", "raise", UP, f"replica 0 rank 1 in phase transfer at {UP}: RuntimeError: it was told to fail"),
        ("engine", "raise", "finish", "replica 0 rank 1 in phase load: RuntimeError: it was told to fail"),
        ("trainer", "flip", QKV, rf"replica 0 rank \d in phase verify at {QKV}: checksums of version \d+ differ"),
        ("engine", "flip", NORM, rf"replica 0 rank 1 in phase verify at {NORM}: checksums of version \d+ differ"),
    ],
)
@pytest.mark.parametrize("transport", ["host", "network"])
def test_a_failure_in_any_phase_is_named_at_once_and_heals(ends, transport, end, kind, place, words):
    """Long before the time-out: who waits is told."""
    session = ends.session(transport)
    ends.tell(end, 1, kind, place)
    assert failed(ends, session, words) < REPORT_S
    heals(ends, session)


def wake(process: psutil.Process) -> None:
    """Lets a process that freezes within the update's time go on long after the time-out."""
    deadline = time.monotonic() + SHORT_S + REPORT_S
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(SHORT_S + SLOW_S)
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", ["slow", "stop"])
@pytest.mark.parametrize(
    ("end", "rank", "place", "words"),
    [
        ("trainer", 1, DOWN, r"in phase transfer at \S+: no answer from .*actor rank 1"),
        ("trainer", 0, DOWN, r"in phase transfer at \S+: no answer from .*actor rank 0"),
        ("engine", 1, UP, r"in phase transfer at \S+: no answer from .*rollout replica 0 rank 1"),
    ],
)
@pytest.mark.parametrize("transport", ["host", "network"])
def test_an_end_that_is_late_is_named_at_the_time_out_and_heals(ends, transport, end, rank, place, words, kind):
    """Slow, or frozen for longer than the update may take."""
    session = ends.session(transport)
    ends.draw()
    session.publish(ends.version)
    session.options = SyncOptions(100_000, SHORT_S, transport=transport)
    ends.tell(end, rank, kind, place)
    awake = threading.Thread(target=wake, args=(psutil.Process(ends.process(end, rank)),))
    awake.start()
    try:
        assert failed(ends, session, words) < SHORT_S + SLOW_S + REPORT_S
    finally:
        awake.join()
    heals(ends, session)


def test_groups_of_an_engine_have_the_time_out_of_the_configuration(ends):
    """vLLM's own groups, whose default is torch's half an hour."""
    found = ends.loop.run(ends.engine.engine._llm.collective_rpc("megarl_group_timeouts_s"))
    assert found == [[COLLECTIVE_S] * 5] * TP


def test_an_engine_whose_caches_are_in_use_does_not_commit_and_heals(ends, monkeypatch):
    session = ends.session("auto")

    async def in_use(**_: bool) -> bool:
        return False

    monkeypatch.setattr(ends.engine.engine._llm, "reset_prefix_cache", in_use)
    assert failed(ends, session, "replica 0 in phase commit: cached prompts of the previous weights are in use") < 8
    monkeypatch.undo()
    heals(ends, session)


def test_a_commit_of_what_was_not_received_is_refused(ends):
    session = ends.session("auto")
    heals(ends, session)
    with pytest.raises(SyncError, match="phase commit: version 999 was not received"):
        ends.engine.call("commit", 999)
    ends.assert_serves(ends.version)


@pytest.mark.parametrize("transport", ["host", "network"])
def test_a_trainer_killed_under_way_ends_the_update_and_another_in_its_place_heals(ends, transport):
    session = ends.session(transport)
    ends.tell("trainer", 1, "die", DOWN)
    assert failed(ends, session, r"actor rank 1|a trainer process died") < REPORT_S
    ends.trainers[1] = ends.trainer(1)
    heals(ends, ends.session(transport))


def test_an_engine_rank_killed_under_way_is_named(ends):
    """The last test: an engine does not survive it."""
    session = ends.session("auto")
    ends.draw()
    session.publish(ends.version)
    ends.draw()
    victim = ends.process("engine", 1)
    ends.tell("engine", 1, "die", UP)
    started = time.monotonic()
    with pytest.raises(MegarlError, match=rf"rollout replica 0 rank 1 (\(process {victim}\) died|is gone)"):
        session.publish(ends.version)
    assert time.monotonic() - started < REPORT_S
    with pytest.raises(RolloutError, match="refuses to sample"):
        ends.sample()
