"""Trust in documents of others: the code that they may name to run, and the places that they may name to read.

An export names the classes of its model and its task, a registered version the place of its export. Whoever can write
to the storage or to MLflow can write anything there, so nothing is imported, called or fetched for such a document
before it is allowed here. The reader's own configuration and environment decide what is allowed, never the document.
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
"""Variable with kinds that may be built, separated by commas."""

ROOTS_VARIABLE = "KFTRAIN_TRUSTED_ROOTS"
"""Variable with URIs below which exports and runs may be read, separated by commas; `hdfs://` allows a whole scheme."""

USUAL_SCHEMES = frozenset({"file", "s3", "gs", "abfs", "abfss"})
"""Schemes that a reader without a configuration may read. No `http`: it reaches what only this machine can reach."""

_permitted: set[str] = set()
"""Each `module:attr` that this process may import: see `permit`."""


def permit(config: Config) -> Config:
    """Let this process import what its own configuration names; never call it for what another run names."""
    _permitted.update(code_of(config))
    return config


def permit_kinds(kinds: Iterable[str]) -> None:
    """Let this process import these kinds."""
    _permitted.update(kinds)


def code_of(config: Config) -> set[str]:
    """Collect every kind that a configuration names."""
    sources = (config.data.source, *(component.source for component in config.data.components))
    chosen = (config.model.kind, config.task.kind, *sources, *config.evaluate.metrics)
    script = config.train.command[1:2] if config.train.command[:1] == ("-m",) else config.train.command[:1]
    return {*chosen, *script, *config.registry.trusted_kinds}


def load_code(kind: str, where: str, built_in: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Import what a kind names, a key of `built_in` or a `module:attr`: the only way from a document to an import.

    `built_in`: kind -> `module:attr`. `where`: the configuration key, for errors.

    Raises ConfigError for what nobody has permitted, and if the module or the attribute does not exist; UserCodeError
    if importing the module raises.
    """
    require_code(kind, where, built_in)
    return _import_attribute(built_in.get(kind, kind), where)


def require_code(kind: str, where: str, built_in: Container[str] = ()) -> None:
    """Raise ConfigError for a kind that nobody has permitted; looking for its file would import its package already."""
    if kind not in built_in and kind not in _permitted and kind not in _read_list(KINDS_VARIABLE):
        what = "this code may not run here: no configuration of one's own names it"
        fix = f"if it is yours, list it in registry.trusted_kinds or {KINDS_VARIABLE}"
        raise ConfigError(what, where=where, value=kind, fix=fix)


def require_written(kind: str, where: str, folder: str = ".") -> None:
    """Raise ConfigError if files show that a `module:attr` does not exist: at once, and without importing anything.

    `folder`: another place to look for modules. What a module makes while it is imported counts as existing.
    """
    require_code(kind, where)
    module, _, attribute = kind.partition(":")
    spec, path = None, None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        specs = filter(None, (finder.find_spec(name, path) for finder in sys.meta_path))
        try:
            spec = next(specs, None) or (PathFinder.find_spec(name, [folder]) if path is None else None)
        except KeyError:  # a namespace package within another that nobody has imported: only the import can tell
            return
        if spec is None:
            raise _absent_error(f"no module named {name}", kind, where)
        if (path := spec.submodule_search_locations) is None:
            break
    if spec and name == module and str(spec.origin).endswith(".py"):
        named = rf"\b{re.escape(attribute.partition('.')[0])}\b|import \*|__getattr__|globals|setattr|exec|sys\.modules"
        if not re.search(named, Path(str(spec.origin)).read_text(errors="replace")):
            raise _absent_error(f"module {module} has no {attribute}", kind, where)


def _absent_error(what: str, kind: str, where: str) -> ConfigError:
    fix = "check the spelling" if "has no" in what else "put it on PYTHONPATH or install it"
    return ConfigError(what, where=where, value=kind, fix=fix)


def _import_attribute(spec: str, where: str) -> Any:
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
            raise _absent_error(f"no module named {missing.name}", spec, where) from missing
        raise
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise _absent_error(f"module {module_name} has no {attribute}", spec, where)
        target = getattr(target, part)
    return target


@dataclass(frozen=True)
class Trust:
    """Kinds and places that a reader allows.

    Args:
        kinds: Each `module:attr` of models and tasks that may be built; built-in ones always may.
        roots: URIs below which may be read.
        schemes: Schemes of URIs that may be read wherever they lie.
    """

    kinds: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Config) -> Trust:
        """Allow what a configuration names, permitted kinds and its storage root, and what the environment lists."""
        listed = cls.by_default()
        roots = (config.run.storage_root, *config.registry.trusted_roots)
        kinds = filter(_permitted.__contains__, code_of(config))  # what a run's folder holds permits nothing
        return cls(listed.kinds.union(kinds), (*roots, *listed.roots))

    @classmethod
    def by_default(cls) -> Trust:
        """Allow what a reader without a configuration may: the usual schemes, and what the environment lists."""
        return cls(frozenset(_read_list(KINDS_VARIABLE)), tuple(_read_list(ROOTS_VARIABLE)), USUAL_SCHEMES)

    def require_kind(self, section: str, kind: str, built_in: Container[str]) -> None:
        """Permit to build the kind of a model or a task. Raises ConfigError if this reader does not allow it."""
        if kind not in built_in and kind not in self.kinds:
            what = f"the export's {section}.kind is neither built-in nor one that may be built here"
            fix = f"if it is yours, list it in registry.trusted_kinds or {KINDS_VARIABLE}"
            raise ConfigError(what, value=kind, fix=fix)
        permit_kinds([kind])

    def require_place(self, uri: str) -> None:
        """Raise ConfigError for a URI that may not be read here. Nothing is asked of a store for that."""
        if problem := _describe_flaw(uri):
            raise ConfigError(f"{problem}, so it may not be read", value=uri)
        if not self._has_place(uri):
            fix = f"if it is yours, list its root in registry.trusted_roots or {ROOTS_VARIABLE}"
            raise ConfigError("does not lie below a storage root that may be read here", where=uri, fix=fix)

    def _has_place(self, uri: str) -> bool:
        return _scheme(uri) in self.schemes or any(_is_below(uri, root) for root in self.roots)


def read_shards(paths: RunPaths) -> RunShards:
    """Read which dataset a run has; it must lie below the run's storage root, or a root that the environment lists.

    Raises DataError if there is none yet, or if it lies elsewhere; nothing is asked of that place then.
    """
    from kftrain.run import documents

    shards = documents.read(documents.RunShards, paths.shards)
    uri, here = shards.manifest_uri, Trust(roots=(paths.storage_root, *_read_list(ROOTS_VARIABLE)))
    if _describe_flaw(uri) or not here._has_place(uri):
        fix = f"run the shard step again, or list its root in {ROOTS_VARIABLE} if it is yours"
        raise DataError("its manifest lies outside of the run's storage root", where=paths.shards, value=uri, fix=fix)
    return shards


def require_places(manifest: Manifest, manifest_uri: str, config: Config) -> None:
    """Raise DataError if a manifest names adopted shards outside of the places of this configuration's data.

    These are the storage root, `data.source` and the roots that the environment lists. Nothing is asked of a store.
    """
    from kftrain.sharding.sources.webdataset import source_folder

    folders = manifest.adopted_folders
    allowed = (
        (config.run.storage_root, source_folder(config.data.source), *_read_list(ROOTS_VARIABLE)) if folders else ()
    )
    for folder in sorted(folders):
        if _describe_flaw(folder) or not Trust(roots=allowed)._has_place(folder):
            what = "its adopted shards lie neither below data.source nor below the storage root"
            fix = f"set data.source to that place, or list it in {ROOTS_VARIABLE} if it is yours"
            raise DataError(what, where=manifest_uri, value=folder, fix=fix)


def _read_list(variable: str) -> list[str]:
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip())]


def _describe_flaw(uri: str) -> str:
    """Describe what is wrong with a URI; empty if nothing is."""
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
    """Return True if a URI lies in the folder `root`; links of local ones are followed first."""
    if storage.is_local(uri) and storage.is_local(root):
        path, folder = (os.path.realpath(storage.local_path(place)) for place in (uri, root))
        return os.path.commonpath([path, folder]) == folder
    return not storage.is_local(uri) and f"{uri.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
