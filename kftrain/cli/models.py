"""`kftrain models`: the versions of a registered model, and which of them is champion."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kftrain import config as configuration
from kftrain import registry, reports
from kftrain.cli.options import config_options, json_option, require_text
from kftrain.cli.summary import describe_interval
from kftrain.client.console import echo
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError, TrackingError
from kftrain.reports.comparison import write_headline
from kftrain.reports.versions import VersionComparison, describe_version, to_plain
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight, resolve

MAX_VERSION = 2**31 - 1
"""Largest version that MLflow's databases hold."""


@click.group("models")
def models_command() -> None:
    """Compare, promote, decline and roll back registered models.

    Model, registry and storage root are those of --run, or of --config.
    """


def model_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--run`, `--config` and `--set`; the command gets the configuration that they name."""

    @functools.wraps(command)
    def configured(
        run_uri: str | None, config_file: tuple[str, ...], overrides: tuple[str, ...], **others: Any
    ) -> int | None:
        if run_uri:
            saved = read_config(RunPaths(storage.absolute(run_uri)))
            config = configuration.parse_kept(saved.to_yaml(), run_uri, overrides)
        else:
            config = resolve.anchor_paths(configuration.load(config_file, overrides), ".")
        preflight.require_database(config.tracking.uri)
        return command(config, **others)

    run = click.option("--run", "run_uri", metavar="RUN_URI", help="Take the configuration of this run.")
    return run(config_options(configured))


@models_command.command("compare")
@click.argument("versions", nargs=-1)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the same as Markdown.")
@model_options
@json_option
def compare_command(
    config: Config, versions: tuple[str, ...], html: Path | None, markdown: Path | None, as_json: bool
) -> None:
    """Show versions beside each other: metrics with intervals, improvement over one of them, what differs.

    VERSIONS are numbers (3, v3) or aliases (champion). All are compared with the champion if it is among them, else
    with the first. Default: all; on a page the champion and the newest, six of them.
    """
    from kftrain.stages.comparison import PAGE_VERSIONS, compare_versions

    pages = [path for path in (html, markdown) if path is not None]
    comparison = compare_versions(config, versions, PAGE_VERSIONS if pages else 0)
    if html is not None:
        _write_page(
            html, reports.render_page(reports.compose_comparison_page(comparison, reports.describe_environment()))
        )
    if markdown is not None:
        _write_page(markdown, reports.render_markdown(reports.describe_comparison(comparison)))
    echo(json.dumps(to_plain(comparison), indent=2) if as_json else _write_lines(comparison, pages))


@models_command.command("promote")
@click.argument("version", type=click.IntRange(1, MAX_VERSION))
@click.option("--reason", required=True, callback=require_text, help="Why; it goes to the journal of promotions.")
@model_options
def promote_command(config: Config, version: int, reason: str) -> None:
    """Make a version champion, whatever the gate says."""
    entry = registry.promote(config, version, reason)
    echo(f"version {entry.version} is champion ({entry.reason})")


@models_command.command("decline")
@click.argument("version", type=click.IntRange(1, MAX_VERSION))
@click.option(
    "--reason", required=True, callback=require_text, help="Why; it is kept beside the journal of promotions."
)
@model_options
def decline_command(config: Config, version: int, reason: str) -> None:
    """Say that a version is no champion, whatever the gate says, until somebody promotes it."""
    entry = registry.decline(config, version, reason)
    echo(f"version {entry.version} is declined: {entry.reason}")


@models_command.command("rollback")
@model_options
def rollback_command(config: Config) -> None:
    """Make the champion before the last promotion champion again."""
    entry = registry.rollback(config)
    echo(f"version {entry.version} is champion ({entry.reason})")


@models_command.command("audit")
@click.option("--contents", is_flag=True, help="Read every export in full and check every byte.")
@model_options
@json_option
def audit_command(config: Config, contents: bool, as_json: bool) -> int:
    """Check that every version resolves to an export that is there; exit code 15 if one does not."""
    findings = registry.audit(config, contents)
    if as_json:
        echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        names = [f"version {finding.version}" if finding.version else "model" for finding in findings]
        lines = [f"{name}: {finding.problem}" for name, finding in zip(names, findings, strict=True)]
        echo("\n".join(lines) or "every version resolves, and journal and alias agree")
    return TrackingError.exit_code if findings else 0


@models_command.command("deploy")
@click.argument("version", default="champion")
@click.option("--render", is_flag=True, required=True, help="Print the document; `kubectl apply -f -` takes it.")
@click.option("--image", default="", help="Image of the container. Default: NAME:VERSION.")
@model_options
def deploy_command(config: Config, version: str, render: bool, image: str) -> None:
    """Render a version as a KServe InferenceService. VERSION is a number or an alias; default: the champion."""
    import yaml

    from kftrain.registry.inference_service import describe_inference_service

    number, reference = registry.find_version(config, version)
    image = image or f"{config.model_name}:{number}"
    document = describe_inference_service(config, number, reference, image)
    echo(yaml.safe_dump(document, sort_keys=False), nl=False)
    echo(
        f"the image {image}: mlflow models generate-dockerfile -m models:/{config.model_name}/{number} -d FOLDER",
        err=True,
    )
    if storage.is_local(reference.export_uri) and not config.launch.kubernetes.volumes:
        echo(
            "warning: the model lies in a folder; set launch.kubernetes.volumes and volume_mounts to reach it", err=True
        )


def _write_page(path: Path, text: str) -> None:
    """Write a page. Raises ConfigError where nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path), fix="name another file") from error


def _write_lines(comparison: VersionComparison, pages: list[Path]) -> str:
    lines = []
    for version in comparison.versions:
        metrics = version.evaluation.metrics if version.evaluation else {}
        values = ", ".join(f"{name} {describe_interval(value)}" for name, value in metrics.items()) or "no evaluation"
        gain = comparison.improvement(version.differences.get(comparison.metric))
        better = f"; improvement over {comparison.base.name} {describe_interval(gain, signed=True)}" if gain else ""
        problem = f"; {version.problem}" if version.problem else ""
        lines.append(f"{describe_version(version)}: {values}{better}{problem}")
    lines += [write_headline(comparison), *(f"page: {path}" for path in pages)]
    return "\n".join(lines)
