"""`kftrain` as a user calls it, in a process of its own."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml")

SMALL = {
    "model.dim": 64,
    "model.num_layers": 2,
    "train.steps": 100,
    "train.log_interval_steps": 1,
    "optimizer.warmup_steps": 5,
    "checkpoint.interval_steps": 10,
    "evaluate.interval_steps": 0,
    "evaluate.num_bootstrap": 100,
    "data.validation_fraction": 0.01,
}
"""The example's language model, small enough for a minute on two shared cores."""


def options(settings):
    """Command line of a configuration: the example with these overrides."""
    pairs = {**SMALL, **settings}
    return ["--config", EXAMPLE, *(part for key, value in pairs.items() for part in ("--set", f"{key}={value}"))]


class Command:
    """A running `kftrain`; its output is kept, and read in the background."""

    def __init__(self, *arguments, folder):
        command = [sys.executable, "-m", "kftrain", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []
        self._came = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout as stream:
            for line in stream:
                with self._came:
                    self.lines.append(line)
                    self._came.notify_all()
        with self._came:
            self.lines.append("")
            self._came.notify_all()

    def wait_for(self, part, seconds=180):
        """The first line that contains `part`."""
        with self._came:
            found = self._came.wait_for(lambda: self._find(part) or self.lines[-1:] == [""], seconds)
            assert found and self._find(part), f"{part!r} never came:\n{self.output}"
            return self._find(part)

    def _find(self, part):
        return next((line for line in self.lines if part in line), None)

    def finish(self, code=0, seconds=600):
        """Waits for its end; the last line as JSON where it is."""
        assert self.process.wait(seconds) == code, self.output
        with self._came:
            self._came.wait_for(lambda: self.lines[-1:] == [""], 10)
        last = next((line for line in reversed(self.lines) if line.strip()), "")
        return json.loads(last) if last.startswith(("{", "[{", "[]")) else None  # not a line of `[rank 0]`

    def kill(self):
        """Ends it at once, as a power cut would."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def output(self):
        return "".join(self.lines)


@contextlib.contextmanager
def running(*arguments, folder):
    """A command that goes on in the background, and does not survive the block; its output stays in the folder."""
    command = Command(*arguments, folder=folder)
    try:
        yield command
    finally:
        command.kill()
        with (Path(folder) / f"{arguments[0]}.log").open("a") as log:
            log.write(command.output)


def kftrain(*arguments, folder, code=0, seconds=600):
    """Runs a command to its end."""
    with running(*arguments, folder=folder) as command:
        return command.finish(code, seconds)
