"""Degrees of parallelism of one role and where its processes run."""

from __future__ import annotations

from pydantic import Field

from megarl.config.schema.base import StrictModel
from megarl.parallel.grid import ParallelLayout


class LayoutConfig(StrictModel):
    """Megatron's parallel degrees of one role; ``tp * pp * cp * dp`` processes."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel size (1F1B)."""
    vpp: int = Field(1, ge=1)
    """Virtual stages of each pipeline stage (interleaved 1F1B): less waiting for more messages; needs pp > 1."""
    cp: int = Field(1, ge=1)
    """Context-parallel size: ranks that share the tokens of every sequence, padded to a multiple of 2 * cp."""
    dp: int = Field(1, ge=1)
    """Data-parallel size."""
    ep: int = Field(1, ge=1)
    """Expert-parallel size: ranks of a pipeline stage that share out its experts; needs a model with experts."""
    etp: int = Field(1, ge=1)
    """Ranks that share the matrices of each expert, whatever tp is; ep * etp divides the ranks of a stage."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence; needs tp > 1."""
    num_layers_in_first_stage: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage where stages are uneven; None divides evenly."""
    num_layers_in_last_stage: int | None = Field(None, ge=1)
    """Layers of the last pipeline stage where stages are uneven; None divides evenly."""
    pipeline: str | None = None
    """Every stage spelled in Megatron-Core's letters, ``Ettt|(tt|)*2tL``: E the embedding, t a layer, L the head; with
    virtual stages the first of all stages, then the second."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def grid(self) -> ParallelLayout:
        """The grid that ranks are computed on. Raises LayoutError for degrees that contradict each other."""
        return ParallelLayout(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
            dp=self.dp,
            ep=self.ep,
            etp=self.etp,
            sequence_parallel=self.sequence_parallel,
            first_stage_layers=self.num_layers_in_first_stage,
            last_stage_layers=self.num_layers_in_last_stage,
            pipeline=self.pipeline,
        )
