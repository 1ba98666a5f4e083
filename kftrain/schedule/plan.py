"""The plan of actions after which exactly one recurring run of a schedule is enabled, the wanted one. Pure.

Kubeflow cannot change a recurring run, names of them are not unique, and deleting one kills the runs that it started.
So a change is a new one beside the old one: it is created disabled and looked at, the old one is disabled, the new one
enabled, and the old one is deleted once no run of it lives. Each step is decided by what is there: whoever is
interrupted begins anew and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kftrain.errors import ConfigError
from kftrain.settings import layers

MAX_RUNS = 2
"""Runs of a schedule at a time. One that is due while another works is started, so that it can say so and end."""

CONFIG = "config"
"""The parameter that holds the configuration as a text."""


@dataclass(frozen=True)
class Content:
    """The content of a recurring run: what it runs, when, and as whom."""

    name: str
    cron: str
    pipeline_id: str
    experiment_id: str
    parameters: dict[str, Any] = field(default_factory=dict)
    service_account: str = ""
    version_id: str = ""
    """Version of the pipeline that its runs are held at; empty: each run has the newest one."""
    no_catchup: bool = True
    max_runs: int = MAX_RUNS
    description: str = field(default="", compare=False)
    """Text for people on Kubeflow's page; it is left out of comparisons."""


@dataclass(frozen=True)
class Wanted:
    """The recurring run that a schedule asks for."""

    content: Content
    enabled: bool
    """False while it is paused."""


@dataclass(frozen=True)
class Recurring:
    """A recurring run that Kubeflow has."""

    id: str
    content: Content
    enabled: bool
    created: str = ""
    """Time of creation, as text that sorts."""


class Change(NamedTuple):
    """A field of a schedule that differs between Kubeflow and the file."""

    key: str
    now: Any
    wanted: Any

    def __str__(self) -> str:
        none = "(default)" if self.key.startswith(f"{CONFIG}.") else "(none)"
        return f"{self.key}: {_format_value(self.now, none)} -> {_format_value(self.wanted, none)}"


@dataclass(frozen=True)
class Action:
    """A request to Kubeflow about one recurring run; the method of that name does it."""

    verb: Literal["create", "enable", "disable", "delete"]
    """`create`: the wanted one, disabled; `delete`: as soon as no run of it lives."""
    id: str = ""
    """Id of the recurring run; empty for the one that the plan creates."""
    why: str = field(default="", compare=False)
    """The changes that a created one brings, in words."""


def plan(wanted: Wanted | None, listed: Iterable[Recurring]) -> list[Action]:
    """List the actions to take, in order; empty where all is as it should be. `wanted` None: the schedule is to go."""
    ordered = sorted(listed, key=lambda one: (not one.enabled, one.created, one.id))
    kept = next((one for one in ordered if wanted is not None and _is_same(one.content, wanted.content)), None)
    others = [one for one in ordered if one is not kept]
    actions: list[Action] = []
    if wanted is not None and kept is None:
        actions.append(Action("create", why="; ".join(map(str, list_changes(wanted, ordered)))))
    # The others are disabled before the wanted one is enabled: two that are enabled would start two runs an instant.
    actions += [Action("disable", one.id) for one in others if one.enabled]
    if wanted is not None and wanted.enabled != (kept is not None and kept.enabled):
        actions.append(Action("enable" if wanted.enabled else "disable", kept.id if kept else ""))
    return actions + [Action("delete", one.id) for one in others]


def list_changes(wanted: Wanted, listed: Sequence[Recurring]) -> list[Change]:
    """Compare the enabled recurring run, else the newest, with the wanted one; empty where nothing differs."""
    if not listed:
        return [Change("schedule", None, wanted.content.name)]
    now = max(listed, key=lambda one: (_is_same(one.content, wanted.content), one.enabled, one.created, one.id))
    before, after = (
        _flatten_leaves(_parse_content(content))
        for content in (_drop_default_account(now.content, wanted.content), wanted.content)
    )
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    changes = [Change(key, before.get(key), after.get(key)) for key in keys]
    if not changes and not _is_same(now.content, wanted.content):
        changes = [Change("parameters", now.content.parameters, wanted.content.parameters)]
    if now.enabled != wanted.enabled:
        changes.append(Change("enabled", now.enabled, wanted.enabled))
    if len(listed) > 1:
        changes.append(Change("recurring runs of this name", len(listed), 1))
    return changes


def _is_same(content: Content, wanted: Content) -> bool:
    return _drop_default_account(content, wanted) == wanted


def _drop_default_account(content: Content, wanted: Content) -> Content:
    """Drop the service account that Kubeflow puts in where none is asked for."""
    return content if wanted.service_account else replace(content, service_account="")


def _parse_content(content: Content) -> dict[str, Any]:
    """Return the fields, with the configuration parsed into a mapping, so that its keys are compared."""
    parameters = dict(content.parameters)
    text = parameters.pop(CONFIG, "")
    try:
        config: Any = layers.parse_layer(str(text), CONFIG)
    except ConfigError:  # somebody has written something else there
        config = text
    fields = {name: value for name, value in vars(content).items() if name not in ("name", "parameters", "description")}
    return {**fields, "parameters": parameters, CONFIG: config}


def _flatten_leaves(document: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys and their values; a section that is missing lacks all of its keys."""
    if not isinstance(document, dict):
        return {prefix.removesuffix("."): document}
    return {
        key: value
        for name, item in document.items()
        for key, value in _flatten_leaves(item, f"{prefix}{name}.").items()
    }


def _format_value(value: Any, none: str) -> str:
    return none if value in (None, "", {}) else str(value)
