"""Configurations that break and keep the rules of optimizers (``test_rules.py``)."""

from __future__ import annotations

from tests.unit.config.layout_rules import CRITIC

GPU = ["cluster.device=cuda", "cluster.gpus_per_node=8"]
PLAIN = ["critic.optimizer.distributed=false"]
LINEAR = "actor.optimizer.schedule.kind=linear"
WSD = "actor.optimizer.schedule.kind=wsd"
SGD = "actor.optimizer.kind=sgd"

OPTIMIZER_CASES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "decay_has_an_end": [
        (
            "actor.optimizer.schedule.decay_steps",
            [LINEAR, "actor.optimizer.schedule.decay_steps=5", "actor.optimizer.schedule.warmup_steps=5"],
            [LINEAR, "actor.optimizer.schedule.decay_steps=6", "actor.optimizer.schedule.warmup_steps=5"],
        ),
        (
            "actor.optimizer.schedule.cooldown_steps",
            [WSD, "actor.optimizer.schedule.decay_steps=9", "actor.optimizer.schedule.cooldown_steps=10"],
            [WSD, "actor.optimizer.schedule.decay_steps=9", "actor.optimizer.schedule.cooldown_steps=9"],
        ),
        (
            "actor.optimizer.schedule.min_lr",
            [LINEAR, "actor.optimizer.schedule.decay_steps=9", "actor.optimizer.schedule.min_lr=1"],
            [LINEAR, "actor.optimizer.schedule.decay_steps=9", "actor.optimizer.schedule.min_lr=1e-7"],
        ),
    ],
    "only_adam_is_sharded": [
        ("actor.optimizer.distributed", [SGD], [SGD, "actor.optimizer.distributed=false"]),
        (
            "critic.optimizer.distributed",
            [*CRITIC, "critic.optimizer.kind=muon"],
            [*CRITIC, "critic.optimizer.kind=muon", "critic.optimizer.distributed=false"],
        ),
    ],
    "gather_overlaps_in_buckets": [
        (
            "actor.optimizer.overlap_param_gather",
            ["actor.optimizer.overlap_param_gather=true"],
            ["actor.optimizer.overlap_param_gather=true", "actor.optimizer.overlap_grad_reduce=true"],
        ),
        (
            "critic.optimizer.overlap_param_gather",
            [
                *CRITIC,
                "critic.optimizer.overlap_param_gather=true",
                "critic.optimizer.overlap_grad_reduce=true",
                *PLAIN,
            ],
            [*CRITIC, "critic.optimizer.overlap_param_gather=true", "critic.optimizer.overlap_grad_reduce=true"],
        ),
    ],
    "host_updates_adams_shards": [
        (
            "actor.optimizer.cpu_offload_fraction",
            ["actor.optimizer.cpu_offload_fraction=1", "actor.optimizer.distributed=false"],
            ["actor.optimizer.cpu_offload_fraction=0.5"],
        ),
        (
            "critic.optimizer.cpu_offload_fraction",
            [*GPU, *CRITIC, "critic.optimizer.cpu_offload_fraction=1", "critic.optimizer.precision_aware=true"],
            [*CRITIC, "critic.optimizer.cpu_offload_fraction=1"],
        ),
    ],
    "precision_is_transformer_engines": [
        (
            "actor.optimizer.precision_aware",
            ["actor.optimizer.precision_aware=true"],
            [*GPU, "actor.optimizer.precision_aware=true", "actor.optimizer.exp_avg_dtype=bfloat16"],
        ),
        (
            "actor.optimizer.precision_aware",
            [*GPU, "actor.optimizer.precision_aware=true", "actor.engine.dtype=float32"],
            [*GPU, "actor.optimizer.precision_aware=true"],
        ),
        (
            "critic.optimizer.precision_aware",
            [*GPU, *CRITIC, "critic.optimizer.precision_aware=true", *PLAIN],
            [*GPU, *CRITIC, "critic.optimizer.precision_aware=true", "critic.optimizer.exp_avg_sq_dtype=float16"],
        ),
        (
            "actor.optimizer.main_grads_dtype",
            ["actor.optimizer.main_grads_dtype=bfloat16"],
            ["actor.optimizer.main_grads_dtype=bfloat16", "actor.optimizer.cpu_offload_fraction=1"],
        ),
        (
            "actor.optimizer.main_grads_dtype",
            [
                "actor.engine.dtype=float32",
                "actor.optimizer.main_grads_dtype=bfloat16",
                "actor.optimizer.cpu_offload_fraction=1",
            ],
            [*GPU, "actor.optimizer.main_grads_dtype=bfloat16", "actor.optimizer.precision_aware=true"],
        ),
    ],
}
