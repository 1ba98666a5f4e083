"""Two pods of a sharding job against one, each held to one processor of this machine: images, and text.

    python benchmarks/sharding_pods.py [--images 60000] [--megabytes 100] [--rounds 3] [--kinds text]

A pod is what a launcher starts, `kftrain worker --task shard`, with its supervisor, its rank and the process that
encodes. Rank r runs on processor r alone. The single pod has the shares of both. The images are those of `bench-data`
and stay the files that they are; the text is the source code of what is installed here, in files of a megabyte, and
becomes tokens of a vocabulary of 4,096.

    job             from writing down the pods' shares until all have ended: Python, imports, reading, encoding, writing
    step            the whole shard step: listings, job, looking for the parts, manifest
    apart           two single pods at once, each held to one processor, with a dataset of its own each: what two of
                    these processors can do at all

Every ratio is of one round, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "data"))

import content

from kftrain.config import Config
from kftrain.launch import jobs
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV, JobSpec
from kftrain.run.documents import PartShare
from kftrain.run.paths import RunPaths
from kftrain.sharding.shard_dataset import ShardingResult, shard_dataset
from kftrain.tasks import build_task
from kftrain.tasks.bpe import train_bpe

TEXT_FILE_BYTES = 1_000_000
PART_BYTES = 4_000_000
"""Small against a share, as parts of the default size are against a large dataset: shares differ by a part at most."""
TASKS: dict[str, dict[str, Any]] = {
    "images": {
        "kind": "image_classification",
        "storage": "files",
        "num_classes": 10,
        "num_channels": 3,
        "image_size": 224,
    },
    "text": {"kind": "language_modeling"},
}


class Pods:
    """The launcher of a job whose pods are processes of this machine, each held to one processor."""

    interrupted = False

    def __init__(self, processors: Sequence[int]) -> None:
        self._processors = processors

    def run(self, spec: JobSpec) -> int:
        """Run the pods to their end; return the exit code of one that has failed, else 0."""
        pods = [self._start(spec, rank) for rank in range(len(self._processors))]
        return max(abs(pod.wait()) for pod in pods)

    def _start(self, spec: JobSpec, rank: int) -> subprocess.Popen[bytes]:
        arguments = spec.workers.arguments[: spec.workers.arguments.index("--processes")]
        size = ("--processes", "1", "--nodes", str(len(self._processors)))
        place = {NODE_RANK_ENV: str(rank), ADDRESS_ENV: "nowhere.invalid"}
        held = ("taskset", "--cpu-list", str(self._processors[rank]))
        return subprocess.Popen(
            [*held, sys.executable, "-m", "kftrain", *arguments, *size],
            env={**os.environ, **spec.environment, **place},
            stdout=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Do nothing: the pods have ended."""


LAUNCHERS: dict[str, Pods] = {}
"""Storage root -> who runs its jobs."""


@dataclass
class Step:
    """A shard step of a job's pods."""

    config: Config
    processors: Sequence[int]
    job_seconds: float = 0.0

    def run(self) -> tuple[ShardingResult, float]:
        """Shard; return the result and the seconds of all of it."""
        LAUNCHERS[self.config.run.storage_root] = Pods(self.processors)
        start = time.perf_counter()
        result = shard_dataset(self.config, build_task(self.config.task), lambda line: None, self._run_job)
        assert self.job_seconds and not result.reused
        return result, time.perf_counter() - start

    def _run_job(self, config: Config, shares: Sequence[PartShare]) -> str:
        if len(self.processors) == 1:
            shares = [shares[0].model_copy(update={"jobs": [job for share in shares for job in share.jobs]})]
        start = time.perf_counter()
        folder = jobs.run_sharding(RunPaths.of(config.run.storage_root, "r-1"), config, shares)
        self.job_seconds = time.perf_counter() - start
        return folder


def make_text_folder(folder: Path, num_bytes: int) -> None:
    """Write source code in files of a megabyte, each of which begins with its own number, and beside it a tokenizer."""
    folder.mkdir()
    sources = sorted(Path(os.__file__).parent.rglob("*.py"))
    code = b"".join(path.read_bytes() for path in sources).decode("utf-8", "ignore").encode()
    for number in range(num_bytes // TEXT_FILE_BYTES):
        start = number * TEXT_FILE_BYTES % (len(code) - TEXT_FILE_BYTES)
        text = code[start : start + TEXT_FILE_BYTES].decode("utf-8", "ignore")
        (folder / f"{number:05d}.txt").write_text(f"# {number}\n{text}")
    tokenizer = train_bpe([code[:TEXT_FILE_BYTES].decode("utf-8", "ignore").encode()], 4096, TEXT_FILE_BYTES)
    TASKS["text"]["tokenizer"] = str(folder.parent / "tokenizer.json")
    (folder.parent / "tokenizer.json").write_bytes(tokenizer.content)


def configure(kind: str, source: Path, root: Path) -> Config:
    data = {"source": str(source), "shard_pods": 2, "part_size_bytes": PART_BYTES}
    return Config.model_validate({"run": {"storage_root": str(root)}, "data": data, "task": TASKS[kind]})


def measure_round(kind: str, source: Path, scratch: Path) -> dict[str, float]:
    """Return seconds of the jobs and the steps, and how many times as fast two were as one."""

    def shard(name: str, *processors: int) -> tuple[str, float, float]:
        root = scratch / name
        step = Step(configure(kind, source, root), processors)
        result, seconds = step.run()
        shutil.rmtree(root)
        return result.dataset_digest, step.job_seconds, seconds

    one_digest, one_job, one_step = shard("one", 0)
    two_digest, two_job, two_step = shard("two", 0, 1)
    assert one_digest == two_digest
    with ThreadPoolExecutor(2) as threads:
        apart = list(threads.map(lambda number: shard(f"apart-{number}", number), (0, 1)))
    apart_job = max(job for _, job, _ in apart)
    return {
        "job of one pod, s": one_job,
        "job of two pods, s": two_job,
        "step of one pod, s": one_step,
        "step of two pods, s": two_step,
        "two pods against one, job": one_job / two_job,
        "two pods against one, step": one_step / two_step,
        "two pods apart against one, job": 2 * one_job / apart_job,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    arguments = parser.parse_args()
    jobs.build_launcher = lambda config: LAUNCHERS[config.run.storage_root]
    with tempfile.TemporaryDirectory(prefix="sharding-pods-", dir=arguments.folder) as folder:
        scratch = Path(folder)
        content.make(scratch)
        content.make_image_folder(scratch, scratch / "images", arguments.images)
        make_text_folder(scratch / "text", arguments.megabytes * 10**6)
        for kind in arguments.kinds:
            rounds = [measure_round(kind, scratch / kind, scratch) for _ in range(arguments.rounds)]
            for name in rounds[0]:
                print(f"{kind}: {name:32}{statistics.median(one[name] for one in rounds):8.2f}", flush=True)


if __name__ == "__main__":
    main()
