"""Carries out a plan: one action at a time, each decided by what is there now, so that it may end anywhere.

Two who do it take turns: without that, what one has just enabled the other would delete with the run that it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kftrain.errors import LaunchError, UnavailableError
from kftrain.progress import Progress
from kftrain.schedule.plan import Action, Content, Create, Delete, Disable, Enable, Recurring, Wanted, plan
from kftrain.schedule.turn import Turn

Answer = TypeVar("Answer")

MAX_ACTIONS = 50
"""Actions of one call: more of them means that somebody undoes what is done here."""

MAX_FAILURES = 6
FIRST_WAIT_SECONDS = 1.0
"""Calls in a row without an answer, and the wait after the first of them; it doubles."""

SETTLE_SECONDS = 45.0
"""Kubeflow's controller looks every 30 s: so long after it was disabled a recurring run may still start one."""

POLL_SECONDS = 10.0


class RecurringRuns(Protocol):
    """Kubeflow's recurring runs. Every call raises UnavailableError where it may have taken effect or not."""

    def list_recurring(self, name: str) -> list[Recurring]:
        """All of a name."""
        ...

    def create(self, content: Content) -> None:
        """A new one, disabled."""
        ...

    def enable(self, recurring_id: str) -> None:
        """Nothing happens where it is gone."""
        ...

    def disable(self, recurring_id: str) -> None:
        """Nothing happens where it is gone."""
        ...

    def delete(self, recurring_id: str) -> None:
        """Kills what it has started and has not ended. Nothing happens where it is gone."""
        ...

    def live_runs(self, recurring_id: str) -> list[str]:
        """Names of its runs that have not ended."""
        ...


@dataclass
class Executor:
    """Makes what is there what is wanted."""

    api: RecurringRuns
    name: str
    turn: Turn
    progress: Progress
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _disabled_since: dict[str, float] = field(default_factory=dict)
    _failures: int = 0

    def converge(self, wanted: Callable[[], Wanted | None], wait_seconds: float = 0.0) -> list[str]:
        """Does what is to be done; `wanted` None: the schedule is to go.

        It is asked before each action, because others may pause the schedule or let it go on meanwhile.

        Returns the recurring runs that are left, disabled, because runs of theirs live: they are waited for as long as
        `wait_seconds`. Raises LaunchError where Kubeflow refuses, or does not answer again and again.
        """
        with self.turn.held():
            return self._converge(wanted, self.clock() + wait_seconds)

    def _converge(self, wanted: Callable[[], Wanted | None], until: float) -> list[str]:
        num_actions = 0
        while num_actions <= MAX_ACTIONS:
            listed, now = self._listed(), wanted()
            actions = plan(now, listed)
            self._note(listed)
            urgent = next((each for each in actions if not isinstance(each, Delete)), None)
            if urgent is not None:
                self._do(urgent, now)
                num_actions += 1
                continue
            ends = {each.id: self._deleted(each) for each in actions if isinstance(each, Delete)}
            num_actions += len(ends)
            if all(is_live for is_live in ends.values()):
                if not ends or not self._waited(until):
                    return list(ends)
                num_actions = 0
        raise LaunchError(
            "somebody changes this schedule at the same time", where=self.name, fix="find out who, and apply it again"
        )

    def enable(self) -> bool:
        """Enables what is there, whatever it is: apply says what it should be. False where nothing is.

        Raises LaunchError.
        """
        with self.turn.held():
            while listed := self._listed():
                newest = max(listed, key=lambda each: (each.enabled, each.created))
                if newest.enabled or self._do(Enable(newest.id), None):
                    return True
        return False

    def disable(self) -> None:
        """Disables what is there; it waits for nobody. Raises LaunchError."""
        while enabled := [each for each in self._listed() if each.enabled]:
            if all([self._do(Disable(each.id), None) for each in enabled]):
                return

    def _listed(self) -> list[Recurring]:
        """What Kubeflow has of this name, asked until it answers."""
        listed = None
        while listed is None:
            listed = self._asked(lambda: self.api.list_recurring(self.name))
        return listed

    def _note(self, listed: Sequence[Recurring]) -> None:
        """Since when each is known to start no runs any more."""
        known = self._disabled_since
        self._disabled_since = {each.id: known.get(each.id, self.clock()) for each in listed if not each.enabled}

    def _deleted(self, action: Delete) -> bool:
        """Deletes a recurring run that is disabled for long enough; True where it stays, because a run of it lives."""
        rest = self._disabled_since[action.id] + SETTLE_SECONDS - self.clock()
        if rest > 0:
            self.sleep(rest)
        live = self._asked(lambda: self.api.live_runs(action.id))
        if live:
            self.progress(f"{action.id} is disabled and stays until its runs have ended: {', '.join(live)}")
        elif live is not None:
            self._do(action, None)
        return bool(live)

    def _waited(self, until: float) -> bool:
        """Waits a while, in which others may have their turn; False where the time is up."""
        if self.clock() >= until:
            return False
        self.turn.give_back()
        self.sleep(POLL_SECONDS)
        if not self.turn.take():
            self._disabled_since = {}
        return True

    def _do(self, action: Action, wanted: Wanted | None) -> bool:
        """Carries out one action; False where nobody knows whether it took effect: what is there then will tell."""
        return self._asked(lambda: self._call(action, wanted)) is not None

    def _call(self, action: Action, wanted: Wanted | None) -> bool:
        if isinstance(action, Create):
            assert wanted is not None
            self.api.create(replace(wanted.content, description=f"{wanted.content.description}; {action.why}"))
            self.progress(f"created, disabled: {wanted.content.cron} (UTC)")
        elif isinstance(action, Enable):
            self.api.enable(action.id)
            self.progress(f"enabled {action.id}")
        elif isinstance(action, Disable):
            self.api.disable(action.id)
            self.progress(f"disabled {action.id}")
        else:
            self.api.delete(action.id)
            self.progress(f"deleted {action.id}")
        return True

    def _asked(self, call: Callable[[], Answer]) -> Answer | None:
        """The answer; None where there was none, after a wait. Raises LaunchError after too many of these in a row."""
        self.turn.keep()
        try:
            answer = call()
        except UnavailableError:
            self._failures += 1
            if self._failures > MAX_FAILURES:
                raise
            self.sleep(FIRST_WAIT_SECONDS * 2 ** (self._failures - 1))
            return None
        self._failures = 0
        return answer
