"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

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


def config_options(command: Command) -> Command:
    """`--config` and `--set`."""
    return config_file_option(override_option(command))
