"""What differs on CUDA: Transformer Engine's packed attention, NCCL, pinned host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.parallel.grid import ParallelLayout
from tests.distributed.models import QWEN2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def groups(tmp_path) -> Iterator[object]:
    from megarl.platform.device import get_device
    from megarl.train.megatron import bootstrap

    yield bootstrap.start(
        ParallelLayout(), device=get_device("cuda"), rank=0, seed=1, init_method=f"file://{tmp_path}/rendezvous"
    )
    bootstrap.stop()


def make(groups, dtype="bfloat16"):
    from dataclasses import replace

    from megarl.config.schema.train import EngineConfig, OptimizerConfig
    from megarl.platform.device import get_device
    from megarl.train.megatron.engine import MegatronEngine

    # Transformer Engine's fused attention wants head dims in multiples of eight and at least sixteen.
    spec = replace(QWEN2, hidden_size=128, head_dim=32)
    return MegatronEngine(
        "actor",
        spec,
        None,
        groups,
        get_device("cuda"),
        EngineConfig(dtype=dtype, microbatch_tokens=64, offload=True),
        OptimizerConfig(lr=1e-3),
    )


def test_head_in_bfloat16_is_near_a_float64_softmax():
    from megarl.train.megatron.heads import vocab_log_probs

    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 1000, (300,), device="cuda")
    log_probs, entropy = vocab_log_probs(hidden, weight, targets, vocab_size=1000, chunk_tokens=128, with_entropy=True)
    log_p = (hidden.double() @ weight[:1000].double().t()).log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), log_p.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=1e-3)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-3)


def test_packing_changes_no_log_prob(groups):
    from tests.distributed.engines import recorded_batch

    engine = make(groups)
    batch = recorded_batch(engine.spec.vocab_size)
    together = engine.log_probs(batch)["log_probs"]
    alone = [engine.log_probs(batch.select([row]))["log_probs"][0] for row in range(len(batch))]
    torch.testing.assert_close(together.values, torch.cat(alone), rtol=0, atol=1e-3)


def test_offload_frees_the_device_and_changes_nothing(groups):
    from tests.distributed.engines import policy_update, recorded_batch

    engine = make(groups)
    batch = recorded_batch(engine.spec.vocab_size)
    rows = [list(range(len(batch)))]
    engine.update_policy(batch, policy_update(), rows)
    expected = engine.log_probs(batch)["log_probs"].values
    before = torch.cuda.memory_allocated()
    held = engine.state_summary()
    engine.offload()
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 0.9 * (held.weights_bytes + held.gradients_bytes + held.optimizer_bytes)
    engine.onload()
    torch.testing.assert_close(engine.log_probs(batch)["log_probs"].values, expected, rtol=0, atol=0)
    assert engine.update_policy(batch, policy_update(), rows) is not None
