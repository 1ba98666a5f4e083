"""The reader of `schedule.yaml`: a recurring run as a file, and the configuration that each of its runs gets."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from kftrain import config as configuration
from kftrain.config import Config
from kftrain.core import plain
from kftrain.errors import ConfigError
from kftrain.schedule import cron
from kftrain.schedule.settings import NAME, SINCE, Policy, ScheduleConfig, parse_instant


class ScheduleFile(Policy):
    """A schedule as people write it."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the schedule: of all recurring runs of this name one is enabled."""
    cron: Annotated[str, Field(min_length=1)]
    """Times at which the schedule is due: second minute hour day month weekday."""
    configs: tuple[str, ...] = ()
    """Configuration files, as paths from this file; a later one wins, key by key."""
    knobs: dict[str, Any] = Field(default_factory=dict)
    """Keys that win over the files, e.g. `train.steps: 200`."""
    experiment: str = ""
    """Experiment of Kubeflow; empty: named as that of MLflow."""
    service_account: str = ""
    """Service account of the runs' pods; empty: Kubeflow's own."""
    steps_image: str = ""
    """Image of the steps; empty: the one of this version."""


@dataclass(frozen=True)
class Schedule:
    """A schedule that was read and checked, with the configuration of its runs."""

    file: ScheduleFile
    config: Config
    """Configuration of the runs; its section `schedule` is made from `file`."""
    where: str
    """Path of the file, for messages."""

    @property
    def name(self) -> str:
        """Name of the schedule; of all recurring runs of this name one is enabled."""
        return self.file.name


def read_schedule(path: str | Path) -> Schedule:
    """Read the schedule in a file. Raises ConfigError that names file, key, value and fix."""
    where = str(path)
    try:
        with open(path, "rb") as stream:  # no more of it than is looked at: it may be a device
            text = stream.read(plain.MAX_TEXT_LENGTH + 1).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the schedule: {error}", where=where, fix="check --file") from error
    return parse_schedule(text, where, Path(path).parent)


def parse_schedule(text: str, where: str, folder: Path) -> Schedule:
    """Parse a schedule whose configuration files are paths from `folder`. Raises ConfigError."""
    file = _validate(plain.load_yaml(text, where), where)
    cron.parse_cron(file.cron, f"{where}: cron")
    cron.load_zone(file.time_zone, f"{where}: time_zone")
    overrides = [f"{key}={json.dumps(value)}" for key, value in file.knobs.items()]
    config = configuration.load([str(folder / name) for name in file.configs], overrides)
    if config.schedule.name:
        raise ConfigError(
            "the section schedule is written by kftrain schedule",
            where=f"{where}: configs",
            value=config.schedule.name,
            fix="remove it from the configuration",
        )
    _require_window(file, config, where)
    policy = {name: getattr(file, name) for name in Policy.model_fields}
    return Schedule(file, config.model_copy(update={"schedule": ScheduleConfig(name=file.name, **policy)}), where)


def _require_window(file: ScheduleFile, config: Config, where: str) -> None:
    window = config.data.window
    if (file.window or file.window_hours) and not window.is_set:
        raise ConfigError(
            "the configuration does not say what the time of its data is",
            where=f"{where}: {'window' if file.window else 'window_hours'}",
            value=file.window or file.window_hours,
            fix="set data.window.by to path, modified or column",
        )
    if file.window_start:
        parse_instant(file.window_start, f"{where}: window_start")
    is_since = file.window == SINCE or (window.is_set and not window.start and not file.window_hours)
    wrong = {"window_hours": file.window_hours, "data.window.start": window.start} if file.window else {}
    if not is_since:
        wrong = {key: getattr(file, key) for key in ("window_start", "max_window_hours")}
        wrong["settle_hours"] = 0 if file.window_hours else file.settle_hours
    for key, value in wrong.items():
        if value:
            what = f"not of a window that is {SINCE}" if is_since else f"only of a window that is {SINCE}"
            fix = "remove window" if is_since else f"set window: {SINCE} without window_hours and data.window.start"
            raise ConfigError(what, where=f"{where}: {key}", value=value, fix=f"remove it, or {fix}")


def _validate(document: Any, where: str) -> ScheduleFile:
    if not isinstance(document, dict):
        raise ConfigError("a schedule is a mapping", where=where, value=document, fix="it begins with 'name: nightly'")
    flaw = plain.flaw(document)
    if flaw is not None:
        path, what, value = flaw
        raise ConfigError(what, where=f"{where}: {'.'.join(map(str, path))}", value=value)
    try:
        return ScheduleFile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ConfigError("this key is missing", where=f"{where}: {key}", fix=_describe_key(key)) from error
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                "unknown key", where=f"{where}: {key}", value=first["input"], fix=_suggest_key(key)
            ) from error
        raise ConfigError(
            first["msg"], where=f"{where}: {key}", value=first["input"], fix=_describe_key(key)
        ) from error


def _suggest_key(key: str) -> str:
    known = list(ScheduleFile.model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"


def _describe_key(key: str) -> str:
    field = ScheduleFile.model_fields.get(key.split(".")[0])
    return " ".join((field.description or "").split()) if field else ""
