"""The script of `train.command`: where it lies, and the digest of its files. Nothing of it is imported here."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.trust import require_code

WHERE = "train.command"


@dataclass(frozen=True)
class Script:
    """A command for torchrun: a file, or a module after `-m`, and its arguments."""

    name: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, command: Sequence[str]) -> Script:
        """Take a command apart that the configuration has accepted."""
        is_module = command[0] == "-m"
        name, *arguments = command[1:] if is_module else command
        return cls(name, is_module, tuple(arguments))

    def digest(self) -> str:
        """Compute the digest of the script's file, or of all Python files of the module's package.

        Raises ConfigError where they are not here.
        """
        files = self._find_files()
        return storage.digest_json({name: storage.sha256_file(str(path)) for name, path in files.items()})

    def require_digest(self, expected: str) -> None:
        """Raise ConfigError where the files here are not the ones of the digest."""
        if self.digest() != expected:
            fix = "give every node the files that the run was opened with, or start a new run"
            raise ConfigError("the script's files are others on this node", where=WHERE, value=self.name, fix=fix)

    def run(self) -> None:
        """Run the script in this process, as `__main__` with its arguments. Raises ConfigError if nobody permits it."""
        require_code(self.name, WHERE)
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(Path.cwd() if self.is_module else Path(self.name).resolve().parent))
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")

    def _find_files(self) -> dict[str, Path]:
        path = Path(self.name)
        if not self.is_module and path.is_file():
            return {path.name: path}
        places = [str(Path.cwd()), *sys.path]
        spec = PathFinder.find_spec(self.name.partition(".")[0], places) if self.is_module else None
        if spec is not None and spec.submodule_search_locations:
            folders = [Path(folder) for folder in spec.submodule_search_locations]
            return {str(file.relative_to(folder)): file for folder in folders for file in sorted(folder.rglob("*.py"))}
        if spec is not None and spec.origin:
            return {Path(spec.origin).name: Path(spec.origin)}
        fix = "give its path from where the run starts, or set train.command_digest where only the workers have it"
        raise ConfigError("there is no such script here", where=WHERE, value=self.name, fix=fix)


def with_script_digest(config: Config) -> Config:
    """Return the configuration with the digest of the script that it names, unless that is given."""
    train = config.train
    if not train.command or train.command_digest:
        return config
    digest = Script.parse(train.command).digest()
    return config.model_copy(update={"train": train.model_copy(update={"command_digest": digest})})
