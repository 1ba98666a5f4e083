"""`error.json`: why a run failed, as a document that every launcher, stage and command writes and reads.

Whoever reports a failure reads it last and must not fail over it: one that is broken, of another version of kftrain or
of before this schema is shown as far as it can be understood.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kftrain import errors
from kftrain.core import storage
from kftrain.errors import BUG_CODE, DataError, FailureClass, KftrainError, is_error_document

SCHEMA_VERSION = 1


class ErrorDocument(BaseModel):
    """The content of `error.json`, which a stage leaves, and of `failure.json`, which a launcher writes about a job."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    schema_version: int = SCHEMA_VERSION
    kind: str = ""
    """Name of the error's type; empty where a process left no error of its own."""
    exit_code: int = BUG_CODE
    line: str = "it left no message"
    """The whole error on one line."""
    failure_class: FailureClass = FailureClass.UNKNOWN
    """Class of the failure; it decides the advice."""
    what: str = ""
    where: str = ""
    value: str | None = None
    """The offending value, shortened; None: there is none to show."""
    fix: str = ""
    stage: str = ""
    """Stage of the pipeline, or task of the job."""
    time: float | None = None
    """Time of the failure, in seconds since the epoch."""
    attempt: int | None = None
    rank: int | None = None
    """The process that failed first, where one is known."""
    node_rank: int | None = None
    node: str = ""
    pod: str = ""
    last_lines: list[str] = []
    """Last lines that the failed worker printed."""
    warnings: list[str] = []
    """Things that went wrong after the failure, such as the clean-up."""

    @classmethod
    def of(cls, error: BaseException, **known: Any) -> ErrorDocument:
        """Build the document of an exception: ours keep their fields, a bug keeps its last frame."""
        return cls.salvage({**errors.error_to_dict(error), **known})

    @classmethod
    def salvage(cls, content: Any) -> ErrorDocument:
        """Take over a document that somebody else wrote, as far as it is sound; never raises.

        Where the document names no class that is known here, the class follows from kind and exit code.
        """
        fields = _flatten_fields(content) if isinstance(content, Mapping) else {}
        try:
            cls.model_validate(fields)
        except ValidationError as error:
            broken = {detail["loc"][0] for detail in error.errors()}
            if broken & {"where", "value", "fix"}:  # without them `what` says less than the line, so that goes too
                broken.add("what")
            fields = {name: value for name, value in fields.items() if name not in broken}
        document = cls.model_validate(fields)
        if "failure_class" in document.model_fields_set:
            return document
        kind = errors.class_of(document.kind, document.exit_code)
        return document.model_copy(update={"failure_class": kind})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `storage.publish_json` writes it."""
        return self.model_dump(mode="json")

    def list_known_fields(self) -> dict[str, Any]:
        """Return the fields that say something, for people."""
        return {name: value for name, value in self.to_dict().items() if value not in (None, "", [])}

    def to_error(self) -> KftrainError:
        """Build the exception that this process may raise in the place of the one that wrote the document."""
        return errors.error_from_dict(self.to_dict())

    def with_findings(self, finding: ErrorDocument | None) -> ErrorDocument:
        """Return this document with what the launcher found out about the job: the class of failure, and the place."""
        if finding is None:
            return self
        names = ("failure_class", "attempt", "rank", "node_rank", "node", "pod", "last_lines")
        return self.model_copy(update={name: getattr(finding, name) for name in names})


def summarize_failure(stage: str, error: BaseException) -> ErrorDocument:
    """Build the document that a stage leaves when it fails; its time is now."""
    return ErrorDocument.of(error, stage=stage, time=time.time())


def read_error(uri: str) -> ErrorDocument | None:
    """Read the error.json at `uri`; None where there is none.

    A damaged one becomes an error of its own: it must not hide that the run failed, nor stop who reports that.
    """
    try:
        content = storage.read_bytes(uri)
    except FileNotFoundError:
        return None
    try:
        document = storage.decode_json(content, uri)
    except DataError:
        document = None
    if not is_error_document(document):
        line = f"{uri}: error.json is damaged, so why the run failed is not known: {content[:200]!r}"
        return ErrorDocument(line=line)
    return ErrorDocument.salvage(document)


def _flatten_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document; older ones held the launcher's findings in a part of its own, `failure`."""
    fields = {str(name): value for name, value in document.items() if name != "schema_version"}
    finding = fields.pop("failure", None)
    known = {kind.value for kind in FailureClass}
    if isinstance(finding, Mapping) and str(finding.get("failure_class")) in known:
        names = ("failure_class", "rank", "node", "pod", "last_lines")
        fields.update({name: finding[name] for name in names if name in finding})
    return fields
