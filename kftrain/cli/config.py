"""`kftrain config`: what can be set, and what a file with its overrides comes to."""

from __future__ import annotations

import json

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo
from kftrain.core.credentials import redact
from kftrain.stages import preflight


@click.group("config")
def config_command() -> None:
    """Show the configuration and its schema."""


@config_command.command("schema")
def schema_command() -> None:
    """Print the JSON schema, for editors and for reading."""
    echo(json.dumps(configuration.schema(), indent=2))


@config_command.command("show")
@config_options
@json_option
@click.option("--for-kubeflow", is_flag=True, help="Print what to paste into config_json of Kubeflow's run form.")
def show_config_command(
    config_file: tuple[str, ...], overrides: tuple[str, ...], as_json: bool, for_kubeflow: bool
) -> None:
    """Print the resolved configuration, every default spelled out."""
    config = configuration.load(config_file, overrides)
    for line in preflight.describe_oddities(config):
        echo(line, err=True)
    if for_kubeflow:
        from kftrain.kubeflow import parameters

        echo(redact(parameters.format_for_form(config)))
        return
    echo(redact(json.dumps(config.to_dict(), indent=2) if as_json else config.to_yaml()), nl=as_json)
