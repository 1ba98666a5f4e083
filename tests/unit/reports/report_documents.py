"""Parts of a plausible run's documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kftrain import config, reports
from kftrain.run.documents import Completion, Evaluation, Registration

DIGESTS = {
    name: character * 64 for name, character in zip(("data", "train", "check", "export", "eval"), "abcde", strict=True)
}


@dataclass(frozen=True)
class Documents:
    """All that a complete run has written."""

    settings: config.Config
    completion: Completion
    history: list[dict[str, Any]]
    evaluation: Evaluation
    registration: Registration
    manifest: dict[str, Any]

    def run_page(self, written: Sequence[tuple[str, Any]] = ()) -> str:
        """The report of the run."""
        return reports.render_page(
            reports.compose_run_page(
                self.settings,
                manifest=self.manifest,
                completion=self.completion,
                history=self.history,
                evaluation=self.evaluation,
                registration=self.registration,
                written=written,
            )
        )


def make_history(num_steps: int) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        loss = 1.5 + 4 * math.exp(-step / num_steps * 9) + 0.1 * math.sin(step * 12.9898)
        point: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "learning_rate": 1e-3,
            "gradient_norm": 0.5 + 0.2 * math.sin(step),
        }
        point |= {"samples_per_second": 280.0 + step % 17, "seconds": step * 0.11}
        if step % (num_steps // 8) == 0:
            point |= {"validation/loss": loss + 0.05, "validation/bits_per_byte": (loss + 0.05) / math.log(2)}
        points.append(point)
    return points
