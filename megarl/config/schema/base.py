"""What every part of the schema is made of."""

from __future__ import annotations

from typing import Any

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

    @classmethod
    def implied(cls, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Values that a key of this section stands for, and that key; given values go before them.

        Loading needs them before it fills in the defaults, which would otherwise look like given values.
        """
        return {}, ""
