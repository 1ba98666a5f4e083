"""Credentials in texts: found, left out of what is shown, and refused in what is kept.

They come from the environment. Where they stand in a URI all the same, or a library quotes them in a message, nothing
of them may be shown. In doubt more is left out: a password may hold every character that ends a URI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

USERNAME_VARIABLE, PASSWORD_VARIABLE = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"

SERVER_SECRET_VARIABLE = "KFTRAIN_SERVER_SECRET"
"""Variable with the secret of the workers and parameter servers of a run. The local launcher draws it for each attempt;
on a cluster it comes from a secret of `launch.kubernetes.secrets`."""

SECRET_VARIABLES = (
    *(PASSWORD_VARIABLE, TOKEN_VARIABLE, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    SERVER_SECRET_VARIABLE,
    *("KFP_EXISTING_TOKEN", "KF_PIPELINES_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_SECRET"),
)
"""Variables of the environment whose values are never shown."""

MIN_SECRET_LENGTH = 6
"""A shorter value of the environment is found only where a URI holds it: it may be part of any word."""

HIDDEN = "***"

_SCHEME = re.compile(r"(?<![\w+.-])(?<!://)[A-Za-z][A-Za-z0-9+.-]*://")
_WORD = re.compile(r"[^\s'\"<>]*")
_PARAMETER = re.compile(r"([?&;#][^?=&;#\s'\"<>]*=)([^&;#\s'\"<>]+)")
_SECRET_PARAMETER = re.compile(
    r"(?i)[?&;#](?:[\w.-]*(?:signature|token|secret|password|passwd|pwd|passphrase|jwt|credentials?|(?:api|secret|account"
    r"|private|storage|access)[_-]?key(?:id)?)|sig|key|auth|code|sas|pass|pw|session)(?:\[[^=]*\])?=[^&;#\s'\"<>]"
)
_SECRET_HEADER = re.compile(r"(?i)\b(bearer|basic) +[\w+/=.~-]{8,}")
_PORT = re.compile(r"\d{1,5}")
_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "hdfs", "file", "memory", "sqlite"}
"""Schemes whose names of containers and objects may hold an `@`."""


def redact(text: str) -> str:
    """Return the text without passwords and tokens in its URIs, signatures, and secrets of the environment."""
    if "://" in text:
        text = _remove_userinfo(text)
        text = _PARAMETER.sub(
            lambda parameter: parameter[1] + HIDDEN if _has_secret(parameter[0]) else parameter[0], text
        )
    text = _SECRET_HEADER.sub(rf"\1 {HIDDEN}", text)
    for secret in _collect_secrets():
        text = text.replace(secret, HIDDEN)
    return text


def find_credentials(document: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted key of every text in a document that holds credentials: `data.mixture[0].source`."""
    if isinstance(document, str):
        yield from [key] if holds_credentials(document) else []
    elif isinstance(document, Mapping):
        for name, part in document.items():
            yield from find_credentials(part, f"{key}.{name}".lstrip("."))
    elif isinstance(document, list):
        for number, part in enumerate(document):
            yield from find_credentials(part, f"{key}[{number}]")


def holds_credentials(text: str) -> bool:
    """Tell whether a URI, wherever in a text, holds a password, a token or a signature."""
    return any(_is_secret(text, scheme) for scheme in _SCHEME.finditer(text))


def _is_secret(text: str, scheme: re.Match[str]) -> bool:
    rest = text[scheme.end() :]
    if scheme.start():  # of a text that is one URI all belongs to it
        rest = _WORD.match(rest)[0]  # type: ignore[index]  # it matches the empty word too
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    is_torn = "@" in rest and ":" in authority and not _PORT.fullmatch(authority.rpartition(":")[2])
    in_authority = "@" in authority and (_is_web(scheme[0]) or ":" in authority.rpartition("@")[0])
    return in_authority or is_torn or _has_secret(rest)


def _has_secret(text: str) -> bool:
    """Tell whether a parameter, however its name is encoded, holds a secret."""
    return _SECRET_PARAMETER.search(unquote(text)) is not None


def take_out_credentials(uri: str) -> tuple[str, dict[str, str]]:
    """Split the URI of a web server into one without `user:password@`, and variables in which MLflow looks for these.

    A URI with anything else in it comes back as it is.
    """
    scheme = _SCHEME.match(uri)
    if scheme is None or not _is_web(scheme[0]):
        return uri, {}
    authority = re.split(r"[/?#]", uri[scheme.end() :], maxsplit=1)[0]
    userinfo, at, host = authority.rpartition("@")
    username, _, password = userinfo.partition(":")
    if not (at and username and password):
        return uri, {}
    rest = uri[scheme.end() + len(authority) :]
    return scheme[0] + host + rest, {USERNAME_VARIABLE: unquote(username), PASSWORD_VARIABLE: unquote(password)}


def _remove_userinfo(text: str) -> str:
    """Remove `user:password@` from all URIs of a text.

    A text that is one URI is taken as a whole; in others a URI ends with its word, its line, or the next one.
    """
    schemes = list(_SCHEME.finditer(text))
    is_uri = bool(schemes) and schemes[0].start() == 0
    if is_uri and not re.search(r"\s", text):
        schemes = schemes[:1]
    kept, position = [], 0
    for number, scheme in enumerate(schemes):
        limit = schemes[number + 1].start() if number + 1 < len(schemes) else len(text)
        rest = text[scheme.end() : limit]
        kept.append(text[position : scheme.end()])
        is_store = scheme[0].lower().removesuffix("://") in _STORES
        position = scheme.end() + _measure_userinfo(rest, is_store, is_uri and number == 0)
    return "".join([*kept, text[position:]])


def _measure_userinfo(rest: str, is_store: bool, is_uri: bool) -> int:
    """Count the characters after `scheme://` that are `user:password@`, at most."""
    line = rest.partition("\n")[0]
    word = line if is_uri else _WORD.match(line)[0]  # type: ignore[index]  # it matches the empty word too
    authority = re.split(r"[/?#]", word, maxsplit=1)[0]
    before_at = authority.rpartition("@")[0] or authority
    may_be_password = ":" in before_at and ("@" in authority or not _PORT.fullmatch(before_at.partition(":")[2]))
    if "@" in line and may_be_password:  # which may hold spaces and quotes too
        return line.rindex("@") + 1
    return word.rindex("@") + 1 if "@" in word and not is_store else 0


def _collect_secrets() -> list[str]:
    values = {os.environ.get(name, "") for name in SECRET_VARIABLES}
    secrets = {form for value in values if len(value) >= MIN_SECRET_LENGTH for form in (value, quote(value, safe=""))}
    return sorted(secrets, key=len, reverse=True)


def _is_web(scheme: str) -> bool:
    return scheme.lower().endswith(("http://", "https://"))
