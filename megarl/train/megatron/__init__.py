"""Megatron-Core models under training. The only place, with platform, that imports megatron."""

from megarl.platform.packages import import_megatron

# Before any module of this package imports Megatron-Core for itself: once, and without its warnings about packages
# that are missing by design.
import_megatron()
