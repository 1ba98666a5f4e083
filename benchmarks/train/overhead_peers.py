"""What the loops of others cost beyond the same step: one process, one thread, the model of `overhead_ours.py`.

    python benchmarks/train/overhead_peers.py fabric|accelerate|lightning [--steps 1500]

Each loop is the one of its documentation, without logging, progress bar or checkpoints. It needs of kftrain only the
model, whose folder must be on PYTHONPATH. Last line: microseconds of the bare step and of one of the loop.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from turns import Turns

from kftrain.models.transformer import Transformer

ROWS, LENGTH, NUM_BATCHES, VOCABULARY = 8, 8, 16, 259
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP_NORM = 1.0

Batch = tuple[torch.Tensor, torch.Tensor]


def new_model() -> torch.nn.Module:
    return Transformer(vocab_size=VOCABULARY, sequence_length=LENGTH, dim=8, num_layers=2, num_heads=2, ffn_dim=16)


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def set_rate(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + step)


def bare_step(model: torch.nn.Module) -> Callable[[int, Batch], None]:
    """A step as one writes it by hand."""
    optimizer, parameters = new_optimizer(model), list(model.parameters())

    def step(number: int, batch: Batch) -> None:
        set_rate(optimizer, number)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fabric(model: torch.nn.Module, batches: Iterator[Batch], num_steps: int) -> None:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, new_optimizer(model))
    for number, batch in enumerate(batches):
        set_rate(optimizer, number)
        fabric.backward(loss_of(wrapped, batch))
        fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accelerate(model: torch.nn.Module, batches: Iterator[Batch], num_steps: int) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, new_optimizer(model))
    for number, batch in enumerate(batches):
        with accelerator.accumulate(wrapped):
            set_rate(optimizer, number)
            accelerator.backward(loss_of(wrapped, batch))
            accelerator.clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()


def lightning(model: torch.nn.Module, batches: Iterator[Batch], num_steps: int) -> None:
    """Lightning's Trainer."""
    import lightning as lit

    class Module(lit.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, number: int) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = new_optimizer(self.model)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Batches(torch.utils.data.IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            return batches

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lit.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        gradient_clip_val=CLIP_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


LOOPS = {"fabric": fabric, "accelerate": accelerate, "lightning": lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=[*LOOPS, "available"])
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.loop == "available":
        print(json.dumps({name: problem_of(name) for name in LOOPS}))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (NUM_BATCHES, ROWS, LENGTH + 1))
    batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
    model = new_model()
    turns = Turns(batches, bare_step(copy.deepcopy(model)))
    LOOPS[arguments.loop](model, turns.steps(0, arguments.steps), arguments.steps)
    print(json.dumps(turns.figures()))


def problem_of(loop: str) -> str:
    """Why it cannot be imported here; empty where it can."""
    try:
        importlib.import_module({"fabric": "lightning.fabric"}.get(loop, loop))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with an environment, the row says it
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    main()
