"""The process environment: typed readers, and what worker processes are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import SetupError
from megarl.platform import env


def test_readers_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_NUMBER", "12")
    monkeypatch.setenv("MEGARL_TEST_FLAG", "True")
    monkeypatch.setenv("MEGARL_TEST_EMPTY", "")
    monkeypatch.setenv("MEGARL_TEST_PATH", "~/x")
    assert env.integer("MEGARL_TEST_NUMBER") == 12
    assert env.integer("MEGARL_TEST_EMPTY", 3) == 3
    assert env.flag("MEGARL_TEST_FLAG")
    assert not env.flag("MEGARL_TEST_EMPTY")
    assert env.path("MEGARL_TEST_PATH") == Path.home() / "x"
    assert set(env.with_prefix("MEGARL_TEST_")) >= {"MEGARL_TEST_NUMBER", "MEGARL_TEST_FLAG"}


def test_a_wrong_or_missing_value_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_NUMBER", "twelve")
    with pytest.raises(SetupError, match="MEGARL_TEST_NUMBER='twelve' is not an integer"):
        env.integer("MEGARL_TEST_NUMBER")
    monkeypatch.delenv("MEGARL_TEST_NUMBER")
    with pytest.raises(SetupError, match="MEGARL_TEST_NUMBER is not set"):
        env.required("MEGARL_TEST_NUMBER", fix="set it")


def test_defaults_leave_the_users_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_A", "user")
    monkeypatch.setenv("MEGARL_TEST_B", "placeholder")
    monkeypatch.delenv("MEGARL_TEST_B")
    env.set_defaults({"MEGARL_TEST_A": "ours", "MEGARL_TEST_B": "ours"})
    assert (env.text("MEGARL_TEST_A"), env.text("MEGARL_TEST_B")) == ("user", "ours")


def test_workers_are_told_their_threads_and_to_wait_passively() -> None:
    variables = env.worker_environment("cpu", 3)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["OMP_WAIT_POLICY"] == "passive"
    assert not any(name.startswith(("NCCL", "CUDA", "VLLM")) for name in variables)
    assert env.worker_environment("cuda", 3)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_engines_on_cpu_may_share_a_numa_node() -> None:
    variables = env.rollout_environment("cpu", 1)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables.items() >= env.worker_environment("cpu", 1).items()
    assert not any(name.startswith("VLLM_CPU") for name in env.rollout_environment("cuda", 1))
