"""Samples that cannot be decoded and are left out, over all processes and attempts of a run."""

from __future__ import annotations

from collections.abc import Iterable

from kftrain.core.progress import to_log
from kftrain.data.decoding import BadSample
from kftrain.errors import DataError
from kftrain.parallel.world import World


class LeftOut:
    """The samples, each once however often it was met; the same on all processes."""

    def __init__(self, world: World, max_samples: int) -> None:
        """`max_samples`: more than so many end the run."""
        self._world = world
        self._max_samples = max_samples
        self.numbers: set[int] = set()
        """In stored order."""

    def resume(self, numbers: Iterable[int]) -> None:
        """Takes over those that were left out before the checkpoint."""
        self.numbers.update(numbers)

    def take(self, own: list[BadSample]) -> None:
        """Counts those of a step, of which this process has met its `own`. Collective.

        Raises DataError on all processes where there are too many now.
        """
        met = {sample.number: sample for part in self._world.gather(own) for sample in part}
        for number in sorted(met.keys() - self.numbers):
            self.numbers.add(number)
            line = met[number].error.line
            if len(self.numbers) > self._max_samples:
                raise DataError(
                    f"{len(self.numbers)} samples cannot be decoded, one more than may be left out; this one: {line}",
                    where="data.max_bad_samples",
                    value=self._max_samples,
                    fix="mend the data, or allow more",
                )
            if self._world.is_main:
                to_log(f"warning: left out, {len(self.numbers)} of at most {self._max_samples}: {line}")
