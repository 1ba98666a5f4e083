"""torchrun, with the exit code of the process that failed first.

`torchrun` itself ends with 1 whatever its workers ended with, and the training operator takes 1 for a permanent
failure. This runs the very same code and maps the outcome. It also speaks for a process that was killed: it knows
which one that was.
"""

from __future__ import annotations

import contextlib
import os
import sys

from kftrain import storage
from kftrain.errors import RetryableError
from kftrain.processes import die_with_parent, imports_for_good, shell_code
from kftrain.train import verdict
from kftrain.train.supervisor import ERROR_FILE_ENV

with imports_for_good():
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run


def main(arguments: list[str]) -> int:
    """Runs torchrun with these arguments; returns 0 or the first failed worker's code (128 + N for signal N)."""
    die_with_parent()
    try:
        run(get_args_parser().parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return _explained(error)
    except SignalException as error:
        return 128 + error.sigval
    except (dist.DistError, RendezvousError) as error:  # the nodes did not find each other
        reason = " ".join(str(error).split())[:160]
        lost = RetryableError(f"{verdict.LOST_PEER}: {reason}")
        _leave(lost.to_dict())
        return lost.exit_code
    return 0


def _explained(error: ChildFailedError) -> int:
    """Writes the error of the process that was the cause, if it could not do so itself; returns its code."""
    failures = [verdict.Failure(rank, failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()]
    found, document = verdict.cause(failures, storage.read_json_if_exists(os.environ[ERROR_FILE_ENV]))
    if document is not None:
        _leave(document)
    return shell_code(found.returncode)


def _leave(document: verdict.Document) -> None:
    with contextlib.suppress(OSError):  # the disk is full: the exit code says enough
        storage.publish_json(os.environ[ERROR_FILE_ENV], document)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
