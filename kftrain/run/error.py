"""`error.json`: why a run failed, as a document that every launcher, stage and command writes and reads.

Whoever reports a failure reads it last and must not fail over it: one that is broken, of another version of kftrain or
of before this schema is shown as far as it can be understood.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kftrain import errors, storage
from kftrain.errors import BUG_CODE, DataError, FailureClass, KftrainError, is_error_document

SCHEMA_VERSION = 1


class ErrorDocument(BaseModel):
    """`error.json`, and `failure.json`: what a launcher found out about a job that failed."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    schema_version: int = SCHEMA_VERSION
    kind: str = ""
    """Name of the error's type; empty where a process left no error of its own."""
    exit_code: int = BUG_CODE
    line: str = "it left no message"
    """All of it on one line."""
    failure_class: FailureClass = FailureClass.UNKNOWN
    """Decides the advice."""
    what: str = ""
    where: str = ""
    value: str | None = None
    """The offending value, shortened; None: there is none to show."""
    fix: str = ""
    stage: str = ""
    """Stage of the pipeline, or task of the job."""
    time: float | None = None
    """Seconds since the epoch."""
    attempt: int | None = None
    rank: int | None = None
    """The process that failed first, where one is known."""
    node_rank: int | None = None
    node: str = ""
    pod: str = ""
    last_lines: list[str] = []
    """What the worker that failed printed last."""
    warnings: list[str] = []
    """What went wrong after the failure, such as the clean-up."""

    @classmethod
    def of(cls, error: BaseException, **known: Any) -> ErrorDocument:
        """The document of an exception: ours keep their fields, a bug keeps its last frame."""
        return cls.received({**errors.error_to_dict(error), **known})

    @classmethod
    def received(cls, found: Any) -> ErrorDocument:
        """The document that somebody else wrote, as far as it is sound; never raises.

        Where it names no class that is known here, the class follows from kind and exit code.
        """
        fields = _flat(found) if isinstance(found, Mapping) else {}
        try:
            cls.model_validate(fields)
        except ValidationError as error:
            broken = {detail["loc"][0] for detail in error.errors()}
            if broken & {"where", "value", "fix"}:  # what is left of the parts would say less than the line
                broken.add("what")
            fields = {name: value for name, value in fields.items() if name not in broken}
        document = cls.model_validate(fields)
        if "failure_class" in document.model_fields_set:
            return document
        kind = errors.class_of(document.kind, document.exit_code)
        return document.model_copy(update={"failure_class": kind})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `storage.publish_json` writes it."""
        return self.model_dump(mode="json")

    def known(self) -> dict[str, Any]:
        """The fields that say something, for people."""
        return {name: value for name, value in self.to_dict().items() if value not in (None, "", [])}

    def to_error(self) -> KftrainError:
        """The error that another process may raise."""
        return errors.error_from_dict(self.to_dict())

    def found_out(self, finding: ErrorDocument | None) -> ErrorDocument:
        """With what the launcher found out about the job: which kind of failure it was, and where."""
        if finding is None:
            return self
        names = ("failure_class", "attempt", "rank", "node_rank", "node", "pod", "last_lines")
        return self.model_copy(update={name: getattr(finding, name) for name in names})


def of_stage(stage: str, error: BaseException) -> ErrorDocument:
    """What a stage leaves that failed now."""
    return ErrorDocument.of(error, stage=stage, time=time.time())


def read_error(uri: str) -> ErrorDocument | None:
    """What the error.json at `uri` says; None where there is none.

    One that is damaged is an error of its own: it must not hide that the run failed, nor stop who reports that.
    """
    try:
        content = storage.read_bytes(uri)
    except FileNotFoundError:
        return None
    try:
        found = storage.decode_json(content, uri)
    except DataError:
        found = None
    if not is_error_document(found):
        line = f"{uri}: error.json is damaged, so why the run failed is not known: {content[:200]!r}"
        return ErrorDocument(line=line)
    return ErrorDocument.received(found)


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a document; one of before had what the launcher found out in a part of its own, `failure`."""
    fields = {str(name): value for name, value in found.items() if name != "schema_version"}
    finding = fields.pop("failure", None)
    known = {kind.value for kind in FailureClass}
    if isinstance(finding, Mapping) and str(finding.get("failure_class")) in known:
        names = ("failure_class", "rank", "node", "pod", "last_lines")
        fields.update({name: finding[name] for name in names if name in finding})
    return fields
