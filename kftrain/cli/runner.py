"""The process that runs a compiled pipeline through `kfp.local`: `python -m kftrain.cli.runner SPEC ARGUMENTS ROOT`.

SPEC is a compiled pipeline, or `-` for ours: compiling it here takes one import of kfp, not two.

It is a process of its own because kfp's local runner owns the standard output, the root logger and `print`, and
because a task must be stopped without stopping the runner: the exit handler still has to run. So signals are only noted
here. The running task gets them itself; the ones that start later find STOP_VARIABLE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from kftrain.process import stage_lifetime
from kftrain.process.signals import INTERRUPT, handled

OWN_PIPELINE = "-"

CREATED = "{{$.pipeline_job_create_time_utc}}"
"""What Kubeflow replaces by the time at which a run was created, and `kfp.local` does not know."""

NEXT_STEP = "inputs.parameter_values['pipelinechannel--shard-next_step']"
"""What `kfp.local` finds no value of. So all steps run here; those after the first see that there is nothing to do."""


def main() -> None:
    """Runs the pipeline; an exception, hence exit code 1, where a task failed."""
    spec, arguments, root = sys.argv[1:]
    stage_lifetime.end_with_parent()
    with handled((signal.SIGTERM, INTERRUPT), _note_stop):
        _keep_python3()
        run(spec, json.loads(Path(arguments).read_text()), root)


def run(spec: str, arguments: dict[str, object], root: str) -> None:
    """Runs a compiled pipeline with its artifacts below `root`, which is the caller's to delete."""
    from kfp import components, local

    from kftrain.pipelines.compile import compiled

    workspace = Path(root) / "workspace"  # kfp deletes it at the end, hence nothing that anybody else has put there
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root, workspace_root=str(workspace))
    text = compiled() if spec == OWN_PIPELINE else Path(spec).read_text()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = text.replace(CREATED, now).replace(NEXT_STEP, "('train')")
    components.load_component_from_text(text)(**arguments)


def _note_stop(_number: int, _frame: FrameType | None) -> None:
    os.environ[stage_lifetime.STOP_VARIABLE] = "1"


def _keep_python3() -> None:
    """Lets the runner find this interpreter as `python3`.

    kfp replaces every `python3` in a task's command by `sys.executable`, in the arguments too: a path like
    /data/python3/corpus would come out broken. Replaced by itself it stays whole.
    """
    folder = Path(sys.executable).parent
    if (folder / "python3").exists():
        os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        sys.executable = "python3"


if __name__ == "__main__":
    main()
