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


def make(groups, dtype="bfloat16", lora=None, optimizer=None, spec=None, **engine):
    from dataclasses import replace

    from megarl.config.schema.train import EngineConfig, OptimizerConfig
    from megarl.platform.device import get_device
    from megarl.train.megatron.engine import MegatronEngine

    # Transformer Engine's fused attention wants head dims in multiples of eight and at least sixteen.
    # FP8 wants every side in multiples of sixteen.
    spec = replace(QWEN2, hidden_size=128, head_dim=32, ffn_hidden_size=288) if spec is None else spec
    return MegatronEngine(
        "actor",
        spec,
        None,
        groups,
        get_device("cuda"),
        EngineConfig(dtype=dtype, microbatch_tokens=64, offload=True, **engine),
        OptimizerConfig(lr=1e-3, **({} if optimizer is None else optimizer)),
        lora=lora,
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


def test_latent_attention_and_biased_experts_do_not_depend_on_the_pack(groups):
    from dataclasses import replace

    from tests.distributed.engines import policy_update, recorded_batch
    from tests.distributed.parity import LATENT

    # Head dims of DeepSeek-V3, for which Transformer Engine has kernels.
    mla = replace(LATENT.mla, q_lora_rank=64, kv_lora_rank=64, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    moe = replace(LATENT.moe, ffn_hidden_size=64, shared_ffn_hidden_size=64)
    spec = replace(LATENT, hidden_size=128, head_dim=192, ffn_hidden_size=288, mla=mla, moe=moe)
    engine = make(groups, spec=spec, moe_bias_update_rate=0.01)
    batch = recorded_batch(spec.vocab_size)
    together = engine.log_probs(batch)["log_probs"]
    alone = [engine.log_probs(batch.select([row]))["log_probs"][0] for row in range(len(batch))]
    torch.testing.assert_close(together.values, torch.cat(alone), rtol=0, atol=1e-2)
    engine.update_policy(batch, policy_update(), [list(range(len(batch)))])
    biases = [value for name, value in engine.parameters().items() if name.endswith("expert_bias")]
    assert len(biases) == spec.num_expert_layers
    assert all(bias.dtype == torch.float32 and bias.abs().max() == 0.01 for bias in biases)


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


STATE = {
    "host": {"cpu_offload_fraction": 1.0},
    "half": {"cpu_offload_fraction": 0.5, "overlap_cpu_offload": True, "main_grads_dtype": "bfloat16"},
    "remainders": {"precision_aware": True},
    "short": {"precision_aware": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"},
    "scaled": {"precision_aware": True, "main_params_dtype": "float16", "main_grads_dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", STATE)
def test_optimizer_state_elsewhere_and_smaller_updates_alike_and_continues(groups, tmp_path, name):
    from tests.distributed.engines import policy_update, recorded_batch

    plain, engine, again = (make(groups, optimizer=settings) for settings in (None, STATE[name], STATE[name]))
    batch = recorded_batch(engine.spec.vocab_size)

    def update(one):
        one.update_policy(batch, policy_update(), [list(range(len(batch)))])
        return torch.cat([piece.float().flatten() for _, piece in one.pieces()])

    for _ in range(2):
        expected, found = update(plain), update(engine)
    tolerance = 1e-3 if name in ("host", "remainders") else 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=tolerance)
    held, whole = engine.state_summary(), plain.state_summary()
    assert held.optimizer_bytes < whole.optimizer_bytes
    assert (held.host_bytes > 0) == (name in ("host", "half")) and whole.host_bytes == 0
    engine.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    torch.testing.assert_close(update(again), update(engine), rtol=0, atol=0 if name != "short" else 1e-3)
    plain.load(tmp_path / "saved")
    update(plain)
    before = torch.cuda.memory_allocated()
    engine.offload()
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 0.9 * (held.weights_bytes + held.gradients_bytes + held.optimizer_bytes)
    engine.onload()
    update(engine)


def test_adapters_beside_transformer_engines_layers_are_what_is_merged(groups):
    """The norm inside of its linear layers is applied to what an adapter is given too."""
    from megarl.config.schema.train import LoraConfig
    from tests.distributed.engines import policy_update, recorded_batch

    plain, engine = make(groups, dtype="float32"), make(groups, dtype="float32", lora=LoraConfig(rank=8))
    batch = recorded_batch(engine.spec.vocab_size)
    expected = plain.log_probs(batch)["log_probs"].values
    torch.testing.assert_close(engine.log_probs(batch)["log_probs"].values, expected, rtol=0, atol=0)
    for _ in range(3):
        engine.update_policy(batch, policy_update(), [list(range(len(batch)))])
    adapted = engine.log_probs(batch)["log_probs"].values
    assert (adapted - expected).abs().max() > 1e-3
    with engine.without_adapters():
        torch.testing.assert_close(engine.log_probs(batch)["log_probs"].values, expected, rtol=0, atol=0)
    merged = engine.parameters()
    for name, parameter in plain.parameters().items():
        parameter.data.copy_(merged[name])
    torch.testing.assert_close(plain.log_probs(batch)["log_probs"].values, adapted, rtol=0, atol=1e-3)


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.skipif(not has_fp8(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_fp8_is_near_bfloat16_and_leaves_weights_in_it(groups, recipe):
    from tests.distributed.engines import policy_update, recorded_batch

    plain, engine = make(groups), make(groups, fp8="hybrid", fp8_recipe=recipe)
    batch = recorded_batch(engine.spec.vocab_size)
    expected, found = (one.log_probs(batch)["log_probs"].values for one in (plain, engine))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)
    assert engine.update_policy(batch, policy_update(), [list(range(len(batch)))]) is not None
    again = engine.log_probs(batch)["log_probs"].values
    assert not torch.equal(again, found)  # of the weights after the update, not of copies made before it
    pieces = [piece for _, piece in engine.pieces()]
    assert {piece.dtype for piece in pieces} == {torch.bfloat16} and all(map(torch.isfinite, map(torch.sum, pieces)))
    assert all(not module._fp8_workspaces for module in engine._parts.quantizing) and engine._parts.quantizing


@pytest.mark.skipif(not has_fp8(), reason="needs a GPU of compute capability 9.0")
def test_a_block_scaled_log_prob_does_not_depend_on_its_pack(groups):
    from tests.distributed.engines import recorded_batch

    engine = make(groups, fp8="e4m3")
    batch = recorded_batch(engine.spec.vocab_size)
    together = engine.log_probs(batch)["log_probs"]
    alone = [engine.log_probs(batch.select([row]))["log_probs"][0] for row in range(len(batch))]
    torch.testing.assert_close(together.values, torch.cat(alone), rtol=0, atol=5e-3)


@pytest.mark.skipif(has_fp8() or not torch.cuda.is_available(), reason="needs an older GPU")
def test_fp8_is_refused_on_an_older_gpu(groups):
    from megarl.errors import SetupError

    with pytest.raises(SetupError, match="cannot"):
        make(groups, fp8="hybrid")
