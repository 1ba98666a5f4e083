"""Trains with Hugging Face's Trainer as a script of kftrain's `train.command`.

Without kftrain's variables nothing starts; what it does with each of them stands in docs/foreign-trainers.md.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_llama import TinyLlama
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import kftrain
from kftrain.tasks.settings import TaskConfig

STEPS, SEED = int(os.environ["KFTRAIN_STEPS"]), int(os.environ["KFTRAIN_SEED"])
CHECKPOINTS = Path(os.environ["KFTRAIN_CHECKPOINT_FOLDER"])


class Kftrain(TrainerCallback):
    """Tells kftrain each step and each checkpoint, and stops where it asks to."""

    def on_step_end(self, args, state, control, **_):
        if kftrain.should_stop():
            control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:  # not the summary at the end, which is of no step
            kftrain.report(state.global_step, logs)

    def on_save(self, args, state, control, **_):
        kftrain.commit(CHECKPOINTS / f"checkpoint-{state.global_step}")


task = TaskConfig(kind="language_modeling", sequence_length=64, tokenizer="bytes")
dataset = kftrain.open_dataset(os.environ["KFTRAIN_DATASET"], task=task)
set_seed(SEED)
model = TinyLlama(**dataset.task.model_arguments())


def collate(samples):
    """Make the arguments of the model; `shift_labels` are targets that stand at the place of their input already."""
    batch = dataset.collate(samples)
    targets = batch["targets"].masked_fill(batch["targets"] == dataset.task.tokenizer.padding, -100)
    return {"input_ids": batch["inputs"], "labels": targets, "shift_labels": targets}


trainer = Trainer(
    model.inner,
    TrainingArguments(
        output_dir=str(CHECKPOINTS),
        max_steps=STEPS,
        per_device_train_batch_size=int(os.environ["KFTRAIN_GLOBAL_BATCH_SIZE"]) // int(os.environ["WORLD_SIZE"]),
        learning_rate=3e-3,
        warmup_steps=10,
        seed=SEED,
        save_steps=STEPS // 4,
        save_total_limit=1,
        logging_steps=1,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    ),
    data_collator=collate,
    train_dataset=dataset,
    callbacks=[Kftrain()],
)
trainer.train(resume_from_checkpoint=os.environ["KFTRAIN_RESUME"] or None)
if trainer.state.global_step < STEPS:
    sys.exit(0)  # stopped after a commit: the next attempt goes on

export = CHECKPOINTS / "export"
if trainer.is_world_process_zero():
    export.mkdir()
    save_file(model.state_dict(), export / "model.safetensors")
kftrain.complete(export)
