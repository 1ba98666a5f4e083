"""`faulty.task:Faulty`: language modelling whose loss fails in one way, at one call, once or always."""

import functools
import os
import signal
import time
import uuid

from kftrain import errors
from kftrain.core import storage
from kftrain.tasks.language_modeling import LanguageModeling


class Faulty(LanguageModeling):
    """Fails at the `at_call`-th loss of a process; with a `marker` (a URI) only the first time in the life of a run."""

    def __init__(
        self,
        *,
        sequence_length: int = 256,
        tokenizer: str = "bytes",
        fault: str = "",
        at_call: int = 20,
        marker: str = "",
        slow_seconds: float = 0.0,
    ) -> None:
        super().__init__(sequence_length=sequence_length, tokenizer=tokenizer)
        self._fault = fault
        self._at_call = at_call
        self._marker = marker
        self._slow_seconds = slow_seconds
        self._calls = 0

    def loss(self, output, batch, weight):
        self._calls += 1
        time.sleep(self._slow_seconds)
        factor = 1.0
        if self._fault and self._calls == self._at_call and self._is_first():
            factor = FAULTS[self._fault]()
        return super().loss(output, batch, weight) * factor

    def _is_first(self) -> bool:
        if not self._marker:
            return True
        try:
            storage.create_json(self._marker, {"token": uuid.uuid4().hex})  # an equal one would count as ours
        except FileExistsError:
            return False
        return True


def _raise() -> None:
    raise ValueError("the model is not right")


def _retryable() -> None:
    raise errors.RetryableError("a passing fault")


def _terminate() -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    return 1.0


def _diverge() -> float:
    return float("nan")


def _take_memory() -> None:
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20)) * 64)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail(kind: type[errors.KftrainError]) -> None:
    raise kind("a fault for good")


PERMANENT = (
    errors.ConfigError,
    errors.DataError,
    errors.CheckpointError,
    errors.LaunchError,
    errors.EvaluationError,
    errors.TrackingError,
)

FAULTS = {
    "raise": _raise,
    "retryable": _retryable,
    "terminate": _terminate,
    "diverge": _diverge,
    "memory": _take_memory,
    "freeze": _freeze,
    **{kind.__name__: functools.partial(_fail, kind) for kind in PERMANENT},
}
"""Each raises, never returns, or returns what the loss is multiplied by."""
