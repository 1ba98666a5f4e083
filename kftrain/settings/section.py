"""What every section of the configuration is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from kftrain.core.plain import MAX_INTEGER

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Amount = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


class Section(BaseModel):
    """A section: unknown keys are refused, nothing changes after it was read, fields are described where they stand."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1."""
        kinds = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and re.search(r"\b(int|float)\b", kinds) and "bool" not in kinds:
            raise ValueError("must be a number")
        return value


class Plugin(Section):
    """A section whose `kind` names a built-in or a user's `module:attr`; the other keys go to what it names."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    def options(self) -> dict[str, Any]:
        """All keys but `kind`."""
        return dict(self.model_extra or {})
