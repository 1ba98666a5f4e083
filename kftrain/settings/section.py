"""Base classes of all sections of the configuration, number types with bounds, and marks for what a key changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from kftrain.core.plain import MAX_INTEGER

Value = TypeVar("Value")

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Amount = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


@dataclass(frozen=True)
class Effect:
    """Mark of a key in its annotation: does another value make another training, whose checkpoints do not fit?

    Args:
        changes_training: True for what changes the numbers that are computed; False for layout, pace and places.
        counted_as: Entry of the training identity that stands for the key; empty: the key itself.
        added: Release that added the key, if it is later than 0.1. Such a key enters the identity only where it differs
            from its default, so that runs of earlier releases keep theirs. Each new key needs it.
    """

    changes_training: bool
    counted_as: str = ""
    added: str = ""


ChangesTraining = Annotated[Value, Effect(changes_training=True)]
KeepsTraining = Annotated[Value, Effect(changes_training=False)]
ChangesDataset = Annotated[Value, Effect(changes_training=True, counted_as="dataset")]
"""Type of a key that changes the shards: the digest of the dataset stands for it in the training identity."""


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
        """Refuse true and false where a number is expected: Python takes true for 1."""
        kinds = str(cls.model_fields[info.field_name or ""].annotation)
        has_truth = any(isinstance(part, bool) for part in (value if isinstance(value, list) else [value]))
        if has_truth and re.search(r"\b(int|float)\b", kinds) and "bool" not in kinds:
            raise ValueError("must be a number")
        return value

    @classmethod
    def effects(cls) -> dict[str, Effect]:
        """Return the mark of each key that is no section of its own; keys of sections within this one have theirs."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, Effect)}

    def identity(self) -> dict[str, Any]:
        """Return as plain data the keys that count when trainings are compared: two with equal ones are the same.

        A key that another entry stands for is left out, and so is a later one at its default (see `Effect`).
        """
        identity = self.model_dump(mode="json", include=set(self.model_extra or ()))
        effects, document = self.effects(), self.model_dump(mode="json", by_alias=False)
        for name, value in self:
            if (field := type(self).model_fields.get(name)) is None:  # a plug-in's further key: all of them count
                continue
            plain = document[name]
            if isinstance(value, Section):
                counts = bool(plain := value.identity())
            else:
                effect = effects[name]
                counts = effect.changes_training and not effect.counted_as
                counts &= not effect.added or value != field.get_default(call_default_factory=True)
            if isinstance(value, tuple):
                plain = [part.identity() if isinstance(part, Section) else part for part in value]
            if counts:
                identity[field.alias or name] = plain
        return identity


class Plugin(Section):
    """A section whose `kind` names a built-in or a user's `module:attr`; the other keys go to what it names."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    def options(self) -> dict[str, Any]:
        """Return all keys but `kind`."""
        return dict(self.model_extra or {})
