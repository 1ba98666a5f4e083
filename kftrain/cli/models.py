"""`kftrain models`: the versions of a registered model, and which of them is champion."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kftrain import config as configuration
from kftrain import registry, storage
from kftrain.cli.options import config_options, echo, json_option
from kftrain.config import Config
from kftrain.errors import TrackingError
from kftrain.registry import ComparedVersion
from kftrain.report import wording
from kftrain.run.config import read_config
from kftrain.run.documents import Interval
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group("models")
def models_command() -> None:
    """Compare, promote and roll back registered models.

    Model, registry and storage root are those of --run, or of --config.
    """


def model_options(command: Command) -> Command:
    """`--run`, `--config` and `--set`."""
    run = click.option("--run", "run_uri", metavar="RUN_URI", help="Take the configuration of this run.")
    return run(config_options(command))


@models_command.command()
@click.argument("versions", type=int, nargs=-1)
@model_options
@json_option
def compare(
    versions: tuple[int, ...],
    run_uri: str | None,
    config_file: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show versions beside each other: metrics with intervals, improvement over the champion. Default: all."""
    from kftrain.stages.register import task_metrics

    config = _config(run_uri, config_file, overrides)
    found = registry.compare(config, versions, task_metrics(config))
    echo(json.dumps([_plain(each) for each in found], indent=2) if as_json else _table(found))


@models_command.command()
@click.argument("version", type=int)
@click.option("--reason", required=True, help="Why; it goes to the journal of promotions.")
@model_options
def promote(
    version: int, reason: str, run_uri: str | None, config_file: tuple[str, ...], overrides: tuple[str, ...]
) -> None:
    """Make a version champion, whatever the gate says."""
    entry = registry.promote(_config(run_uri, config_file, overrides), version, reason)
    echo(f"version {entry.version} is champion ({entry.reason})")


@models_command.command()
@model_options
def rollback(run_uri: str | None, config_file: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Make the champion before the last promotion champion again."""
    entry = registry.rollback(_config(run_uri, config_file, overrides))
    echo(f"version {entry.version} is champion ({entry.reason})")


@models_command.command()
@click.option("--contents", is_flag=True, help="Read every export in full and check every byte.")
@model_options
@json_option
def audit(
    contents: bool, run_uri: str | None, config_file: tuple[str, ...], overrides: tuple[str, ...], as_json: bool
) -> int:
    """Check that every version resolves to an export that is there; exit code 15 if one does not."""
    findings = registry.audit(_config(run_uri, config_file, overrides), contents)
    if as_json:
        echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        lines = [f"{_subject(finding.version)}: {finding.problem}" for finding in findings]
        echo("\n".join(lines) or "every version resolves, and journal and alias agree")
    return TrackingError.exit_code if findings else 0


def _config(run_uri: str | None, config_file: tuple[str, ...], overrides: tuple[str, ...]) -> Config:
    if run_uri:
        saved = read_config(RunPaths(storage.absolute(run_uri)))
        return configuration.parse(saved.to_yaml(), overrides, where=run_uri)
    return resolve.anchored(configuration.load(config_file, overrides), ".")


def _plain(version: ComparedVersion) -> dict[str, Any]:
    return {
        **{key: getattr(version, key) for key in ("version", "aliases", "run_uri", "evaluation_digest")},
        "metrics": {name: found.model_dump(mode="json") for name, found in version.metrics.items()},
        "improvement": version.improvement.model_dump(mode="json") if version.improvement else None,
    }


def _table(versions: list[ComparedVersion]) -> str:
    lines = []
    for each in versions:
        aliases = f" ({', '.join(each.aliases)})" if each.aliases else ""
        metrics = ", ".join(f"{name} {_shown(found)}" for name, found in each.metrics.items()) or "no evaluation"
        better = f"; against the champion {_shown(each.improvement, signed=True)}" if each.improvement else ""
        lines.append(f"version {each.version}{aliases}: {metrics}{better}")
    return "\n".join(lines) or "no versions"


def _shown(found: Interval, signed: bool = False) -> str:
    value, edges = wording.interval(found.value, found.low, found.high, signed)
    return f"{value} ({edges})"


def _subject(version: int | None) -> str:
    return "model" if version is None else f"version {version}"
