"""What must be done so that of a schedule's recurring runs exactly one is enabled, and it is the wanted one. Pure.

Kubeflow cannot change a recurring run, names of them are not unique, and deleting one kills the runs that it started.
So a change is a new one beside the old one: it is created disabled and looked at, the old one is disabled, the new one
enabled, and the old one is deleted once no run of it lives. Each step is decided by what is there: whoever is
interrupted begins anew and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kftrain.errors import ConfigError
from kftrain.settings import layers

MAX_RUNS = 2
"""Runs of a schedule at a time: one that is due while another is at work shall say so, instead of being held back."""

CONFIG = "config"
"""The parameter that holds the configuration as a text."""


@dataclass(frozen=True)
class Content:
    """What a recurring run is."""

    name: str
    cron: str
    pipeline_id: str
    experiment_id: str
    parameters: dict[str, Any] = field(default_factory=dict)
    service_account: str = ""
    version_id: str = ""
    """The pipeline's version that it is held at; empty: each run has the newest one."""
    no_catchup: bool = True
    max_runs: int = MAX_RUNS
    description: str = field(default="", compare=False)
    """For people, on Kubeflow's page."""


@dataclass(frozen=True)
class Wanted:
    """What a schedule asks for."""

    content: Content
    enabled: bool
    """False while it is paused."""


@dataclass(frozen=True)
class Recurring:
    """A recurring run that is there."""

    id: str
    content: Content
    enabled: bool
    created: str = ""
    """When, as text that sorts."""


class Change(NamedTuple):
    """One field of a schedule that differs."""

    key: str
    now: Any
    wanted: Any

    def __str__(self) -> str:
        none = "(default)" if self.key.startswith(f"{CONFIG}.") else "(none)"
        return f"{self.key}: {_shown(self.now, none)} -> {_shown(self.wanted, none)}"


@dataclass(frozen=True)
class Create:
    """A new one, disabled."""

    why: str = field(default="", compare=False)
    """What changes with it."""


@dataclass(frozen=True)
class Disable:
    """From now on it starts no run."""

    id: str


@dataclass(frozen=True)
class Enable:
    """From now on it starts runs; an empty id is the one that is created before."""

    id: str


@dataclass(frozen=True)
class Delete:
    """It goes, as soon as no run of it lives."""

    id: str


Action = Create | Disable | Enable | Delete


def plan(wanted: Wanted | None, listed: Iterable[Recurring]) -> list[Action]:
    """What is to be done, in order; empty where all is as it should be. `wanted` None: the schedule is to go."""
    found = sorted(listed, key=lambda each: (not each.enabled, each.created, each.id))
    kept = next((each for each in found if wanted is not None and _is_same(each.content, wanted.content)), None)
    others = [each for each in found if each is not kept]
    actions: list[Action] = []
    if wanted is not None and kept is None:
        actions.append(Create("; ".join(map(str, changes_to(wanted, found)))))
    actions += [Disable(each.id) for each in others if each.enabled]
    if wanted is not None and wanted.enabled != (kept is not None and kept.enabled):
        identity = kept.id if kept else ""
        actions.append(Enable(identity) if wanted.enabled else Disable(identity))
    return actions + [Delete(each.id) for each in others]


def changes_to(wanted: Wanted, listed: Sequence[Recurring]) -> list[Change]:
    """Field by field, how what is there differs: the enabled one, else the newest; empty where it is as wanted."""
    if not listed:
        return [Change("schedule", None, wanted.content.name)]
    now = max(listed, key=lambda each: (_is_same(each.content, wanted.content), each.enabled, each.created, each.id))
    before, after = (_leaves(_flat(each)) for each in (_comparable(now.content, wanted.content), wanted.content))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    found = [Change(key, before.get(key), after.get(key)) for key in keys]
    if not found and not _is_same(now.content, wanted.content):
        found = [Change("parameters", now.content.parameters, wanted.content.parameters)]
    if now.enabled != wanted.enabled:
        found.append(Change("enabled", now.enabled, wanted.enabled))
    if len(listed) > 1:
        found.append(Change("recurring runs of this name", len(listed), 1))
    return found


def _is_same(content: Content, wanted: Content) -> bool:
    return _comparable(content, wanted) == wanted


def _comparable(content: Content, wanted: Content) -> Content:
    """Where no service account is asked for, Kubeflow puts in its own."""
    return content if wanted.service_account else replace(content, service_account="")


def _flat(content: Content) -> dict[str, Any]:
    """With the configuration as the mapping that it is, so that its keys are compared."""
    parameters = dict(content.parameters)
    text = parameters.pop(CONFIG, "")
    try:
        config: Any = layers.parse(str(text), CONFIG)
    except ConfigError:  # somebody has written something else there
        config = text
    fields = {name: value for name, value in vars(content).items() if name not in ("name", "parameters", "description")}
    return {**fields, "parameters": parameters, CONFIG: config}


def _leaves(document: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and what stands there, without mappings: a section that is missing lacks all of its keys."""
    if not isinstance(document, dict):
        return {prefix.removesuffix("."): document}
    return {key: value for name, item in document.items() for key, value in _leaves(item, f"{prefix}{name}.").items()}


def _shown(value: Any, none: str) -> str:
    return none if value in (None, "", {}) else str(value)
