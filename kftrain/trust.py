"""What a document that somebody else has written may name: which code to run, and which places to read.

An export says of what classes its model and its task are, a registered version where its export lies. Whoever can write
to the storage or to MLflow can write anything there, so nothing is imported, called or fetched for such a document
before it is allowed here. What is allowed says the reader's own configuration and environment, never the document.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kftrain.core import storage
from kftrain.core.plugins import search_current_folder, user_code
from kftrain.errors import ConfigError, DataError, UserCodeError

if TYPE_CHECKING:
    from kftrain.config import Config
    from kftrain.data.shards.manifest import Manifest
    from kftrain.run.documents import RunShards
    from kftrain.run.paths import RunPaths

KINDS_VARIABLE = "KFTRAIN_TRUSTED_KINDS"
"""Kinds that may be built, with commas between them."""

ROOTS_VARIABLE = "KFTRAIN_TRUSTED_ROOTS"
"""URIs below which exports and runs may be read, with commas between them; `hdfs://` allows all of a scheme."""

USUAL_SCHEMES = frozenset({"file", "s3", "gs", "abfs", "abfss"})
"""Where exports are read from by who has no configuration. No `http`: it reaches what only this machine can reach."""

_permitted: set[str] = set()
"""`module:attr` that this process may import: see `permit`."""


def permit(config: Config) -> Config:
    """Lets this process import what whoever has started it names in its configuration; never what another run names."""
    _permitted.update(code_of(config))
    return config


def permit_kinds(kinds: Iterable[str]) -> None:
    """The same for single kinds."""
    _permitted.update(kinds)


def code_of(config: Config) -> set[str]:
    """Every kind that a configuration names."""
    sources = (config.data.source, *(component.source for component in config.data.components))
    chosen = (config.model.kind, config.task.kind, *sources, *config.evaluate.metrics)
    return {*chosen, *config.registry.trusted_kinds}


def load_code(kind: str, where: str, built_in: Mapping[str, str] = MappingProxyType({})) -> Any:
    """What a kind names, a key of `built_in` or a `module:attr`: the only way from a document to an import.

    `built_in`: kind -> `module:attr`. `where`: the configuration key, for errors.

    Raises ConfigError for what nobody has permitted, and where the module or the attribute does not exist;
    UserCodeError where importing the module raises.
    """
    require_code(kind, where, built_in)
    return _import(built_in.get(kind, kind), where)


def require_code(kind: str, where: str, built_in: Container[str] = ()) -> None:
    """Raises ConfigError for a kind that nobody has permitted. Also looking for its file imports what it lies in."""
    if kind not in built_in and kind not in _permitted and kind not in _listed(KINDS_VARIABLE):
        what = "this code may not run here: no configuration of one's own names it"
        fix = f"if it is yours, list it in registry.trusted_kinds or {KINDS_VARIABLE}"
        raise ConfigError(what, where=where, value=kind, fix=fix)


def require_written(kind: str, where: str, folder: str = ".") -> None:
    """Raises ConfigError where files show that a `module:attr` is not there: at once, and without importing anything.

    `folder`: where modules are looked for, too. What a module makes while it is imported counts as there.
    """
    require_code(kind, where)
    module, _, attribute = kind.partition(":")
    spec, path = None, None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        found = filter(None, (finder.find_spec(name, path) for finder in sys.meta_path))
        try:
            spec = next(found, None) or (PathFinder.find_spec(name, [folder]) if path is None else None)
        except KeyError:  # a namespace package within another that nobody has imported: only the import can tell
            return
        if spec is None:
            raise _absent(f"no module named {name}", kind, where)
        if (path := spec.submodule_search_locations) is None:
            break
    if spec and name == module and str(spec.origin).endswith(".py"):
        named = rf"\b{re.escape(attribute.partition('.')[0])}\b|import \*|__getattr__|globals|setattr|exec|sys\.modules"
        if not re.search(named, Path(str(spec.origin)).read_text(errors="replace")):
            raise _absent(f"module {module} has no {attribute}", kind, where)


def _absent(what: str, kind: str, where: str) -> ConfigError:
    fix = "check the spelling" if "has no" in what else "put it on PYTHONPATH or install it"
    return ConfigError(what, where=where, value=kind, fix=fix)


def _import(spec: str, where: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        fix = "e.g. my_package.my_module:MyTask"
        raise ConfigError("not of the form module:attr", where=where, value=spec, fix=fix)
    search_current_folder()
    try:
        with user_code(where):
            module = importlib.import_module(module_name)
    except UserCodeError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name and module_name.startswith(missing.name):
            raise _absent(f"no module named {missing.name}", spec, where) from missing
        raise
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise _absent(f"module {module_name} has no {attribute}", spec, where)
        target = getattr(target, part)
    return target


@dataclass(frozen=True)
class Trust:
    """What a reader allows.

    Args:
        kinds: `module:attr` of models and tasks that may be built; built-in ones always may.
        roots: URIs below which may be read.
        schemes: Of URIs that may be read wherever they lie.
    """

    kinds: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Config) -> Trust:
        """What a configuration names: kinds that are permitted, its storage root; and what the environment lists."""
        listed = cls.by_default()
        roots = (config.run.storage_root, *config.registry.trusted_roots)
        kinds = filter(_permitted.__contains__, code_of(config))  # what a run's folder holds permits nothing
        return cls(listed.kinds.union(kinds), (*roots, *listed.roots))

    @classmethod
    def by_default(cls) -> Trust:
        """Of a reader without a configuration: built-in kinds, the usual schemes, and what the environment lists."""
        return cls(frozenset(_listed(KINDS_VARIABLE)), tuple(_listed(ROOTS_VARIABLE)), USUAL_SCHEMES)

    def require_kind(self, section: str, kind: str, built_in: Container[str]) -> None:
        """Permits to build the kind of a model or a task. Raises ConfigError where this reader does not allow it."""
        if kind not in built_in and kind not in self.kinds:
            what = f"the export's {section}.kind is neither built-in nor one that may be built here"
            fix = f"if it is yours, list it in registry.trusted_kinds or {KINDS_VARIABLE}"
            raise ConfigError(what, value=kind, fix=fix)
        permit_kinds([kind])

    def require_place(self, uri: str) -> None:
        """Raises ConfigError for a URI that may not be read here. Nothing is asked of a store for that."""
        if problem := _malformed(uri):
            raise ConfigError(f"{problem}, so it may not be read", value=uri)
        if not self._has_place(uri):
            fix = f"if it is yours, list its root in registry.trusted_roots or {ROOTS_VARIABLE}"
            raise ConfigError("does not lie below a storage root that may be read here", where=uri, fix=fix)

    def _has_place(self, uri: str) -> bool:
        return _scheme(uri) in self.schemes or any(_is_below(uri, root) for root in self.roots)


def read_shards(paths: RunPaths) -> RunShards:
    """The dataset of a run, which lies below the run's own storage root, or one that the environment lists.

    Raises DataError where there is none yet, or where it is elsewhere; nothing is asked of a store for that.
    """
    from kftrain.run import documents

    shards = documents.read(documents.RunShards, paths.shards)
    uri, here = shards.manifest_uri, Trust(roots=(paths.storage_root, *_listed(ROOTS_VARIABLE)))
    if _malformed(uri) or not here._has_place(uri):
        fix = f"run the shard step again, or list its root in {ROOTS_VARIABLE} if it is yours"
        raise DataError("its manifest lies outside of the run's storage root", where=paths.shards, value=uri, fix=fix)
    return shards


def require_places(manifest: Manifest, manifest_uri: str, config: Config) -> None:
    """Raises DataError where a manifest names adopted shards that do not lie where this configuration has its data.

    That is below the storage root, below `data.source` or where the environment lists. Nothing is asked of a store.
    """
    from kftrain.sharding.sources.webdataset import source_folder

    folders = {shard.folder for split in manifest.splits.values() for shard in split.shards if shard.is_adopted}
    allowed = (config.run.storage_root, source_folder(config.data.source), *_listed(ROOTS_VARIABLE)) if folders else ()
    for folder in sorted(folders):
        if _malformed(folder) or not Trust(roots=allowed)._has_place(folder):
            what = "its adopted shards lie neither below data.source nor below the storage root"
            fix = f"set data.source to that place, or list it in {ROOTS_VARIABLE} if it is yours"
            raise DataError(what, where=manifest_uri, value=folder, fix=fix)


def _listed(variable: str) -> list[str]:
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip())]


def _malformed(uri: str) -> str:
    """What no URI of ours has; empty where there is none of it."""
    if "::" in uri:
        return "the URI is a chain of several"
    if not uri or re.search(r"[\x00-\x1f\x7f]", uri):
        return "the URI is empty or has control characters"
    if not storage.is_local(uri) and ".." in re.split(r"[/\\]", uri):
        return "the URI climbs out of its folder"
    return ""


def _scheme(uri: str) -> str:
    return "file" if storage.is_local(uri) else uri.split("://", 1)[0]


def _is_below(uri: str, root: str) -> bool:
    """Whether it lies in the folder `root`; of local ones, once links are followed."""
    if storage.is_local(uri) and storage.is_local(root):
        path, folder = (os.path.realpath(storage.local_path(each)) for each in (uri, root))
        return os.path.commonpath([path, folder]) == folder
    return not storage.is_local(uri) and f"{uri.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
