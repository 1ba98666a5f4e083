"""A clock for limits that a machine which pauses must not reach by itself."""

import time


class Clock:
    """In the place of the module `time`: it goes on only when a test says so, and by what is slept."""

    def __init__(self):
        self._seconds = 1000.0

    def monotonic(self):
        """Seconds; the test says how many have passed."""
        return self._seconds

    def time(self):
        """The real time, which no limit is measured by."""
        return time.time()

    def sleep(self, seconds):
        """Lets so much pass, at once."""
        self._seconds += seconds
