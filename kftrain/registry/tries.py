"""The numbered tries against one champion, in files that are created once and never changed.

The gate widens its interval with the number of the try (`gate.choose_confidence`): else, of many equal challengers, one
would be promoted in the end.

    <root>/registry/<model>/tries/<digest of the champion's export>/<k>.json     the k-th comparison, and its decision

A try is a challenger's export on one evaluation in one metric: a step that runs again, and a decision that is asked for
again with another least effect, are the same one. A file is created exclusively, so two challengers at once have
different numbers. A champion that is rolled back to goes on counting where it was.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated

from pydantic import Field

from kftrain.core import storage
from kftrain.core.records import NumberedRecords
from kftrain.errors import TrackingError
from kftrain.registry.gate import Judgement
from kftrain.run import documents
from kftrain.run.documents import GateReason

MAX_NUMBER, MAX_ROUNDS = 1_000_000, 100
"""Highest number of a try; rounds in which another challenger may take our number before we give up."""


class Try(documents.Document):
    """`<k>.json`: the k-th comparison with a champion, and the gate's decision."""

    number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    identity: str
    """Digest of export, evaluation and metric (see `digest_identity`): equal digests are the same try."""
    run_id: str
    version: int
    promote: bool
    reasons: tuple[GateReason, ...]
    confidence: float
    """Confidence level of the interval that decided."""
    time: str
    """Time of the decision in UTC, ISO 8601."""
    entry_id: str
    """Random: tells a file of ours from an equal one of another process."""


@dataclass(frozen=True)
class Tries:
    """The folder of all tries against one champion."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str, champion_export_digest: str) -> Tries:
        """Return the tries against the champion with this export."""
        return cls(storage.join(storage_root, "registry", model_name, "tries", champion_export_digest[:16]))

    @property
    def _records(self) -> NumberedRecords[Try]:
        return NumberedRecords(self.uri, lambda uri: documents.read(Try, uri, TrackingError))

    def read_all(self) -> list[Try]:
        """Read all tries, by number. Raises TrackingError where one is damaged."""
        return self._records.read_all()

    def find_number(self, identity: str) -> tuple[int, bool]:
        """Return the number of a try and True if it is counted already; else the next free number and False."""
        tries = self.read_all()
        own = next((document.number for document in tries if document.identity == identity), None)
        following = min(MAX_NUMBER, max((document.number for document in tries), default=0) + 1)
        return (following, False) if own is None else (own, True)

    def decide_and_count(
        self, identity: str, run_id: str, version: int, decide: Callable[[int], Judgement]
    ) -> Judgement:
        """Judge a try by its number, count it, and return the judgement. May be repeated. Raises TrackingError.

        `decide`: called again with the next number whenever another challenger has taken the number meanwhile.
        """
        # The number must be known before the decision, which depends on it, and must be ours afterwards: the file is
        # created exclusively, and whoever loses the number decides again under the next one.
        for _ in range(MAX_ROUNDS):
            number, is_counted = self.find_number(identity)
            judgement = decide(number)
            if is_counted:
                return judgement
            document = Try(
                number=number,
                identity=identity,
                run_id=run_id,
                version=version,
                promote=judgement.decision.promote,
                reasons=judgement.decision.reasons,
                confidence=judgement.confidence,
                time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                entry_id=uuid.uuid4().hex,
            )
            if self._records.append(number, document):
                return judgement
        raise TrackingError("other challengers are always faster", where=self.uri, fix="try again later")


def digest_identity(export_digest: str, evaluation_digest: str, metric: str, goal: str) -> str:
    """Return a digest that is equal for comparisons with one champion that count as the same try."""
    identity = {"export": export_digest, "evaluation": evaluation_digest, "metric": metric, "goal": goal}
    return storage.digest_json(identity)
