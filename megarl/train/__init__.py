"""Training: the engine protocol, and Megatron-Core behind it."""
