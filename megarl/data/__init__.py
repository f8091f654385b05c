"""Samples and where they come from: the ``Batch``, the field table, prompt and chat sources, packing, balancing."""
