"""vLLM's ranks leave the cores to others while they wait."""

from __future__ import annotations

import pytest

# vLLM takes seconds to import, and warns when it does.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.slow,
]


def test_a_waiting_rank_does_not_poll_on_cpu() -> None:
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from megarl.rollout.vllm import worker

    assert worker.WorkerExtension
    with zmq.Context() as context:
        condition = SpinCondition(is_reader=True, context=context, notify_address="inproc://notify")
        assert condition.busy_loop_s == 0.0
        for name in ("local_notify_socket", "write_cancel_socket", "read_cancel_socket"):
            getattr(condition, name).close(linger=0)
