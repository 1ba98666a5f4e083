"""The parts that the time of a training went to, from its claims, its curve and its completion. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kftrain.run.attempts import Claim
from kftrain.run.documents import Completion


@dataclass(frozen=True)
class AttemptSpan:
    """An attempt and its seconds, which last from its claim to the next one, or to the end of the last."""

    attempt: int
    start_step: int
    world_size: int
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """The time from the first claim to the end of the last attempt, in parts that add up to `wall_seconds`.

    Pauses between attempts count: who waits for a model waits through them, and nobody writes down when a killed
    attempt ended.
    """

    attempts: tuple[AttemptSpan, ...]
    step_seconds: float
    """Seconds of steps that were kept, by the recorded speed."""
    around_seconds: float
    """Seconds of validations and checkpoints between steps that were kept."""
    lost_seconds: float
    """Remaining seconds: starting, steps that were taken again, waiting for the next attempt, the export."""

    @property
    def wall_seconds(self) -> float:
        """Seconds of all attempts together, pauses between them included."""
        return sum(span.seconds for span in self.attempts)

    @property
    def process_seconds(self) -> float:
        """Seconds of all processes together: GPU seconds where each has a GPU."""
        return sum(span.seconds * span.world_size for span in self.attempts)

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps which were kept, from 0 to 1."""
        return self.step_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def compute_timeline(
    claims: Sequence[Claim], completion: Completion, history: Sequence[Mapping[str, Any]]
) -> Timeline | None:
    """Compute the timeline of a complete training; None where its claims are gone.

    Args:
        claims: Claims of all attempts.
        completion: Completion of the training.
        history: Points of its curve with `step`, `seconds`, and `samples_per_second` where steps were recorded.
    """
    counted = sorted(
        (claim for claim in claims if claim.attempt <= completion.attempt), key=lambda claim: claim.attempt
    )
    if not counted or counted[-1].attempt != completion.attempt:
        return None
    # Claims are stamped by clocks of several hosts: a span may come out negative, and no part may exceed the whole.
    starts = [claim.start_time for claim in counted]
    ends = [*starts[1:], starts[-1] + completion.seconds]
    spans = tuple(
        AttemptSpan(claim.attempt, claim.start_step, claim.world_size, max(0.0, end - start))
        for claim, start, end in zip(counted, starts, ends, strict=True)
    )
    wall = sum(span.seconds for span in spans)
    in_steps = min(wall, _sum_step_seconds(completion, history))
    recorded = max((float(point.get("seconds", 0.0)) for point in history), default=0.0)
    around = min(max(0.0, recorded - in_steps), wall - in_steps)
    return Timeline(spans, in_steps, around, wall - in_steps - around)


def _sum_step_seconds(completion: Completion, history: Sequence[Mapping[str, Any]]) -> float:
    """Sum the seconds of all steps: those since the point before took as long as a point's speed says."""
    samples_per_step = completion.samples_consumed / completion.step if completion.step else 0.0
    total, before = 0.0, 0
    for point in history:
        speed = float(point.get("samples_per_second") or 0.0)
        if speed > 0:
            total += (int(point["step"]) - before) * samples_per_step / speed
            before = int(point["step"])
    return total
