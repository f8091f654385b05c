"""What the fork server of ``ranks.py`` imports once: torch and Megatron-Core, not yet adapted to a device."""

from __future__ import annotations

import torch

import megarl.train.megatron  # noqa: F401 - imports Megatron-Core quietly

torch.set_num_threads(1)
