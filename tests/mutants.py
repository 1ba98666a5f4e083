"""Breaks the product, one line at a time, and fails where no test notices: `make mutants`, or with names of mutants.

Each mutant names what it breaks and the tests that must turn red. It is applied to a copy of the repository; a text
that is no longer there is an error, so that this list stays true.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COPIED = ("kftrain", "components", "pipelines", "tests", "examples", "docs", "images", "manifests", "pyproject.toml")
NUM_AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """One break."""

    name: str
    path: str
    before: str
    """A text that the file holds exactly once."""
    after: str
    tests: str
    """Arguments of pytest."""


MUTANTS = [
    Mutant(
        "gradients are not clipped",
        "kftrain/train/step.py",
        'limit = self._clip_norm if self._clip_norm > 0 else float("inf")',
        'limit = float("inf")',
        "tests/unit/train/test_step.py tests/unit/train/test_parity.py",
    ),
    Mutant(
        "a non-finite step updates all the same",
        "kftrain/train/step.py",
        "        if finite:\n            self.optimizer.step()",
        "        self.optimizer.step()",
        "tests/unit/train/test_step.py",
    ),
    Mutant(
        "gradients pile up from step to step",
        "kftrain/train/step.py",
        "self.optimizer.zero_grad(set_to_none=True)",
        "pass",
        "tests/unit/train/test_step.py",
    ),
    Mutant(
        "the gradient is not scaled by the number of processes",
        "kftrain/train/step.py",
        "(loss * self._world.size).backward()",
        "loss.backward()",
        "tests/unit/train/test_parity.py -k two_processes",
    ),
    Mutant(
        "the learning rate comes one step late",
        "kftrain/train/loop.py",
        "rate = learning_rate(self._config.optimizer, step, self._config.train.steps)",
        "rate = learning_rate(self._config.optimizer, max(step - 1, 0), self._config.train.steps)",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "the learning rate is never set",
        "kftrain/train/loop.py",
        "        set_learning_rate(self._stepper.optimizer, rate)\n",
        "",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "skipped steps are not counted",
        "kftrain/train/loop.py",
        "0 if result.updated else self._num_nonfinite + 1",
        "0",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "steps are not seeded: dropout differs after a resume",
        "kftrain/train/loop.py",
        "        seed_step(self._config.run.seed, step, self._world.rank)\n",
        "",
        "tests/unit/train/test_parity.py -k dropout",
    ),
    Mutant(
        "dropout is on while a model is scored",
        "kftrain/evaluate/score.py",
        "model.eval()",
        "model.train()",
        "tests/unit/train/test_parity.py -k dropout",
    ),
    Mutant(
        "what is published is not synced",
        "kftrain/storage.py",
        "            stream.flush()\n            os.fsync(stream.fileno())",
        "            stream.flush()",
        "tests/unit/core tests/unit/checkpoint -k sync",
    ),
    Mutant(
        "a name in a folder is not synced",
        "kftrain/storage.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        "tests/unit/core tests/unit/checkpoint -k sync",
    ),
    Mutant(
        "what is exclusively created replaces what is there",
        "kftrain/storage.py",
        "os.link(aside, path)",
        "os.replace(aside, path)",
        "tests/unit/core/test_storage.py",
    ),
    Mutant(
        "COMMITTED comes before the manifest",
        "kftrain/checkpoint/commit.py",
        "    storage.publish(storage.join(uri, MANIFEST), content)\n",
        "",
        "tests/unit/checkpoint/test_commit.py",
    ),
    Mutant(
        "a fenced attempt commits",
        "kftrain/checkpoint/commit.py",
        "    attempts.require_held(paths, name.attempt)\n    storage.publish(storage.join(uri, COMMITTED)",
        "    storage.publish(storage.join(uri, COMMITTED)",
        "tests/unit/checkpoint/test_commit.py",
    ),
    Mutant(
        "the other ranks are not asked to end",
        "kftrain/train/agent.py",
        "        _send(running, signal.SIGTERM)\n",
        "",
        "tests/unit/train/test_agent.py --timeout 40",
    ),
    Mutant(
        "a kept process is not told a task's environment",
        "kftrain/kept.py",
        "            os.environ.update(json.loads(line))\n",
        "            pass\n",
        "tests/unit/core/test_kept_process.py",
    ),
]


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass although the product is broken. Raises SystemExit where the text is not there."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            source, ignored = REPOSITORY / name, shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, root / name, ignore=ignored) if source.is_dir() else shutil.copy(source, root)
        target = root / mutant.path
        text = target.read_text()
        if text.count(mutant.before) != 1:
            sys.exit(f"{mutant.name}: {mutant.path} holds the text {text.count(mutant.before)} times, not once")
        target.write_text(text.replace(mutant.before, mutant.after))
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode not in (0, 1):  # no tests, or they could not be collected: that proves nothing
            sys.exit(
                f"{mutant.name}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
            )
        return ended.returncode == 0


def main(names: list[str]) -> int:
    """Tries the mutants of these names, or all; returns 1 where one survives."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    assert chosen, f"no such mutant: {names}"
    alive = []

    def attempt(mutant: Mutant) -> None:
        start = time.monotonic()
        survived = survives(mutant)
        print(f"{'SURVIVED' if survived else 'killed  '} {time.monotonic() - start:5.0f} s  {mutant.name}", flush=True)
        if survived:
            alive.append(mutant)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(attempt, chosen))
    print(f"{len(chosen) - len(alive)} killed, {len(alive)} survived")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
