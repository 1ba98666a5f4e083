"""The number of samples of each step, and so the position in the order of samples at which a step begins.

A pure function of the step, and never saved: an attempt that goes on after a step begins at the same sample.
"""

from __future__ import annotations


class BatchSizes:
    """Sizes of the global batches of a training, which may begin small and grow to the final size."""

    def __init__(self, final_size: int, growth: tuple[tuple[int, int], ...] = ()) -> None:
        """`growth`: before the steps of the final size, so many steps of so many samples, one pair after the other."""
        self._phases: list[tuple[int, int, int]] = []
        """First step, its position, and the size of its batch."""
        step = position = 0
        for num_steps, size in growth:
            self._phases.append((step, position, size))
            step, position = step + num_steps, position + num_steps * size
        self._phases.append((step, position, final_size))

    @property
    def sizes(self) -> list[int]:
        """The different sizes, in their order."""
        return [size for _, _, size in self._phases]

    def find_size(self, step: int) -> int:
        """Return the number of samples of a step, counted from 0."""
        return self._find_phase(step)[2]

    def count_samples(self, num_steps: int) -> int:
        """Count the samples of so many steps from the first on: the position at which the next one begins."""
        first, position, size = self._find_phase(num_steps)
        return position + (num_steps - first) * size

    def _find_phase(self, step: int) -> tuple[int, int, int]:
        return next(phase for phase in reversed(self._phases) if phase[0] <= step)
