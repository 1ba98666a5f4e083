"""A script for torchrun: bare torch, DistributedDataParallel. `--fault WHAT --at STEP` makes it misbehave once."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.models.bigram import Bigram
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import kftrain
from kftrain.tasks.settings import TaskConfig

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=8)
arguments.add_argument("--fault", default="")
arguments.add_argument("--at", type=int, default=6)
options = arguments.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
task = TaskConfig(kind="language_modeling", sequence_length=32, tokenizer="bytes")
dataset = kftrain.open_dataset(os.environ["KFTRAIN_DATASET"], "train", task=task)
bare = Bigram(dataset.task.model_arguments()["vocab_size"])
model, first = DistributedDataParallel(bare), 0
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
resume = os.environ.get("KFTRAIN_RESUME", "")
if resume:
    state = torch.load(Path(resume) / "state" / "all.pt", weights_only=True)
    bare.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
    nodes = size // int(os.environ["LOCAL_WORLD_SIZE"])
    assert [(Path(resume) / f"node-{node}").read_text() for node in range(nodes)] == [
        str(node) for node in range(nodes)
    ]
checkpoints = Path(os.environ.get("KFTRAIN_CHECKPOINT_FOLDER", "."))
misbehaves = options.fault if not resume else ""


def save(step):
    folder = checkpoints / f"step-{step}"
    (folder / "state").mkdir(parents=True, exist_ok=True)
    if rank == 0:
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "state" / "all.pt")
    if os.environ["LOCAL_RANK"] == "0":
        (folder / f"node-{os.environ['GROUP_RANK']}").write_text(os.environ["GROUP_RANK"])
    if misbehaves == "killed in commit" and step >= options.at and rank == size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    kftrain.commit(folder)


for step in range(first + 1, options.steps + 1):
    if misbehaves == "stop" and step > options.at:
        while not kftrain.should_stop():
            time.sleep(0.05)
        save(step - 1)
        raise SystemExit(0)
    numbers = [(step * 8 + row) % len(dataset) for row in range(rank, 8, size)]
    batch = dataset.collate(dataset.__getitems__(numbers))
    loss = cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kftrain.report(step, {"loss": loss.item()})
    if step == options.at:
        if misbehaves == "hang" and rank == 1:
            time.sleep(3600)
        if misbehaves == "crash":
            raise ValueError("no good")
        if misbehaves.startswith("exit"):
            raise SystemExit(int(misbehaves.split()[1]))
        if misbehaves == "empty":
            (checkpoints / "empty").mkdir(exist_ok=True)
            kftrain.commit(checkpoints / "empty")
    if step % 3 == 0 or step == options.steps:
        save(step)

export = checkpoints / "export"
if rank == 0:
    export.mkdir()
    state = bare.state_dict()
    if misbehaves == "other model":
        state["more"] = torch.zeros(2)
    save_file(state, export / "model.safetensors")
kftrain.complete(export)
