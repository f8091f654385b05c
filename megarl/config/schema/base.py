"""What every part of the schema is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, unknown keys and implicit conversions forbidden. Field docstrings are the documentation.

    Strict: ``true`` is no integer and ``"3"`` no number, so a slip in a YAML file is an error and not a guess; an
    integer is a valid float. NaN and infinity are refused.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )
