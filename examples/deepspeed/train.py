"""Trains with DeepSpeed ZeRO as a script of kftrain's `train.command`: weights, gradients and AdamW's state are shared.

What it does with kftrain's variables stands in docs/foreign-trainers.md.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from tiny_gpt import TinyGpt
from torch.nn.functional import cross_entropy

import kftrain
from kftrain.tasks.settings import TaskConfig

STEPS, BATCH = int(os.environ["KFTRAIN_STEPS"]), int(os.environ["KFTRAIN_GLOBAL_BATCH_SIZE"])
CHECKPOINTS = Path(os.environ["KFTRAIN_CHECKPOINT_FOLDER"])
SETTINGS = {
    "train_batch_size": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
}

task = TaskConfig(kind="language_modeling", sequence_length=64, tokenizer="bytes")
dataset = kftrain.open_dataset(os.environ["KFTRAIN_DATASET"], task=task)
deepspeed.init_distributed()
rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(int(os.environ["KFTRAIN_SEED"]))
model = TinyGpt(**dataset.task.model_arguments())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
if os.environ["KFTRAIN_RESUME"]:
    engine.load_checkpoint(os.environ["KFTRAIN_RESUME"])

done = engine.global_steps
while done < STEPS:
    rows = [(BATCH * done + row) % len(dataset) for row in range(rank, BATCH, size)]
    batch = dataset.collate(dataset.__getitems__(rows))
    logits = engine(batch["inputs"].to(engine.device)).flatten(0, 1)
    loss = cross_entropy(logits, batch["targets"].flatten().to(engine.device))
    engine.backward(loss)
    engine.step()
    done = engine.global_steps
    kftrain.report(done, {"loss": loss.item()})
    stop = kftrain.should_stop()
    if stop or done % (STEPS // 4) == 0 or done == STEPS:
        folder = CHECKPOINTS / f"step-{done}"
        engine.save_checkpoint(str(folder))  # each rank writes its own part
        kftrain.commit(folder)
    if stop:
        sys.exit(0)  # the next attempt goes on

export = CHECKPOINTS / "export"
with deepspeed.zero.GatheredParameters(list(model.parameters())):  # whole weights, which no rank has under stage 3
    if rank == 0:
        export.mkdir()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, export / "model.safetensors")
kftrain.complete(export)
