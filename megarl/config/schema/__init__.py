"""The only schema of the configuration: pydantic models, no torch. Defaults live here, YAML holds departures."""

from megarl.config.schema.run import SftConfig, TrainConfig

__all__ = ["SftConfig", "TrainConfig"]
