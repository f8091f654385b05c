"""DeepSeek-V3 from TP8 x PP16 x EP32 to an engine of TP32: planned and proved in seconds of one core."""

from __future__ import annotations

import time

import pytest

from megarl.models import spec_from_config
from megarl.parallel.grid import ParallelLayout
from megarl.weights.check import check_plan
from megarl.weights.engine_layout import engine_replicas
from megarl.weights.layout import megatron_regions
from megarl.weights.plan import collector_paused, plan
from tests.unit.models.test_load_spec import DEEPSEEK_V3


@pytest.mark.slow
def test_deepseek_v3_is_planned_in_seconds() -> None:
    spec = spec_from_config(DEEPSEEK_V3)
    layout = ParallelLayout(tp=8, pp=16, dp=4, ep=32, pipeline="Etttt|(tttt|)*14tL")
    start = time.process_time()
    with collector_paused():
        sources = {
            rank: megatron_regions(spec, layout, layout.coordinate(rank), naming="te", grouped_experts=True)
            for rank in range(layout.world_size)
        }
        destinations = engine_replicas(spec, replicas=1, tp=32)
        made = plan(sources, destinations)
        planned = time.process_time() - start
        proof = check_plan(made)
        proved = time.process_time() - start - planned
    print(f"regions and plan {planned:.1f} s, proof {proved:.1f} s, {len(made.copies)} copies, {made.digest}")
    assert proof.num_elements == sum(region.numel for regions in destinations.values() for region in regions)
    experts = 58 * 256 * 3 * 7168 * 2048
    assert proof.num_elements > spec.num_parameters() > experts
    # Every expert lies on one rank: experts go over the wire once, whoever else has them.
    assert sum(c.box[0][1] - c.box[0][0] for c in made.copies if ".experts.7.gate_proj" in c.tensor) == 58 * 2048
    sent = [sum(1 for _ in made.sends(rank)) for rank in range(layout.world_size)]
    assert min(sent) > 0
    assert planned < 60, "seconds, not minutes"
