"""What every process of a job runs: `python -m kftrain.train.rank`, started by torchrun.

Its exit code is the error's own. The first process of a node that fails writes its error to the file that the
supervisor named, by exclusive creation: those that fail afterwards, because their peer is gone, come too late to hide
the cause.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback

import click
import torch
import torch.distributed as dist

from kftrain import config, storage
from kftrain.config import Config
from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE, ConfigError, KftrainError, RetryableError, error_to_dict
from kftrain.processes import die_with_parent
from kftrain.train.signals import StopRequest
from kftrain.train.supervisor import ERROR_FILE_ENV

_LOST_PEER = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|NCCL|ProcessGroup|TCPStore|store", re.IGNORECASE)


@click.command()
@click.option("--task", type=click.Choice(["train", "evaluate"]), required=True)
@click.option("--run-uri", required=True)
@click.option("--digest", required=True)
def main(task: str, run_uri: str, digest: str) -> None:
    """One process of a job."""
    die_with_parent()
    try:
        with StopRequest().on_sigterm() as stop:
            _run(task, RunPaths(run_uri), digest, stop)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: report, then exit with the right code
        sys.exit(report(error))


def load_config(paths: RunPaths, digest: str) -> Config:
    """The run's resolved configuration. Raises ConfigError if it is not the one that the job was started for."""
    resolved = config.parse(storage.read_text(paths.config), where=paths.config)
    if resolved.digest() != digest:
        raise ConfigError(
            "config.yaml is not the one this job was started for",
            where=paths.config,
            value=resolved.digest()[:16],
            fix="the job needs the same version of kftrain as its launcher",
        )
    return resolved


def _run(task: str, paths: RunPaths, digest: str, stop: StopRequest) -> None:
    resolved = load_config(paths, digest)
    if task == "train":
        from kftrain.train.session import train

        train(paths, resolved, stop)
    else:
        from kftrain.evaluate.session import evaluate

        evaluate(paths, resolved)


def report(error: Exception) -> int:
    """Writes the error for the supervisor and to stderr; returns the exit code."""
    known = classify(error)
    document = {**error_to_dict(known or error), "rank": int(os.environ.get("RANK", "0"))}
    if ERROR_FILE_ENV in os.environ:
        with contextlib.suppress(FileExistsError):
            storage.create_json(os.environ[ERROR_FILE_ENV], document)
    if known is None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"rank {document['rank']}: {document['line']}\n")
    return known.exit_code if known else BUG_CODE


def classify(error: BaseException) -> KftrainError | None:
    """The expected failure behind an exception; None for a bug."""
    cause = error.__cause__ if isinstance(error, KftrainError) and error.__cause__ else error
    if isinstance(cause, torch.OutOfMemoryError):
        return ConfigError(
            "out of GPU memory", fix="lower train.micro_batch_size, or set train.activation_checkpointing: blocks"
        )
    lost = isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and _LOST_PEER.search(str(cause)))
    if lost and not isinstance(error, RetryableError):
        return RetryableError(f"lost contact with another process: {str(cause).splitlines()[0][:160]}")
    return error if isinstance(error, KftrainError) else None


if __name__ == "__main__":
    main()
