"""Every family through every format and layout, and back, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.models.spec import MixtureOfExperts, ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.checksum import checksum
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.session import Settings, convert
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.targets import hf_target, legacy_target
from megarl.weights.files.safetensors_header import directory_arrays
from megarl.weights.files.safetensors_writer import write_hf
from megarl.weights.region import whole
from tests.property.layouts import models_and_layouts, random_model

# The smallest blocks the settings allow, so that tensors are cut.
FAST = Settings(workers=2, max_memory=2 * 4 * (1 << 16), durable=False)


def written(source: Source, target: Path, kind: str, **options: Any) -> dict[str, Any]:
    """Converts without a command."""
    if kind == "hf":
        make: Any = lambda place: hf_target(  # noqa: E731
            place, source.spec, source.dtypes, value_head=source.value_head, max_shard_bytes=2000
        )
    else:
        build = dist_target if kind == "torch_dist" else legacy_target
        make = lambda place: build(  # noqa: E731
            place, source.spec, dtypes=source.dtypes, value_head=source.value_head, **options
        )
    return convert(source, target, make, {}, FAST)


def bits(directory: Path) -> dict[str, bytes]:
    return {
        name: np.fromfile(array.path, np.uint8, array.num_bytes, offset=array.begin).tobytes()
        for name, array in directory_arrays(directory).items()
    }


CASES = {
    "case": models_and_layouts(),
    "naming": st.sampled_from(["local", "te"]),
    "grouped": st.booleans(),
    "ends": st.sampled_from([("legacy", "dist"), ("dist", "legacy")]),
}
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=10, **QUIET)
@given(**CASES)
def test_a_model_survives_every_format_and_layout(case, naming, grouped, ends):
    check_all_directions(case, naming, grouped, ends)


@pytest.mark.slow
@settings(max_examples=300, **QUIET)
@given(**CASES)
def test_many_models_survive_every_format_and_layout(case, naming, grouped, ends):
    check_all_directions(case, naming, grouped, ends)


def test_a_legacy_checkpoint_tells_the_replicas_that_its_experts_need():
    """Two expert ranks beside three tensor ranks, which do not divide by two; the layer itself is dense."""
    experts = MixtureOfExperts(num_experts=2, top_k=1, ffn_hidden_size=12, dense_layers=(0,), score="sigmoid")
    spec = ModelSpec(
        family="glm4_moe", vocab_size=7, hidden_size=6, ffn_hidden_size=6, num_layers=1, num_heads=6, num_kv_heads=6,
        head_dim=2, max_position=64, rms_norm_eps=1e-6, rope_theta=1e4, qkv_bias=True, moe=experts,
    )  # fmt: skip
    layout = ParallelLayout(tp=3, dp=2, ep=2, etp=1)
    check_all_directions((spec, layout, False), "te", False, ("legacy", "dist"))


def check_all_directions(case, naming, grouped, ends):
    spec, layout, value_head = case
    model = random_model(spec, value_head)
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.items()}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_hf(place / "model", model.items(), table)
        source = open_source(place / "model", spec=spec, value_head=value_head)
        options = {"layout": layout, "naming": naming}
        receipts = [written(source, place / "dist", "torch_dist", **options)]
        kinds = {"dist": "torch_dist", "legacy": "legacy"}
        try:
            receipts.append(written(source, place / "legacy", "legacy", **options, grouped_experts=grouped))
        except LayoutError as error:
            # The names of its shards know no expert tensor parallelism.
            assert layout.etp != layout.tp and "etp" in str(error)
            del kinds["legacy"]
        for kind in kinds:
            again = open_source(place / kind, spec=spec, value_head=value_head)
            receipts.append(written(again, place / f"{kind}-hf", "hf"))
            assert bits(place / f"{kind}-hf") == bits(place / "model")
        # From the one format to the other, or to another naming of the same.
        start, stop = (name if name in kinds else "dist" for name in ends)
        middle = open_source(place / start, spec=spec, value_head=value_head)
        receipts.append(written(middle, place / "other", kinds[stop], layout=layout, naming="te"))
        last = open_source(place / "other", spec=spec, value_head=value_head)
        receipts.append(written(last, place / "hf", "hf"))
        assert bits(place / "hf") == bits(place / "model")
    assert len({receipt["target"]["digest"] for receipt in receipts}) == 1
    sums = {name: f"{checksum(tensor, whole(tuple(tensor.shape))):016x}" for name, tensor in model.items()}
    assert {name: entry["checksum"] for name, entry in receipts[-1]["tensors"].items()} == sums
    assert all(torch.isfinite(tensor.float()).all() for tensor in model.values())
