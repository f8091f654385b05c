"""Random weights that do not depend on the layout.

Megatron-Core draws weights in the order of construction, so another pipeline or tensor split starts another model.
Here each canonical tensor has a generator of its own, seeded by the run's seed and its name, and a rank keeps its part.

Invariant: two layouts of one spec and seed hold the same numbers in every canonical tensor, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.models.rules import ROUTING_BIAS, VALUE_HEAD
from megarl.models.spec import ModelSpec
from megarl.weights.region import Region

# The projections that write into the residual stream: attention's, and those of dense, routed and shared experts.
_RESIDUAL_PROJECTIONS = (".o_proj.weight", ".down_proj.weight", ".w2.weight")


def random_weights(spec: ModelSpec, *, seed: int) -> Callable[[Region], Tensor]:
    """A source of initial weights for ``weights.pieces.fill``.

    Norms are one, biases and a critic's head zero. Matrices are normal with deviation ``init_std``, divided by
    ``sqrt(2 * num_layers)`` where they write into the residual stream (GPT-2, section 2.3; Megatron-Core's default).

    Returns:
        a function from a region to its part of the canonical tensor, float32 in the shape of the region's box.
    """

    def part(region: Region) -> Tensor:
        name = region.tensor
        if name.endswith("norm.weight"):
            return torch.ones(region.shape)
        if name.endswith((".bias", ROUTING_BIAS)) or name == VALUE_HEAD:
            return torch.zeros(region.shape)
        is_residual = name.endswith(_RESIDUAL_PROJECTIONS)
        std = spec.init_std / math.sqrt(2 * spec.num_layers) if is_residual else spec.init_std
        return _normal(name, region.tensor_shape, seed=seed)[region.slices] * std

    return part


def _normal(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Standard normal numbers [shape] float32 of one canonical tensor, from the seed and the name alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator)
