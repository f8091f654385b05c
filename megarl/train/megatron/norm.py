"""RMSNorm for devices without Transformer Engine, because Megatron-Core's torch norm refuses sequence parallelism.

See transformer/torch_norm.py:33 in 0.16.1.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv:1910.07467), statistics in float32.

    Under sequence parallelism each rank normalises its own tokens, and the flag on the weight makes Megatron-Core sum
    its gradient over the tensor-parallel ranks (distributed/finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalised tensor in the shape and dtype of ``hidden``."""
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
