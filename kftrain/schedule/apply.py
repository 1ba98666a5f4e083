"""Carries out a plan: one action at a time, each decided by what is there now, so that it may end anywhere.

Two who do it take turns: without that, what one has just enabled the other would delete with the run that it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kftrain.core.progress import Progress
from kftrain.errors import LaunchError, UnavailableError
from kftrain.schedule.plan import Action, Content, Recurring, Wanted, plan
from kftrain.schedule.turn import Turn

Answer = TypeVar("Answer")

MAX_ACTIONS = 50
"""Actions of one call: more of them means that somebody undoes what is done here."""

MAX_FAILURES = 6
FIRST_WAIT_SECONDS = 1.0
"""Calls in a row that may stay without an answer, and the seconds of the first wait; each wait is twice the last."""

SETTLE_SECONDS = 45.0
"""Kubeflow's controller looks every 30 s: so long after it was disabled a recurring run may still start one."""

POLL_SECONDS = 10.0


class RecurringRuns(Protocol):
    """Kubeflow's recurring runs. Every call raises UnavailableError where it may have taken effect or not."""

    def list_recurring(self, name: str) -> list[Recurring]:
        """List all recurring runs of a name, which need not be unique."""

    def create(self, content: Content) -> None:
        """Create a recurring run that is disabled: nothing is started before somebody has looked at it."""

    def enable(self, recurring_id: str) -> None:
        """Let it start runs from now on. Does nothing where it is gone."""

    def disable(self, recurring_id: str) -> None:
        """Let it start no more runs. Does nothing where it is gone."""

    def delete(self, recurring_id: str) -> None:
        """Delete it, which kills its runs that have not ended. Does nothing where it is gone."""

    def list_live_runs(self, recurring_id: str) -> list[str]:
        """List the names of its runs that have not ended."""


@dataclass
class Executor:
    """Turns the recurring runs that Kubeflow has into the wanted one, action by action."""

    api: RecurringRuns
    name: str
    turn: Turn
    progress: Progress
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _disabled_since: dict[str, float] = field(default_factory=dict)
    _failures: int = 0

    def converge(self, wanted: Callable[[], Wanted | None], wait_seconds: float = 0.0) -> list[str]:
        """Carry out the plan until nothing is left to do; `wanted` gives None where the schedule is to go.

        `wanted` is called before each action, because others may pause the schedule or let it go on meanwhile.

        Returns the ids of recurring runs that are left, disabled, because runs of theirs live: they are waited for as
        long as `wait_seconds`. Raises LaunchError where Kubeflow refuses, or does not answer again and again.
        """
        with self.turn.hold():
            return self._converge(wanted, self.clock() + wait_seconds)

    def _converge(self, wanted: Callable[[], Wanted | None], until: float) -> list[str]:
        num_actions = 0
        while num_actions <= MAX_ACTIONS:
            listed, now = self._list_recurring(), wanted()
            actions = plan(now, listed)
            self._note_disabled(listed)
            # One action, then everything is looked at anew: its answer may be lost, and others act meanwhile. Deleting
            # comes last, when the wanted one is enabled, because it has to wait for the runs of the old one.
            urgent = next((action for action in actions if action.verb != "delete"), None)
            if urgent is not None:
                self._do_action(urgent, now)
                num_actions += 1
                continue
            ends = {action.id: self._delete_if_idle(action) for action in actions if action.verb == "delete"}
            num_actions += len(ends)
            if all(is_live for is_live in ends.values()):
                if not ends or not self._wait_for_turn(until):
                    return list(ends)
                num_actions = 0  # others had their turn meanwhile: what they changed then is no quarrel
        raise LaunchError(
            "somebody changes this schedule at the same time", where=self.name, fix="find out who, and apply it again"
        )

    def enable(self) -> bool:
        """Enable the newest recurring run, whatever its content: `converge` corrects that. False where there is none.

        Raises LaunchError.
        """
        with self.turn.hold():
            while listed := self._list_recurring():
                newest = max(listed, key=lambda recurring: (recurring.enabled, recurring.created))
                if newest.enabled or self._do_action(Action("enable", newest.id), None):
                    return True
        return False

    def disable(self) -> None:
        """Disable what is there without a turn: a pause waits for nobody. Raises LaunchError."""
        while enabled := [recurring for recurring in self._list_recurring() if recurring.enabled]:
            if all([self._do_action(Action("disable", recurring.id), None) for recurring in enabled]):
                return

    def _list_recurring(self) -> list[Recurring]:
        """List what Kubeflow has of this name; ask until it answers."""
        listed = None
        while listed is None:
            listed = self._call_api(lambda: self.api.list_recurring(self.name))
        return listed

    def _note_disabled(self, listed: Sequence[Recurring]) -> None:
        """Note since when each recurring run is known to start no runs any more."""
        known = self._disabled_since
        self._disabled_since = {one.id: known.get(one.id, self.clock()) for one in listed if not one.enabled}

    def _delete_if_idle(self, action: Action) -> bool:
        """Delete a recurring run that is disabled for long enough; True where it stays, because a run of it lives."""
        # The controller may start a last run after the recurring one is disabled. So wait first and look then: a run
        # that starts after the look would be killed with its recurring run.
        wait_seconds = self._disabled_since[action.id] + SETTLE_SECONDS - self.clock()
        if wait_seconds > 0:
            self.sleep(wait_seconds)
        live = self._call_api(lambda: self.api.list_live_runs(action.id))
        if live:
            self.progress(f"{action.id} is disabled and stays until its runs have ended: {', '.join(live)}")
        elif live is not None:
            self._do_action(action, None)
        return bool(live)

    def _wait_for_turn(self, until: float) -> bool:
        """Wait a while, in which others may have their turn; False where the time is up."""
        if self.clock() >= until:
            return False
        self.turn.give_back()
        self.sleep(POLL_SECONDS)
        if not self.turn.take():  # others may have enabled something in between: what was noted holds no more
            self._disabled_since = {}
        return True

    def _do_action(self, action: Action, wanted: Wanted | None) -> bool:
        """Carry out one action; False where nobody knows whether it took effect: the next listing will tell."""
        return self._call_api(lambda: self._carry_out(action, wanted)) is not None

    def _carry_out(self, action: Action, wanted: Wanted | None) -> bool:
        if action.verb == "create":
            assert wanted is not None
            self.api.create(replace(wanted.content, description=f"{wanted.content.description}; {action.why}"))
            self.progress(f"created, disabled: {wanted.content.cron} (UTC)")
        else:
            calls = {"enable": self.api.enable, "disable": self.api.disable, "delete": self.api.delete}
            calls[action.verb](action.id)
            self.progress(f"{action.verb}d {action.id}")
        return True

    def _call_api(self, call: Callable[[], Answer]) -> Answer | None:
        """Call and return the answer; wait and return None where none came. Raises LaunchError where none comes."""
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
