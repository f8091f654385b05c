"""Scored batches as a step has them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.batch import Batch, Ragged


def scored(
    scores: Sequence[float],
    groups: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    components: Sequence[dict[str, float]] | None = None,
    is_greedy: Sequence[bool] | None = None,
    first: int = 0,
) -> Batch:
    """Rows with these scores; one prompt token, responses of 3 tokens unless said otherwise."""
    count = len(scores)
    lengths = [3] * count if lengths is None else lengths
    generator = torch.Generator().manual_seed(first)
    columns = {} if is_greedy is None else {"is_greedy": torch.tensor(is_greedy)}
    found = [{}] * count if components is None else components
    return Batch.create(
        sample_id=torch.arange(first, first + count),
        group_id=torch.tensor(groups),
        prompts=Ragged.from_rows([[5]] * count, torch.int64),
        responses=Ragged.from_rows([[7] * length for length in lengths], torch.int64),
        response_mask=Ragged.from_rows([[True] * length for length in lengths], torch.bool),
        rollout_log_probs=Ragged.from_rows(
            [(-torch.rand(length, generator=generator)).tolist() for length in lengths], torch.float32
        ),
        finish_reason=["stop"] * count,
        scores=torch.tensor(scores, dtype=torch.float32),
        reward_components=[{**given, "score": score} for given, score in zip(found, scores, strict=True)],
        **columns,
    )
