"""The tries against one champion, in files that are created once and never changed: which one a challenger's is.

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
from typing import Annotated, Any

from pydantic import Field

from kftrain import storage
from kftrain.errors import TrackingError
from kftrain.registry.gate import Decision
from kftrain.run import documents
from kftrain.run.documents import GateReason

MAX_NUMBER, MAX_ROUNDS = 1_000_000, 100
"""Every round that is lost, another challenger was counted."""


class Try(documents.Document):
    """`<k>.json`: the k-th comparison with a champion, and what the gate said of it."""

    number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    identity: str
    """Digest of what makes it the same try."""
    run_id: str
    version: int
    promote: bool
    reasons: tuple[GateReason, ...]
    confidence: float
    """Of the interval that was looked at."""
    time: str
    """UTC, ISO 8601."""
    entry_id: str
    """Random: tells a file of ours from an equal one of another process."""


@dataclass(frozen=True)
class Tries:
    """All tries against one champion."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str, champion_export_digest: str) -> Tries:
        """Those against the champion with this export."""
        return cls(storage.join(storage_root, "registry", model_name, "tries", champion_export_digest[:16]))

    def read(self) -> list[Try]:
        """All, in order. Raises TrackingError where one is damaged."""
        names = [name for name in storage.list_names(self.uri) if name.endswith(".json")]
        found = [documents.read(Try, storage.join(self.uri, name), TrackingError) for name in names]
        return sorted(found, key=lambda each: each.number)

    def number_of(self, identity: str) -> tuple[int, bool]:
        """Number of a try, and whether it has been counted."""
        found = self.read()
        own = next((each.number for each in found if each.identity == identity), None)
        after = min(MAX_NUMBER, max((each.number for each in found), default=0) + 1)
        return (after, False) if own is None else (own, True)

    def counted(
        self, identity: str, run_id: str, version: int, decide: Callable[[int], tuple[Decision, float]]
    ) -> Decision:
        """The decision on a try, given its number, and counts it. May be repeated. Raises TrackingError.

        `decide`: from the number to the decision and the confidence that it looked at.
        """
        for _ in range(MAX_ROUNDS):
            number, is_counted = self.number_of(identity)
            decision, confidence = decide(number)
            if is_counted:
                return decision
            said: dict[str, Any] = {"promote": decision.promote, "reasons": decision.reasons, "confidence": confidence}
            made = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "entry_id": uuid.uuid4().hex}
            document = Try(number=number, identity=identity, run_id=run_id, version=version, **said, **made)
            try:
                storage.create_json(storage.join(self.uri, f"{number}.json"), document.to_dict())
            except FileExistsError:
                continue
            return decision
        raise TrackingError("other challengers are always faster", where=self.uri, fix="try again later")


def identity_of(export_digest: str, evaluation_digest: str, metric: str, goal: str) -> str:
    """What makes two comparisons with one champion the same try."""
    named = {"export": export_digest, "evaluation": evaluation_digest, "metric": metric, "goal": goal}
    return storage.digest_json(named)
