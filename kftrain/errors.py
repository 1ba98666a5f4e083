"""What can go wrong, as types: each is one line for the user and one exit code for whoever retries.

    KftrainError
    ├── ConfigError          10  the configuration is wrong
    │   └── GpuMemoryError       a process needs more memory than its GPU has
    ├── DataError            11  source or shards are missing, empty, unreadable or not what their manifest says
    │   └── EmptyWindowError     nothing of the source lies in the window of time that was asked for
    ├── CheckpointError      12  no usable checkpoint, or one of another training
    │   └── OtherTrainingError   the run is another training than the one that was asked for; nothing was changed
    │       └── OldOrderError 10     an earlier release began it, and only that one has its order of samples
    ├── LaunchError          13  the job cannot be started
    │   └── UnavailableError     Kubeflow Pipelines cannot be reached, or is not well: it may be in a moment
    ├── EvaluationError      14  the evaluation cannot be done
    ├── TrackingError        15  MLflow (tracking or registry) refused or cannot be reached
    │   └── MlflowError          MLflow itself failed: what it was asked for may be there all the same
    ├── UserCodeError        16  the user's own task, model or source raised
    ├── FencedError          17  another launcher, job or attempt holds the run
    │   └── OtherJobError        a job with another specification holds it
    ├── LauncherGoneError    18  the launcher vanished; stopped after a commit
    ├── DivergedError        19  the loss is not finite
    ├── InterruptedByUser   130  Ctrl-C
    ├── RetryableError      138  this attempt failed, the next may not
    │   ├── LostPeerError        contact with another process was lost
    │   └── StorageError         storage is full or away; when attempts are used up it still is this
    │       └── StorageAwayError     it cannot be reached
    ├── HangError           140  the watchdog ended a hang
    └── Preempted           143  stopped by SIGTERM after a committed checkpoint

Codes below 128 are permanent; the training operator (`restartPolicy: ExitCode`) retries those from 128 on, and so does
our local launcher. Anything else that is raised is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
import traceback
from enum import Enum
from typing import Any, ClassVar, TypeVar

from kftrain.core.credentials import redact
from kftrain.core.printable import printable

Error = TypeVar("Error", bound="KftrainError")

NO_VALUE: Any = object()
"""Stands for "no value to show", since None may well be the offending value."""

FIRST_RETRYABLE_CODE = 128
"""The training operator's border between permanent and retryable exit codes."""

BUG_CODE = 1
"""What an unexpected exception exits with: Python's own code, permanent for the operator."""


class FailureClass(str, Enum):
    """What kind of failure it is: decides the advice."""

    CONFIG = "configuration"
    DATA = "data"
    HOST_MEMORY = "out of memory on the host"
    GPU_MEMORY = "out of memory on the GPU"
    NETWORK = "lost connection between workers"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    NODE = "node lost"
    STEP_MEMORY = "out of memory in a step"
    IMAGE = "image"
    STEP_IMAGE = "image of a step"
    VOLUME = "volume"
    QUOTA = "quota"
    SCHEDULING = "scheduling"
    HANG = "hang"
    DEADLINE = "deadline"
    DIVERGED = "diverged"
    USER_CODE = "user code"
    OPERATOR = "training operator"
    DELETED = "deleted"
    TERMINATED = "terminated"
    INTERRUPTED = "interrupted"
    CHECKPOINT = "checkpoint"
    OTHER_TRAINING = "another training"
    LAUNCH = "launch"
    EVALUATION = "evaluation"
    TRACKING = "tracking"
    FENCED = "superseded by a newer attempt"
    LAUNCHER = "launcher vanished"
    BUG = "bug"
    UNKNOWN = "unknown"


class KftrainError(Exception):
    """An expected failure: what happened, where, the offending value, and what to do about it."""

    exit_code: ClassVar[int] = BUG_CODE
    failure_class: FailureClass = FailureClass.UNKNOWN
    """Of the type; who gives something up for a known reason sets that one's on the error, see `of_class`."""

    def __init__(self, what: str, *, where: str = "", value: Any = NO_VALUE, fix: str = "") -> None:
        self.what = redact(what)
        self.where = redact(where)
        self.fix = redact(fix)
        self.value = value
        super().__init__(self.line)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a pickle, for another process."""
        return error_from_dict, (self.to_dict(),)

    def of_class(self: Error, kind: FailureClass) -> Error:
        """The same error, of another class than its type: what was given up because of an older failure is of its."""
        self.failure_class = kind
        return self

    @property
    def line(self) -> str:
        """The whole error on one line, as the CLI prints it."""
        shown = "" if self.value is NO_VALUE else f" (got {_shorten(self.value)})"
        where = f"{self.where}: " if self.where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return " ".join(printable(f"{where}{self.what}{shown}{fix}").split())

    @property
    def retryable(self) -> bool:
        """Whether another attempt may succeed without anybody changing anything."""
        return self.exit_code >= FIRST_RETRYABLE_CODE

    def to_dict(self) -> dict[str, Any]:
        """What `error.json` holds: enough for another process to show and to raise the same error."""
        return {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "failure_class": self.failure_class.value,
            "line": self.line,
            "what": self.what,
            "where": self.where,
            "value": None if self.value is NO_VALUE else _shorten(self.value),
            "fix": self.fix,
        }


class ConfigError(KftrainError):
    """The configuration is wrong."""

    exit_code = 10
    failure_class = FailureClass.CONFIG


class GpuMemoryError(ConfigError):
    """A process needs more memory than its GPU has."""

    failure_class = FailureClass.GPU_MEMORY


class DataError(KftrainError):
    """A source or its shards are missing, empty, unreadable, or not what their manifest says."""

    exit_code = 11
    failure_class = FailureClass.DATA


class EmptyWindowError(DataError):
    """The source is there, and nothing of it lies in the window of time that was asked for: there is nothing new."""


class CheckpointError(KftrainError):
    """No usable checkpoint, or one that belongs to another training."""

    exit_code = 12
    failure_class = FailureClass.CHECKPOINT


class OtherTrainingError(CheckpointError):
    """The run is another training than the one that was asked for; it is left as it was."""

    failure_class = FailureClass.OTHER_TRAINING


class OldOrderError(OtherTrainingError):
    """The run was begun with an order of samples that only an earlier release has; it is left as it was."""

    exit_code = 10


class LaunchError(KftrainError):
    """A job cannot be started, or ended without the file that proves its success."""

    exit_code = 13
    failure_class = FailureClass.LAUNCH


class UnavailableError(LaunchError):
    """Kubeflow Pipelines cannot be reached or is not well: it may be in a moment."""


class EvaluationError(KftrainError):
    """The evaluation cannot be done."""

    exit_code = 14
    failure_class = FailureClass.EVALUATION


class TrackingError(KftrainError):
    """MLflow, tracking or registry, refused a request or cannot be reached."""

    exit_code = 15
    failure_class = FailureClass.TRACKING


class MlflowError(TrackingError):
    """MLflow itself failed or cannot be reached, or its artifacts: what it was asked for may be there all the same."""


class UserCodeError(KftrainError):
    """The user's own task, model or source raised; its traceback goes to the log."""

    exit_code = 16
    failure_class = FailureClass.USER_CODE


class FencedError(KftrainError):
    """Another launcher, job or attempt holds the run; this one must not write to it."""

    exit_code = 17
    failure_class = FailureClass.FENCED
    BY_ATTEMPT = "a newer attempt holds this run"
    BY_LAUNCHER = "another launcher holds this run"


class OtherJobError(FencedError):
    """A job with another specification holds the run."""


class LauncherGoneError(KftrainError):
    """The launcher's heartbeat stopped; the job committed a checkpoint and ended."""

    exit_code = 18
    failure_class = FailureClass.LAUNCHER


class DivergedError(KftrainError):
    """The loss is not finite and stays so."""

    exit_code = 19
    failure_class = FailureClass.DIVERGED


class InterruptedByUser(KftrainError):  # noqa: N818 - not an error of anybody's
    """Ctrl-C."""

    exit_code = 130
    failure_class = FailureClass.INTERRUPTED


class RetryableError(KftrainError):
    """This attempt failed for a reason that the next may not meet: a lost peer, a killed process."""

    exit_code = 138
    failure_class = FailureClass.NETWORK


class StorageError(RetryableError):
    """Storage is full, or away for longer than it is waited for: what fails for it goes on once somebody mends it."""

    failure_class = FailureClass.STORAGE


class StorageAwayError(StorageError):
    """Storage cannot be reached: a worker that ends so has not failed itself."""


class LostPeerError(RetryableError):
    """Contact with another process was lost: never the cause, which is why the other one is gone."""


class HangError(KftrainError):
    """The watchdog ended a process that made no progress."""

    exit_code = 140
    failure_class = FailureClass.HANG


class Preempted(KftrainError):  # noqa: N818 - the normal end of a preempted attempt
    """Stopped by SIGTERM after a committed checkpoint."""

    exit_code = 143
    failure_class = FailureClass.PREEMPTED


def _subclasses(base: type[KftrainError]) -> dict[str, type[KftrainError]]:
    return {
        name: kind
        for kind in base.__subclasses__()
        for name, kind in [(kind.__name__, kind), *_subclasses(kind).items()]
    }


def error_from_dict(document: Any) -> KftrainError:
    """The error that another process wrote into `error.json`; an unknown or damaged one keeps its line."""
    fields = document if isinstance(document, dict) else {}
    error = _named_error(fields)
    if error is None:
        line, code = fields.get("line"), fields.get("exit_code")
        error = _UnknownError(
            line if isinstance(line, str) else "failed without a message", code if isinstance(code, int) else BUG_CODE
        )
    known = {kind.value: kind for kind in FailureClass}
    given = known.get(str(fields.get("failure_class")))
    return error if given is None else error.of_class(given)


def _named_error(fields: dict[str, Any]) -> KftrainError | None:
    """The error of a type that is known here, with all that it needs; else None."""
    kind = _subclasses(KftrainError).get(str(fields.get("kind")))
    parts = [fields.get(name) for name in ("what", "where", "fix")]
    if kind is None or kind is _UnknownError or not parts[0] or not all(isinstance(part, str) for part in parts):
        return None
    what, where, fix = (str(part) for part in parts)
    value = fields.get("value")
    return kind(what, where=where, value=NO_VALUE if value is None else _Literal(value), fix=fix)


SIGKILLED = 137
"""What a process ends with that the kernel killed for its memory."""


def class_of(kind: str, exit_code: int) -> FailureClass:
    """The class of a failure of which nothing is known but the name of its type, if that, and its exit code."""
    named = _subclasses(KftrainError).get(kind)
    if named is not None and named is not _UnknownError:
        return named.failure_class
    if exit_code in (SIGKILLED, BUG_CODE):
        return FailureClass.HOST_MEMORY if exit_code == SIGKILLED else FailureClass.BUG
    bases = (each for each in KftrainError.__subclasses__() if each is not _UnknownError)
    return next((each.failure_class for each in bases if each.exit_code == exit_code), FailureClass.UNKNOWN)


def is_error_document(document: Any) -> bool:
    """Whether it has what everybody relies on who shows an error: its kind, its line and its exit code."""
    if not isinstance(document, dict):
        return False
    kinds = {"kind": str, "line": str, "exit_code": int}
    return all(isinstance(document.get(name), kind) for name, kind in kinds.items())


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """`error.json` for any exception: ours keep their fields, a bug keeps its last frame."""
    if isinstance(error, KftrainError):
        return error.to_dict()
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    line = printable(redact(f"internal error: {type(error).__name__}: {error} ({where})"))
    line = " ".join(line.split())
    bug = {"kind": type(error).__name__, "exit_code": BUG_CODE, "failure_class": FailureClass.BUG.value}
    return {**bug, "line": line, "where": where}


def print_traceback(error: BaseException) -> None:
    """The traceback of an exception on stderr: without credentials, which drivers quote, and made printable."""
    sys.stderr.write(printable(redact("".join(traceback.format_exception(error)))))


class _UnknownError(KftrainError):
    """An error of another version of kftrain, or a bug in another process."""

    def __init__(self, line: str, exit_code: int) -> None:
        self.exit_code = exit_code  # type: ignore[misc]
        super().__init__(line)


class _Literal(str):
    """A value that was already shortened for display."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shorten(value: Any, limit: int = 200) -> str:
    text = repr(redact(value)) if type(value) is str else redact(repr(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"
