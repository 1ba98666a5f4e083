"""Exports that describe a larger model than they hold: refused before its memory is taken."""

import hashlib
import json
import resource

import pytest
import safetensors.torch
import torch

from kftrain.checkpoint.export import load_export
from kftrain.errors import CheckpointError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.models.transformer import Transformer
from kftrain.models.vision_transformer import VisionTransformer
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig

TEXT = {"kind": "language_modeling", "sequence_length": 8}
IMAGES = {"kind": "image_classification", "image_size": 8, "num_classes": 3}
LLAMA = {"kind": "transformer", "dim": 8, "num_layers": 1, "num_heads": 2}
TIED = {**LLAMA, "tie_embeddings": True}
VISION = {"kind": "vision_transformer", "dim": 8, "num_layers": 1, "num_heads": 2}
HUGE = 10**9


def write(folder, task, model, *, arguments=None, tensors=None, documents=None):
    """An export made by hand of a model's very weights, with another description; returns its URI and digest."""
    folder.mkdir()
    known = build_task(TaskConfig(**(TEXT if task["kind"] == "language_modeling" else IMAGES))).model_arguments()
    description = {"schema_version": 1, "model": model, "task": task, "model_arguments": {**known, **(arguments or {})}}
    contents = {
        "kftrain.json": json.dumps(description).encode(),
        "config.json": b"{}",
        "model.safetensors": safetensors.torch.save(tensors),
        **(documents or {}),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    manifest = json.dumps({"schema_version": 1, "step": 1, "files": files, **digests}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    return str(folder), hashlib.sha256(manifest).hexdigest()


def weights_of(task, model):
    return build_model(ModelConfig(**model), build_task(TaskConfig(**task)).model_arguments()).state_dict()


@pytest.fixture
def never_built(monkeypatch):
    for kind in (Transformer, VisionTransformer):
        monkeypatch.setattr(kind, "init_weights", lambda self: pytest.fail("it was built"))


@pytest.mark.parametrize(
    ("task", "model", "options", "arguments"),
    [
        (TEXT, LLAMA, {"dim": 128}, {}),
        (TEXT, LLAMA, {"num_layers": 50}, {}),
        (TEXT, LLAMA, {"ffn_dim": 4096}, {}),
        (TEXT, LLAMA, {}, {"vocab_size": 40_000}),
        (IMAGES, VISION, {"dim": 256}, {}),
        (IMAGES, VISION, {"num_layers": 50}, {}),
        (IMAGES, VISION, {}, {"image_size": 256}),
        (IMAGES, VISION, {}, {"num_classes": 40_000}),
        (TEXT, LLAMA, {"dim": 2 * HUGE}, {}),
        (TEXT, LLAMA, {"num_layers": HUGE}, {}),
        (TEXT, LLAMA, {"ffn_dim": HUGE}, {}),
        (TEXT, LLAMA, {}, {"vocab_size": HUGE}),
        (IMAGES, VISION, {"num_layers": HUGE}, {}),
        (IMAGES, VISION, {"mlp_ratio": HUGE}, {}),
        (IMAGES, VISION, {"dim": 2**52}, {}),
        (IMAGES, VISION, {}, {"image_size": 2 * HUGE}),
        (IMAGES, VISION, {}, {"num_classes": HUGE}),
    ],
    ids=lambda value: ",".join(f"{key}={number}" for key, number in value.items() if key != "kind"),
)
def test_a_model_that_is_larger_than_its_tensors_is_not_built(
    tmp_path, monkeypatch, task, model, options, arguments, request
):
    tensors = weights_of(task, model)
    request.getfixturevalue("never_built")
    export = write(tmp_path / "e", task, {**model, **options}, arguments=arguments, tensors=tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"larger than its tensors|no model that can be built"):
        load_export(*export)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


def test_a_task_of_very_many_classes_costs_nothing_until_they_are_named(tmp_path):
    task = {**IMAGES, "num_classes": HUGE}
    export = write(tmp_path / "e", task, VISION, arguments={"num_classes": HUGE}, tensors=weights_of(IMAGES, VISION))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"larger than its tensors|no model that can be built"):
        load_export(*export)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


@pytest.mark.parametrize("name", ["kftrain.json", "config.json"])
def test_a_description_of_many_megabytes_is_not_read(tmp_path, name):
    padded = b"{}" + b" " * (20 << 20)
    export = write(tmp_path / "e", TEXT, LLAMA, tensors=weights_of(TEXT, LLAMA), documents={name: padded})
    with pytest.raises(CheckpointError, match=rf"{name}.*larger than"):
        load_export(*export)


def test_bytes_that_a_manifest_only_claims_allow_nothing(tmp_path):
    uri, _ = write(tmp_path / "e", TEXT, {**LLAMA, "num_layers": HUGE}, tensors=weights_of(TEXT, LLAMA))
    manifest = json.loads((tmp_path / "e" / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["bytes"] = 10**15
    content = json.dumps(manifest).encode()
    (tmp_path / "e" / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong length"):
        load_export(uri, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("task", "model"), [(TEXT, LLAMA), (TEXT, {**LLAMA, "tie_embeddings": True}), (IMAGES, VISION)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_fits_its_tensors_is_built(tmp_path, task, model, dtype):
    tensors = {name: value.to(dtype) for name, value in weights_of(task, model).items()}
    loaded = load_export(*write(tmp_path / "e", task, model, tensors=tensors))
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, tensors[name].float())
