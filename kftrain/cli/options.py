"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])

config_file_option = click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    multiple=True,
    help="YAML file; without it, every default. Repeatable: a later one wins, key by key.",
)
override_option = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key, e.g. train.steps=200; repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def require_text(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Raises BadParameter for an option that was given as an empty text, as by an unset variable."""
    assert parameter.name is not None
    if not value.strip() and context.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE:
        raise click.BadParameter("it is empty")
    return value


resume_option = click.option(
    "--resume",
    metavar="RUN",
    default="",
    callback=require_text,
    help="Go on with a run: its id, or the URI of its folder.",
)


rehash_option = click.option(
    "--rehash",
    "overrides",
    flag_value="data.rehash=true",
    multiple=True,
    help="Hash all shards that are there, whatever their times say.",
)


def config_options(command: Command) -> Command:
    """Add `--config` and `--set`."""
    return config_file_option(override_option(command))
