"""What every process of a job runs: `python -m kftrain.train.rank`, started by torchrun.

Its exit code is the error's own. The first process of a node that fails writes its error to the file that the
supervisor named, by exclusive creation: those that fail afterwards, because their peer is gone, come too late to hide
the cause.

torch is imported late: what it prints or raises on the way in belongs into the process's log, and a SIGTERM while it
is read is noted.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback

import click

from kftrain import storage
from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE, ConfigError, KftrainError, RetryableError, UserCodeError, error_to_dict
from kftrain.launch.completion import load_config
from kftrain.processes import die_with_parent
from kftrain.train import output
from kftrain.train.signals import StopRequest
from kftrain.train.supervisor import ERROR_FILE_ENV
from kftrain.train.verdict import LOST_PEER

_TORCH_LOST_PEER = re.compile(r"gloo/|Gloo |Connection closed by peer|NCCL|ProcessGroup(Gloo|NCCL)|c10d|TCPStore")
"""torch's own wording, which no message of a user's code has by chance."""

_LOST_PEER = re.compile(rf"{_TORCH_LOST_PEER.pattern}|DistStore|Connection (closed|reset)|Broken pipe")
"""What a RuntimeError outside of a user's code says where a connection to a peer broke."""


@click.command()
@click.option("--task", type=click.Choice(["train", "evaluate"]), required=True)
@click.option("--run-uri", required=True)
@click.option("--digest", required=True)
def main(task: str, run_uri: str, digest: str) -> None:
    """One process of a job."""
    die_with_parent()
    output.redirect()
    try:
        if task == "train":
            _train(RunPaths(run_uri), digest)
        else:
            _evaluate(RunPaths(run_uri), digest)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: report, then exit with the right code
        sys.exit(report(error))


def _train(paths: RunPaths, digest: str) -> None:
    with StopRequest().on_sigterm() as stop:
        resolved = load_config(paths, digest)
        from kftrain.train.session import train

        train(paths, resolved, stop)


def _evaluate(paths: RunPaths, digest: str) -> None:
    """Has nothing to commit, so SIGTERM simply ends it."""
    resolved = load_config(paths, digest)
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
    sys.stderr.write(f"kftrain: error: {document['line']}\n")
    return known.exit_code if known else BUG_CODE


def classify(error: BaseException) -> KftrainError | None:
    """The expected failure behind an exception; None for a bug."""
    if "torch" in sys.modules:  # else it failed before, and torch may be what cannot be imported
        known = _of_torch(error)
        if known is not None:
            return known
    if isinstance(error, KftrainError):
        return error
    if storage.is_outage(error):
        return RetryableError(
            f"storage cannot be reached: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        )
    return None


def _of_torch(error: BaseException) -> KftrainError | None:
    import torch
    import torch.distributed as dist

    cause = error.__cause__ if isinstance(error, KftrainError) and error.__cause__ else error
    if isinstance(cause, torch.OutOfMemoryError):
        return ConfigError(
            "out of GPU memory", fix="lower train.micro_batch_size, or set train.activation_checkpointing: blocks"
        )
    wording = _TORCH_LOST_PEER if isinstance(error, UserCodeError) else _LOST_PEER
    lost = isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and wording.search(str(cause)))
    if lost and not isinstance(error, RetryableError):
        return RetryableError(f"{LOST_PEER}: {str(cause).splitlines()[0][:160]}")
    return None


if __name__ == "__main__":
    main()
