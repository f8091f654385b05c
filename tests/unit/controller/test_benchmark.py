"""``benchmarks/controller.py`` on a few ranks: it drives the controller as it is, with Ray played in this process."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray

FILE = Path(__file__).parents[3] / "benchmarks" / "controller.py"


class Ref:
    """A pickled value, or one that never comes."""

    def __init__(self, value: Any = None, *, comes: bool = True) -> None:
        self.comes = comes
        self.data = pickle.dumps(value, 5)


class Actor:
    """Methods of an object as remote calls that are done when they return."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.target, self.loop = target, loop

    def __getattr__(self, name: str) -> Any:
        method, loop = getattr(self.target, name), self.loop

        class Bound:
            def remote(self, *arguments: Any, **options: Any) -> Ref:
                if name == "watch":
                    return Ref(comes=False)
                given = [get(one) if isinstance(one, Ref) else one for one in arguments]
                return Ref(loop.run_until_complete(method(*given, **options)))

        return Bound()


def get(ref: Ref, timeout: float | None = None) -> Any:
    return pickle.loads(ref.data)


def wait(refs: Sequence[Ref], *, num_returns: int, timeout: float | None) -> tuple[list[Ref], list[Ref]]:
    ready = [ref for ref in refs if ref.comes][:num_returns]
    return ready, [ref for ref in refs if ref not in ready]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    loop = asyncio.new_event_loop()

    def remote(**_: Any) -> Callable[[type], Any]:
        def make(kind: type) -> Any:
            return type("Class", (), {"remote": staticmethod(lambda *given: Actor(kind(*given), loop))})

        return make

    for name, function in {"put": Ref, "get": get, "wait": wait, "remote": remote, "kill": lambda actor: None}.items():
        monkeypatch.setattr(ray, name, function)
    spec = importlib.util.spec_from_file_location("benchmark_controller", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    loop.close()


def test_it_measures_a_step_of_the_controller(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]):
    arguments = argparse.Namespace(prompts=16, samples=4, steps=1, latency_scale=0.0)
    measured = benchmark.measure(8, arguments, benchmark.word_tokenizer())
    assert len(measured.own_s) == 1 and measured.own_s[0] > 0
    assert {"rollout", "reward", "old_log_probs", "advantages", "update_actor"} <= measured.phases_s.keys()
    result = benchmark.report([measured], 64)
    assert result["rows"][0]["ranks"] == 8 and result["samples"] == 64
    assert result["value"] == pytest.approx(measured.own_s[0] / measured.predicted.step_s, abs=1e-4)
    assert "predicted s" in capsys.readouterr().out
