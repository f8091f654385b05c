"""What the fork server of ``ranks.py`` imports once: torch, Megatron-Core and megarl, not yet adapted to a device."""

from __future__ import annotations

import pytest  # noqa: F401 - modules of tests import it
import torch

import megarl.train.megatron.engine  # noqa: F401 - imports Megatron-Core quietly, and what nearly every call needs

torch.set_num_threads(1)
