"""Real vLLM engines, TP 1 and 2, under weights sent by one and by two trainer ranks, against transformers."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema.roles import RolloutConfig
from megarl.errors import RolloutError, SyncError
from megarl.models.tiny import main as write_tiny
from megarl.parallel.grid import ParallelLayout
from megarl.platform import env
from megarl.rollout.engine import Completion, Request, WeightSpan
from megarl.rollout.sampling import Sampling
from megarl.weights.sync import InFlight, SyncOptions, SyncSession, Transport
from tests.integration.sync_ends import HOST, EngineOnLoop, LocalRank, Loop, TrainerProcess, close_local_ranks, invoke

# vLLM's own, at import and at start; warnings of megarl stay errors.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.slow,
]

PROMPT = [70, 54, 57, 9]
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_local_ranks()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model's directory without weights: hidden 128, ffn 352, 4 heads, 2 key-value heads."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny([str(directory)])
    return directory


@dataclass
class Model:
    """Transformers' model, and a file of its weights for trainer ranks."""

    hf: Any
    path: Path

    def draw(self, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in self.hf.parameters():
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
        torch.save(self.hf.state_dict(), self.path)

    @torch.no_grad()
    def log_probs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(response), V]: of every token after each prefix."""
        ids = torch.tensor([[*prompt, *response]])
        return (self.hf(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)


@pytest.fixture(scope="session")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).float().eval()
    return Model(hf, tmp_path_factory.mktemp("weights") / "weights.pt")


@pytest.fixture(scope="module")
def make_engine(tiny: Path) -> Iterator[Callable[[int], EngineOnLoop]]:
    env.update(env.rollout_environment("cpu", 1))
    from megarl.rollout.vllm.engine import VllmEngine

    loop = Loop()
    engines: list[EngineOnLoop] = []

    def make(tp: int) -> EngineOnLoop:
        config = RolloutConfig(tp=tp, dtype="float32", kv_cache_gib=0.25, max_num_seqs=32)
        engine = EngineOnLoop(loop, VllmEngine(tiny, config, device="cpu", max_model_len=96))
        engines.append(engine)
        engine.call("start")
        return engine

    yield make
    for engine in engines:
        engine.call("stop")
    loop.stop()
    gc.collect()  # what vLLM left open is found here, where it is no error


@pytest.fixture(scope="module")
def engine_tp1(make_engine: Callable[[int], EngineOnLoop]) -> EngineOnLoop:
    return make_engine(1)


@pytest.fixture(scope="module")
def engine_tp2(make_engine: Callable[[int], EngineOnLoop]) -> EngineOnLoop:
    return make_engine(2)


def session(
    engine: EngineOnLoop,
    senders: list[Any],
    tp: int,
    transport: Transport = "auto",
    in_flight: InFlight = "finish",
) -> SyncSession:
    return SyncSession(
        senders,
        [engine],
        invoke,
        host=HOST,
        ranks_per_receiver=tp,
        options=SyncOptions(bucket_bytes=300_000, timeout_s=TIMEOUT_S, transport=transport, in_flight=in_flight),
    )


@dataclass(frozen=True)
class Sampled:
    """A completion whose tokens and log-probs are lists, to be compared and searched."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    weight_versions: tuple[WeightSpan, ...]


def sample(engine: EngineOnLoop, sampling: Sampling, n: int = 1, seed: int = 1) -> list[Sampled]:
    completions: list[Completion]
    ((_, completions),) = engine.call("generate", [Request(0, PROMPT, seed)], sampling, n)
    return [
        Sampled(one.token_ids.tolist(), one.log_probs.tolist(), one.finish_reason, one.weight_versions)
        for one in completions
    ]


def assert_greedy_equals(engine: EngineOnLoop, model: Model, version: int) -> None:
    (completion,) = sample(engine, Sampling(temperature=0, max_tokens=12))
    expected = model.log_probs(PROMPT, completion.token_ids)
    assert completion.token_ids == expected.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(completion.log_probs), expected.max(-1).values, atol=1e-3)
    assert completion.weight_versions == (WeightSpan(version, 0, len(completion.token_ids)),)


def test_an_engine_without_committed_weights_refuses(make_engine, engine_tp1):
    if engine_tp1.engine.weight_version is None:
        with pytest.raises(RolloutError, match="no weights have been committed"):
            sample(engine_tp1, Sampling(max_tokens=2))


def test_three_updates_from_one_rank_at_tp_1(tiny, model, engine_tp1):
    trainer = LocalRank(tiny, ParallelLayout(), 0)
    updates = session(engine_tp1, [trainer], tp=1)
    for version in range(3):
        model.draw(version)
        trainer.load(model.path)
        updates.publish(version)
        assert_greedy_equals(engine_tp1, model, version)


@pytest.mark.parametrize("transport", ["host", "network"])
@pytest.mark.parametrize("tp", [1, 2])
def test_three_updates_from_two_ranks_with_shards(tiny, model, request, tp, transport):
    engine = request.getfixturevalue(f"engine_tp{tp}")
    trainers = [TrainerProcess(tiny, ParallelLayout(tp=2), rank) for rank in range(2)]
    updates = session(engine, trainers, tp=tp, transport=transport)
    try:
        for version in range(10, 13):
            model.draw(version)
            for trainer in trainers:
                trainer.call("load", model.path)
            updates.publish(version)
            assert_greedy_equals(engine, model, version)
    finally:
        for trainer in trainers:
            trainer.stop()


@pytest.fixture
def served(tiny, model, engine_tp1) -> EngineOnLoop:
    """The engine of one rank under fresh weights, version 50."""
    model.draw(50)
    trainer = LocalRank(tiny, ParallelLayout(), 0)
    trainer.load(model.path)
    session(engine_tp1, [trainer], tp=1).publish(50)
    return engine_tp1


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_the_temperature(served, model, temperature):
    for completion in sample(served, Sampling(temperature=temperature, max_tokens=10), n=3):
        expected = model.log_probs(PROMPT, completion.token_ids, temperature)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-3)


def test_the_same_request_and_seed_give_the_same_tokens(served):
    sampling = Sampling(max_tokens=12)
    first, again, other = (sample(served, sampling, n=4, seed=seed) for seed in (7, 7, 1000))
    assert first == again
    assert [c.token_ids for c in first] != [c.token_ids for c in other]
    assert len({tuple(c.token_ids) for c in first}) == 4


def test_finish_reasons_and_stop_tokens(served):
    (long,) = sample(served, Sampling(temperature=0, max_tokens=6))
    assert (long.finish_reason, len(long.token_ids), len(long.log_probs)) == ("length", 6, 6)
    stop = long.token_ids[2]
    (short,) = sample(served, Sampling(temperature=0, max_tokens=6, stop_token_ids=[stop]))
    assert short.finish_reason == "stop"
    assert short.token_ids == long.token_ids[: long.token_ids.index(stop) + 1]


def test_requests_the_engine_would_die_of_are_refused(served):
    for prompt, seed, n, words in (
        ([], 0, 1, "prompt is empty"),
        ([5] * 96, 0, 1, "no room"),
        ([5, 10_000], 0, 1, "outside the vocabulary"),
        ([5], -1, 1, "seed"),
    ):
        with pytest.raises(RolloutError, match=words):
            served.call("generate", [Request(0, prompt, seed)], Sampling(max_tokens=2), n)
    with pytest.raises(RolloutError, match="greedy"):
        sample(served, Sampling(temperature=0), n=2)
    assert sample(served, Sampling(max_tokens=2))


def test_prompts_longer_than_a_step_of_vllm_are_sampled_with_seeds(served):
    """Many seeded prompts at once end a CPU engine that computes prompts in parts."""
    requests = [Request(i, [5 + i % 100] * 90, seed=i) for i in range(64)]
    result = served.call("generate", requests, Sampling(max_tokens=2), 1)
    assert [request_id for request_id, _ in result] == list(range(64))


LONG = Sampling(temperature=0, max_tokens=88)


def drawn_for_long_samples(model: Model, trainer: LocalRank, updates: SyncSession, version: int) -> None:
    """Weights under which the prompt is continued to the limit."""
    for seed in range(200, 230):
        model.draw(seed)
        trainer.load(model.path)
        updates.publish(version)
        (completion,) = sample(updates._receivers[0], LONG)
        if completion.finish_reason == "length":
            return
    raise AssertionError("all weights end the sample early")


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_samples_under_way_are_treated_as_asked(tiny, model, engine_tp1, in_flight):
    trainer = LocalRank(tiny, ParallelLayout(), 0)
    updates = session(engine_tp1, [trainer], tp=1, in_flight=in_flight)
    drawn_for_long_samples(model, trainer, updates, 80)
    old = {name: tensor.clone() for name, tensor in model.hf.state_dict().items()}
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(sample, engine_tp1, LONG)
        while not engine_tp1.engine._num_running:
            time.sleep(0.001)
        time.sleep(0.1)
        model.draw(300)
        trainer.load(model.path)
        updates.publish(81)
        (completion,) = started.result(30)
    new = model.log_probs(PROMPT, completion.token_ids).max(-1)
    model.hf.load_state_dict(old)
    before = model.log_probs(PROMPT, completion.token_ids).max(-1)
    model.draw(300)
    tokens, log_probs = torch.tensor(completion.token_ids), torch.tensor(completion.log_probs)
    if in_flight != "continue":
        assert completion.finish_reason == ("length" if in_flight == "finish" else "abort")
        assert completion.weight_versions == (WeightSpan(80, 0, len(tokens)),)
        assert torch.equal(tokens, before.indices) and torch.allclose(log_probs, before.values, atol=1e-3)
        assert in_flight == "finish" or len(tokens) < 88
    else:
        # One response under two versions; what was computed under the first is computed again under the second.
        one, two = completion.weight_versions
        assert (one.version, two.version, one.end, two.end) == (80, 81, two.start, len(tokens))
        assert 0 < one.end < len(tokens)
        assert torch.equal(tokens[: one.end], before.indices[: one.end])
        assert torch.equal(tokens[one.end :], new.indices[one.end :])
        assert torch.allclose(log_probs[: one.end], before.values[: one.end], atol=1e-3)
        assert torch.allclose(log_probs[one.end :], new.values[one.end :], atol=1e-3)
    assert_greedy_equals(engine_tp1, model, 81)


def test_samples_that_wait_for_an_update_are_aborted_when_it_fails(tiny, model, engine_tp1):
    trainer = LocalRank(tiny, ParallelLayout(), 0)
    updates = session(engine_tp1, [trainer], tp=1, in_flight="continue")
    drawn_for_long_samples(model, trainer, updates, 90)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(sample, engine_tp1, LONG)
        while not engine_tp1.engine._num_running:
            time.sleep(0.001)
        trainer.set_fault("raise")
        with pytest.raises(SyncError, match="lost its parameters"):
            updates.publish(91)
        (completion,) = started.result(10)
    assert completion.finish_reason == "abort"
    with pytest.raises(RolloutError, match="refuses to sample"):
        sample(engine_tp1, Sampling(max_tokens=2))
    trainer.set_fault(None)
    updates.publish(92)
    assert_greedy_equals(engine_tp1, model, 92)


def test_given_tokens_are_scored_under_the_weights_received_last(served, model):
    rows = [(PROMPT, [5, 6, 7]), ([9, 8], [3, 70, 54, 57])]
    for found, (prompt, response) in zip(served.call("score", rows), rows, strict=True):
        expected = model.log_probs(prompt, response).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found), expected, atol=1e-3)


def test_a_failed_update_poisons_and_the_next_one_heals(tiny, model, engine_tp2):
    trainer = LocalRank(tiny, ParallelLayout(), 0)
    model.draw(60)
    trainer.load(model.path)
    updates = session(engine_tp2, [trainer], tp=2)
    updates.publish(60)
    trainer.set_fault("raise")
    with pytest.raises(SyncError, match=r"actor rank 0 in phase transfer.*lost its parameters"):
        updates.publish(61)
    with pytest.raises(RolloutError, match="refuses to sample: update to version 61 failed"):
        sample(engine_tp2, Sampling(max_tokens=2))
    trainer.set_fault(None)
    model.draw(62)
    trainer.load(model.path)
    updates.publish(62)
    assert_greedy_equals(engine_tp2, model, 62)


def test_a_killed_rank_is_named_within_seconds_and_a_killed_trainer_ends_an_update(tiny, model, engine_tp2):
    """The last test on this engine, which does not survive it."""
    model.draw(70)
    trainers = [TrainerProcess(tiny, ParallelLayout(tp=2), rank) for rank in range(2)]
    for trainer in trainers:
        trainer.call("load", model.path)
    updates = session(engine_tp2, trainers, tp=2)
    updates.publish(70)
    trainers[1].process.kill()
    started = time.monotonic()
    with pytest.raises(SyncError):
        updates.publish(71)
    assert time.monotonic() - started < 10
    for trainer in trainers:
        trainer.stop()

    trainer = LocalRank(tiny, ParallelLayout(), 0)
    trainer.load(model.path)
    session(engine_tp2, [trainer], tp=2).publish(72)
    (victim,) = [pid for pid, name in engine_tp2.engine.processes.items() if name.endswith("rank 1")]
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=rf"rollout replica 0 rank 1 \(process {victim}\) died"):
        for _ in range(50):
            sample(engine_tp2, Sampling(max_tokens=64), n=8)
    assert time.monotonic() - started < 5
