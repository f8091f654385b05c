"""megarl: Megatron-based, 3D-parallel reinforcement-learning post-training of language models.

Importing this package loads no torch, so that a login node can check a configuration.
"""

__version__ = "0.1.0"
