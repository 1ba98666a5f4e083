"""Language modeling whose processes do what the environment says: print, sleep, die, or leave without a word.

`SCRIPT` is JSON: step of the process (from 0) -> what it does before that step's loss. `clock`: rank -> the steps in
which an hour passes for it; otherwise none does for what waits for the next checkpoint.
"""

import ctypes
import functools
import json
import os
import signal
import sys
import time

from kftrain.checkpoint import exporting
from kftrain.run import commit
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.train import saves


class ScriptedTask(LanguageModeling):
    seconds = 0.0
    """Of the clock, which the task of the probe shares."""

    def __init__(self, *, sequence_length: int = 32, tokenizer: str = "bytes") -> None:
        super().__init__(sequence_length=sequence_length, tokenizer=tokenizer)
        self.script = json.loads(os.environ.get("SCRIPT", "{}"))
        self.num_losses = 0
        if "commit_seconds" in self.script:
            commit.commit = functools.partial(slowly, commit.commit, self.script["commit_seconds"])
        if "clock" in self.script:
            saves.monotonic = lambda: ScriptedTask.seconds  # type: ignore[attr-defined]
        if "export_after" in self.script:
            late = functools.partial(after, exporting.export_checkpoint, self.script["export_after"])
            exporting.export_checkpoint = late

    def loss(self, output, batch, weight):
        time.sleep(self.script.get("step_seconds", 0))
        if self.num_losses in self.script.get("clock", {}).get(os.environ["RANK"], ()):
            ScriptedTask.seconds += 3600
        if self.script.get("chatter"):
            chatter(self.num_losses)
        if self.script.get("rank", 0) == int(os.environ["RANK"]) and self.script.get("step") == self.num_losses:
            globals()[self.script["do"]](*self.script.get("with", ()))
        self.num_losses += 1
        return super().loss(output, batch, weight)

    def statistics(self, output, batch):
        if self.script.get("hang_in_statistics") == int(os.environ["RANK"]):
            hang()
        if self.script.get("statistics_seconds"):
            print("slow statistics")
            time.sleep(self.script["statistics_seconds"])
        return super().statistics(output, batch)


def slowly(function, seconds, *arguments):
    time.sleep(seconds)
    return function(*arguments)


def after(function, path, *arguments):
    """Once a file is there."""
    print("export begins")
    await_file(path)
    return function(*arguments)


def chatter(step):
    """A line in pieces, a line from below Python, both streams, and a line that never ends."""
    rank = os.environ["RANK"]
    for index in range(50):
        print("rank", rank, "step", step, "line", index)
        sys.stderr.write(f"rank {rank} warns {step} {index}\n")
    os.write(1, f"rank {rank} from C {step}\n".encode())
    sys.stdout.write(f"rank {rank} waits ...")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    ctypes.string_at(0)


def abort():
    os.abort()


def await_file(path):
    while not os.path.exists(path):
        time.sleep(0.02)


def await_stop():
    """Until this process was asked to stop, and has noted it."""
    print("late")
    while not signal.getsignal(signal.SIGTERM).__self__.requested:
        time.sleep(0.02)
    time.sleep(1)


def call_alone():
    """A collective operation that the other processes never enter."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))


def leave():
    os._exit(0)


def fail():
    raise ValueError("scripted")


def hang():
    time.sleep(1000)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil():
    ctypes.PyDLL(None).sleep(1000)
