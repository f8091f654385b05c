"""Cases of the rules about layouts, for ``test_rules.py``: the key of the breach, what breaks a rule, what keeps it."""

from __future__ import annotations

CRITIC = ["algorithm.advantage.kind=gae", "+critic.warmup_steps=0"]

LAYOUT_CASES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "sequence_parallel_needs_tp": [
        (
            "actor.layout.sequence_parallel",
            ["actor.layout.sequence_parallel=true"],
            ["actor.layout.sequence_parallel=true", "actor.layout.tp=2"],
        ),
        (
            "critic.layout.sequence_parallel",
            [*CRITIC, "critic.layout.sequence_parallel=true"],
            [*CRITIC, "critic.layout.sequence_parallel=true", "critic.layout.tp=2"],
        ),
    ],
    "experts_divide_a_stage": [
        ("actor.layout.ep", ["actor.layout.ep=2"], ["actor.layout.ep=2", "actor.layout.dp=2"]),
        (
            "critic.layout.ep",
            [*CRITIC, "critic.layout.etp=2", "critic.layout.ep=2", "critic.layout.dp=2"],
            [*CRITIC, "critic.layout.etp=2", "critic.layout.ep=2", "critic.layout.dp=4"],
        ),
    ],
    "uneven_stages_need_pipeline": [
        (
            "actor.layout.num_layers_in_first_stage",
            ["actor.layout.num_layers_in_first_stage=1"],
            ["actor.layout.num_layers_in_first_stage=1", "actor.layout.pp=2"],
        )
    ],
    "virtual_stages_need_pipeline": [
        ("actor.layout.vpp", ["actor.layout.vpp=2"], ["actor.layout.vpp=2", "actor.layout.pp=2"]),
    ],
    "spelled_pipeline_is_whole": [
        (
            "actor.layout.pipeline",
            ["actor.layout.pp=2", "actor.layout.pipeline='Et|t|tL'"],
            ["actor.layout.pp=2", "actor.layout.pipeline='Et|ttL'"],
        ),
        (
            "critic.layout.pipeline",
            [
                *CRITIC,
                "critic.layout.pp=2",
                "critic.layout.pipeline='Et|tL'",
                "critic.layout.num_layers_in_first_stage=1",
            ],
            [*CRITIC, "critic.layout.pp=2", "critic.layout.pipeline='Et|tL'"],
        ),
    ],
}
