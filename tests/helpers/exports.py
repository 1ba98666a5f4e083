"""Exports made by hand, of a tiny transformer or of any class."""

import hashlib
import json
import math

import torch
from safetensors.torch import save_file

from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig

TASK = {"kind": "language_modeling", "sequence_length": 8}
MODEL = {"kind": "transformer", "dim": 12, "num_layers": 2, "num_heads": 3, "ffn_dim": 20}
ARGUMENTS = build_task(TaskConfig(**TASK)).model_arguments()


def state_of(options=(), dtype=torch.float32):
    torch.manual_seed(3)
    state = build_model(ModelConfig(**{**MODEL, **dict(options)}), ARGUMENTS).state_dict()
    return {name: torch.randn(tensor.shape).to(dtype) for name, tensor in state.items()}


def write(folder, state, num_files=1, options=(), more=None):
    """An export made by hand in so many files; returns its URI and digest."""
    folder.mkdir(parents=True, exist_ok=True)
    names, size = sorted(state), math.ceil(len(state) / num_files)
    for number in range(num_files):
        part = {name: state[name].contiguous() for name in names[number * size : (number + 1) * size]}
        save_file(part, folder / f"model-{number + 1:05d}-of-{num_files:05d}.safetensors")
    described = {"schema_version": 1, "model": {**MODEL, **dict(options)}, "task": TASK, "model_arguments": ARGUMENTS}
    (folder / "kftrain.json").write_text(json.dumps(described))
    (folder / "config.json").write_text("{}")
    for name, content in (more or {}).items():
        (folder / name).write_text(content)
    return listed(folder)


def listed(folder):
    """The manifest of what lies in a folder."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    content = json.dumps({"schema_version": 1, "step": 1, "files": files, **digests})
    (folder / "manifest.json").write_text(content)
    return str(folder), hashlib.sha256(content.encode()).hexdigest()


def of_kind(folder, state, kind):
    """An export of a model of another class."""
    write(folder, state)
    described = json.loads((folder / "kftrain.json").read_text())
    (folder / "kftrain.json").write_text(json.dumps({**described, "model": {"kind": kind}, "model_arguments": {}}))
    return listed(folder)
