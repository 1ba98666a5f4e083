"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kftrain.plain import MAX_INTEGER

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


class Plugin(Section):
    """A section whose `kind` names a built-in or a user's `module:attr`; the other keys go to what it names."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    def options(self) -> dict[str, Any]:
        """All keys but `kind`."""
        return dict(self.model_extra or {})
