"""Conversion of checkpoints between formats and layouts: files in, files out, by the plan. Loads no torch."""
