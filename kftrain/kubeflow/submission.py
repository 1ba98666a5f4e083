"""A run to submit, and the state of one that was submitted: data for `kftrain submit`, without a client.

A run's task details have one row per pod and per group of pods ("train", "train-driver", "train(0)", "executor"), so a
step is found by its name, and a driver counts only if it failed: then its step has no row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

SUCCEEDED, FAILED, SKIPPED, CANCELING, CANCELED = "SUCCEEDED", "FAILED", "SKIPPED", "CANCELING", "CANCELED"
ENDED = {SUCCEEDED, FAILED, SKIPPED, CANCELED}
"""Final states, of runs and of tasks."""

GRAVITY = (FAILED, "RUNNING", "PENDING", CANCELING, CANCELED, SUCCEEDED, SKIPPED)
"""States by weight: of several rows of one step, the state that comes first here is the step's."""


@dataclass(frozen=True)
class Submission:
    """A pipeline's version to upload, and a run of it to start."""

    pipeline: str
    version: str
    """Name of the version: the same for the same content."""
    text: str
    """The compiled pipeline, as a text of YAML."""
    experiment: str
    run_name: str
    parameters: dict[str, str]

    def to_yaml(self) -> str:
        """Write everything but the compiled pipeline as YAML, for people."""
        names = {"pipeline": self.pipeline, "version": self.version, "experiment": self.experiment}
        document = {**names, "run": self.run_name, "parameters": self.parameters}
        return yaml.dump(document, Dumper=_BlockDumper, sort_keys=False)


@dataclass(frozen=True)
class RunState:
    """A run as Kubeflow reports it."""

    state: str
    canceled: bool = False
    """True where somebody terminated it; its final state is FAILED nevertheless."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Step -> state, for the steps that have one."""

    @property
    def ended(self) -> bool:
        """True where it is in a final state."""
        return self.state in ENDED

    def steps_in(self, state: str) -> str:
        """Join the names of the steps in a state, sorted, with commas."""
        return ", ".join(sorted(name for name, current in self.steps.items() if current == state))


def read_steps(text: str) -> frozenset[str]:
    """Read the names of a compiled pipeline's steps: those of its tasks that have a container."""
    spec = next(iter(yaml.safe_load_all(text)))
    with_container = {name for name, component in spec["components"].items() if "executorLabel" in component}
    dags: list[dict[str, Any]] = [part["dag"] for part in (spec["root"], *spec["components"].values()) if "dag" in part]
    tasks = [item for dag in dags for item in dag["tasks"].items()]
    return frozenset(name for name, task in tasks if task["componentRef"]["name"] in with_container)


def compute_run_state(
    state: str, history: Iterable[str], rows: Iterable[tuple[str, str | None]], steps: frozenset[str]
) -> RunState:
    """Compute the state of a run from its own state, the states it has had, and its rows of (name, state)."""
    states_of: dict[str, set[str]] = {}
    for name, row_state in rows:
        step = name.removesuffix("-driver")
        if row_state and step in steps and (step == name or row_state == FAILED):
            states_of.setdefault(step, set()).add(row_state)
    states = {step: min(seen, key=_rank_state) for step, seen in states_of.items()}
    return RunState(state, canceled=state == CANCELED or CANCELING in history, steps=states)


def describe_changes(before: RunState, now: RunState) -> list[str]:
    """Write a line for each step whose state is another than before, the ended steps first."""
    changed = [(name, state) for name, state in now.steps.items() if before.steps.get(name) != state]
    changed.sort(key=lambda item: (item[1] not in ENDED, item))
    return [f"{name}: {state.lower()}" for name, state in changed]


def describe_outcome(run: RunState) -> str:
    """Describe how a run has ended. One that was terminated too late has succeeded all the same."""
    if run.state == SUCCEEDED:
        return "the run succeeded"
    if run.canceled:
        interrupted = run.steps_in("RUNNING")
        return f"the run was canceled{f' in {interrupted}' if interrupted else ''}"
    if run.state == SKIPPED:
        return "the run was skipped"
    failed = run.steps_in(FAILED)
    return f"the run failed in {failed}" if failed else "the run failed, but none of its steps"


def _rank_state(state: str) -> int:
    return GRAVITY.index(state) if state in GRAVITY else len(GRAVITY)


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as YAML blocks, which people can read."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)
