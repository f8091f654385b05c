"""Models as numbers and data: Hugging Face configurations, weight rules, the tiny model of the quick start.

Loads no torch: a login node plans with it.
"""

from __future__ import annotations

from megarl.models.registry import FAMILIES, family_named, load_spec, spec_from_config
from megarl.models.spec import ModelSpec, RopeScaling

__all__ = ["FAMILIES", "ModelSpec", "RopeScaling", "family_named", "load_spec", "spec_from_config"]
