"""The number of parameter servers of a run while it goes on: what somebody asks for, and what the ring has.

servers/wanted.json          a person    -> launcher, first worker
servers/ring-<epoch>.json    first worker -> servers, workers, launcher; created exclusively when all rows have moved

Both hold for jobs of one configuration: a run that goes on with another one has the servers that it names.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from kftrain.core import storage
from kftrain.errors import FencedError
from kftrain.run.paths import RunPaths


class WantedServers(NamedTuple):
    """A number of servers that somebody asks for; asked again, it has another id."""

    request: str
    num_servers: int


class Membership(NamedTuple):
    """The servers that have the rows: those of the numbers below `num_servers`."""

    epoch: int
    num_servers: int


def ask_for_servers(paths: RunPaths, digest: str, num_servers: int) -> None:
    """Ask the run's job of this configuration to go on with another number of servers."""
    wanted = {"request": uuid.uuid4().hex, "num_servers": num_servers, "config": digest}
    storage.publish_json(storage.join(paths.servers, "wanted.json"), wanted)


def read_wanted_servers(paths: RunPaths, digest: str) -> WantedServers | None:
    """Read what was asked for last; None where nobody has asked a job of this configuration."""
    document = storage.read_json_if_exists(storage.join(paths.servers, "wanted.json"))
    if document is None or document["config"] != digest:
        return None
    return WantedServers(document["request"], document["num_servers"])


def read_membership(paths: RunPaths, digest: str, num_configured: int) -> Membership:
    """Read which servers have the rows of a job: as many as its configuration says until that was changed."""
    epochs = [name[5:-5] for name in storage.list_names(paths.servers) if name.startswith("ring-")]
    epoch = max(map(int, epochs), default=0)
    document = storage.read_json(_name_ring(paths, epoch)) if epoch else None
    if document is None or document["config"] != digest:
        return Membership(epoch, num_configured)
    return Membership(epoch, document["num_servers"])


def agree_on_servers(paths: RunPaths, digest: str, membership: Membership) -> None:
    """Create the ring of an epoch. Raises FencedError where another attempt has created it."""
    document = {"num_servers": membership.num_servers, "config": digest, "agreed_by": uuid.uuid4().hex}
    try:
        storage.create_json(_name_ring(paths, membership.epoch), document)
    except FileExistsError as error:
        raise FencedError(FencedError.BY_ATTEMPT, where=_name_ring(paths, membership.epoch)) from error


def _name_ring(paths: RunPaths, epoch: int) -> str:
    return storage.join(paths.servers, f"ring-{epoch}.json")
