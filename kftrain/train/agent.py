"""torchrun, with the exit code of the process that failed first.

`torchrun` itself ends with 1 whatever its workers ended with, and the training operator takes 1 for a permanent
failure. This runs the very same code and maps the outcome.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from kftrain.processes import die_with_parent, shell_code


def main(arguments: list[str]) -> int:
    """Runs torchrun with these arguments; returns 0 or the first failed worker's code (128 + N for signal N)."""
    die_with_parent()
    try:
        run(get_args_parser().parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_code(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
