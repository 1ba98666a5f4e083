"""The configuration as parameters of a pipeline run: `config`, a text or the URI of a file, and `config_json` over it.

Kubeflow's run form shows a string as one line, in which newlines become spaces, and an object in a JSON editor. So the
text is for programs and for runs of before, the object for people. Numbers of an object travel as doubles: a whole one
arrives as an integer here, and one that a double cannot hold is refused, as is null, which the local runner does not
take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from kftrain.config import Config
from kftrain.core import plain, storage
from kftrain.errors import ConfigError
from kftrain.run.best_effort import retryable
from kftrain.settings import layers

TEXT, OBJECT = "config", "config_json"
"""Names of the pipeline's two parameters that hold a configuration, as text and as an object."""

MAX_BYTES = 64 * 1024
"""Largest size of both together: they reach a step as one argument of a command, which Linux limits to 128 KiB."""

URI = re.compile(r"[a-z][a-z0-9+.-]*:(//|:)\S+")
SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss")
"""Schemes of the URIs from which a configuration is read."""


def make_parameters(config: Config, resume_run: str) -> dict[str, str]:
    """Return the parameters of a run with this configuration: only what differs from the defaults, as people compare.

    The configuration is sent as text, which keeps `1.0` apart from `1`. Raises ConfigError if it is too large.
    """
    text = _dump_yaml(config)
    require_small(text, {})
    return {TEXT: text, "resume_run": resume_run}


def format_for_form(config: Config) -> str:
    """Return the JSON to paste into `config_json` of the run form.

    Raises ConfigError for values that Kubeflow would change or refuse.
    """
    values = restore_object(config.beyond_defaults())
    require_small("", values)
    return json.dumps(values, indent=2)


def restore_object(values: Mapping[str, Any] | None) -> layers.Document:
    """Restore an object that Kubeflow has passed: whole numbers become integers again.

    Raises ConfigError, which names the key, for null and for numbers that a double cannot hold.
    """
    return {str(key): _restore(value, str(key)) for key, value in (values or {}).items()}


def is_uri(parameter: str) -> bool:
    """Return True if the parameter `config` names a file instead of holding a text."""
    return bool(URI.fullmatch(parameter.strip()))


def read_config_parameter(parameter: str) -> tuple[str, str]:
    """Return the text that the parameter `config` holds or names, and its origin, which errors name.

    Raises ConfigError, and RetryableError if the file cannot be read now.
    """
    uri = parameter.strip()
    if not is_uri(uri):
        return parameter, TEXT
    if uri.partition(":")[0] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError("no configuration is read from there", where=TEXT, value=uri, fix=f"use one of: {known}")
    with retryable("the configuration cannot be read", uri):
        return _read_file(uri), uri


def require_small(text: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if both parameters together are larger than `MAX_BYTES`."""
    size = len(text.encode()) + (len(json.dumps(values).encode()) if values else 0)
    if size > MAX_BYTES:
        raise ConfigError(
            f"the configuration is {size:,} bytes, and a pipeline run takes {MAX_BYTES:,}",
            where=TEXT,
            fix=f"put it into a file that the steps can read, and its URI (s3://…) into {TEXT}",
        )


def _dump_yaml(config: Config) -> str:
    values = config.beyond_defaults()
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""


def _read_file(uri: str) -> str:
    try:
        content = storage.read_bytes(uri)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError("there is no such configuration", where=uri, fix=f"check the URI in {TEXT}") from error
    plain.require_length(content, uri)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not a text", where=uri, fix=f"check the URI in {TEXT}") from error


def _restore(value: Any, path: str) -> Any:
    where = f"{OBJECT}: {path}"
    if value is None:
        raise ConfigError("null is no value here", where=where, fix="leave the key out: it then has its default")
    if isinstance(value, Mapping):
        return {str(key): _restore(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_restore(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return value
    if abs(value) > plain.MAX_INTEGER:
        raise ConfigError(
            "a whole number beyond 2^53-1 would arrive as another one",
            where=where,
            value=value,
            fix=f"use a smaller one, or write it into {TEXT}",
        )
    return int(value)
