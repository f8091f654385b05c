"""What the fork server of ``ranks.py`` imports once: torch and Megatron-Core, quiet and adapted to the CPU."""

from __future__ import annotations

import torch

from megarl.platform.cpu import adapt_megatron

torch.set_num_threads(1)
adapt_megatron()
