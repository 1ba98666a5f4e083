"""Loading an export: each process its parts, every byte checked, and nothing is held twice."""

import os
from functools import partial

import pytest
import torch
from helpers import ranks
from helpers.exports import listed, of_kind, state_of, write
from helpers.models import drawn as drawn_models
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from kftrain.checkpoint import export, export_tensors, filling
from kftrain.checkpoint.export import load_export
from kftrain.errors import CheckpointError
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.transforms import distribute, list_transforms
from kftrain.process import machine
from kftrain.run import commit
from kftrain.trust import Trust

TRUST = Trust(schemes=frozenset({"file"}))


def spread(world, uri, digest, shape, during=lambda: None):
    """What a process has of each parameter of an export: where, and its numbers."""
    empty = export.read_empty(uri, digest, TRUST)
    slots = filling.ModelSlots(empty.model)
    mesh = Mesh(ParallelConfig(**shape).shape(world.size), world)
    names = [name for name, module in empty.model.named_modules() if module in set(empty.model.blocks())]
    strategy = list_transforms(ParallelConfig(**shape), PrecisionConfig(), [], mesh.shape)
    model = distribute(empty.model, strategy, mesh, names).model
    verify = commit.verify_files

    def verified(*arguments):
        verify(*arguments)
        if world.is_main:
            during()

    commit.verify_files = verified
    export.fill(empty, model, slots, world)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return {name: tensor.tolist() for name, tensor in whole.items()}, local


@pytest.mark.parametrize("num_files", [1, 4])
@pytest.mark.parametrize(
    ("size", "shape"),
    [(1, {}), (2, {}), (3, {}), (2, {"strategy": "ddp"}), (4, {"replicate": 2})],
    ids=["one", "two", "three", "copies", "hybrid"],
)
def test_each_process_has_its_parts_of_the_very_weights(tmp_path, num_files, size, shape):
    state = state_of()
    where = write(tmp_path / "e", state, num_files)
    answers = ranks.on(size, spread, *where, shape)
    num_shards = 1 if shape.get("strategy") == "ddp" else size // shape.get("replicate", 1)
    for whole, local in answers:
        assert whole == {name: tensor.tolist() for name, tensor in state.items()}
        assert local <= sum(tensor.numel() for tensor in state.values()) / num_shards + 600


@pytest.mark.parametrize("kept", ["enter.weight", "twin.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_weight_is_one_whichever_name_it_has_and_becomes_fp32(tmp_path, kept, dtype):
    state = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in drawn_models.Drawn().state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name not in {"enter.weight", "twin.weight"} - {kept}}
    where = of_kind(tmp_path / "e", state, kind := "helpers.models.drawn:Drawn")
    model = load_export(*where, Trust(frozenset({kind}), schemes=frozenset({"file"}))).model
    assert model.enter.weight is model.twin.weight and model.enter.weight.dtype == torch.float32
    assert torch.equal(model.enter.weight, state[kept].float())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_by_another(path):
    """Whoever can write does it between the hash and the reading."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    aside = path.with_name("aside")
    aside.write_bytes(content)
    os.replace(aside, path)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flip, "a file is damaged: its sha256 differs"),
        (lambda path: path.unlink(), "a file is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "wrong length"),
    ],
)
def test_a_file_that_is_not_the_one_of_the_manifest_is_refused_by_all_processes(tmp_path, number, spoil, said):
    uri, digest = write(tmp_path / "e", state_of(), 3)
    spoil(tmp_path / "e" / f"model-{number:05d}-of-00003.safetensors")
    for answer in ranks.on(2, spread, uri, digest, {}):
        assert answer.startswith("CheckpointError") and said in answer and f"model-{number:05d}" in answer
    with pytest.raises(CheckpointError, match=said):
        load_export(uri, digest)


@pytest.mark.parametrize("change", [flip, replace_by_another])
def test_a_file_that_is_changed_after_it_was_hashed_is_noticed(tmp_path, change):
    uri, digest = write(tmp_path / "e", state_of(), 2)
    path = tmp_path / "e" / "model-00001-of-00002.safetensors"
    for answer in ranks.on(2, spread, uri, digest, {}, partial(change, path)):
        assert "was changed while it was read" in answer


def each_hashes(world, uri, digest, own_copies):
    """How many files this process hashes, where the machines share a store, or have a copy each."""
    counted, size_and_version = [], export_tensors.storage.size_and_version
    sha256 = commit.storage.sha256_file
    commit.storage.sha256_file = lambda where: counted.append(where) or sha256(where)
    if own_copies:
        export_tensors.storage.size_and_version = lambda where: (*size_and_version(where), world.rank)
    spread(world, uri, digest, {})
    return len(counted)


@pytest.mark.parametrize(("own_copies", "expected"), [(False, [2, 1]), (True, [3, 3])])
def test_files_are_hashed_once_by_all_together_unless_each_machine_has_its_own(tmp_path, own_copies, expected):
    where = write(tmp_path / "e", state_of(), 3)
    assert ranks.on(2, each_hashes, *where, own_copies) == expected


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"lm_head.weight": "../../evil.safetensors"}}',
        '{"weight_map": {"lm_head.weight": "/etc/passwd"}}',
        '{"weight_map": {"lm_head.weight": "s3://bucket/evil.safetensors"}}',
        "[" * 100_000,
        "\0",
    ],
)
def test_nobody_follows_the_index(tmp_path, index):
    state = state_of()
    evil = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    save_file(evil, tmp_path / "evil.safetensors")
    where = write(tmp_path / "a" / "e", state, 2, more={"model.safetensors.index.json": index})
    loaded = load_export(*where).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("model.norm.weight"), r"model\.norm\.weight is \[12\], and missing there"),
        (lambda state: state.update(more=torch.zeros(2)), r"more is missing, and \[2\] there"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(5)}),
            r"\.norm\.weight is \[12\], and \[5\] there",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(3, 4)}),
            r"\.norm\.weight is \[12\], and \[3, 4\]",
        ),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path, change, said):
    state = state_of()
    change(state)
    with pytest.raises(CheckpointError, match=said):
        load_export(*write(tmp_path / "e", state))


def test_a_tensor_that_two_files_hold_is_in_doubt(tmp_path):
    state = state_of()
    folder = tmp_path / "e"
    write(folder, state)
    save_file({"model.norm.weight": torch.ones(12)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"two files .*model\.norm\.weight"):
        load_export(*listed(folder))


def test_a_model_that_does_not_fit_into_memory_is_one_line_with_both_numbers(tmp_path, monkeypatch):
    where = write(tmp_path / "e", state_of())
    monkeypatch.setattr(machine, "read_available_bytes", lambda: 10_000.0)
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GB of memory, and 0\.0 GB are available") as caught:
        load_export(*where)
    assert "\n" not in caught.value.line


class ReadsWeights(torch.nn.Module):
    """Keeps what it has computed of its weights, partly outside of its state."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("scale", self.linear.weight.detach().mean())
        self.register_buffer("other", self.linear.weight.detach().sum(), persistent=False)


def test_what_a_constructor_computes_of_weights_is_there(tmp_path):
    kind = f"{__name__}:ReadsWeights"
    state = {"linear.weight": torch.ones(2, 2), "linear.bias": torch.zeros(2), "scale": torch.tensor(7.0)}
    where = of_kind(tmp_path / "e", state, kind)
    model = load_export(*where, Trust(frozenset({kind}), schemes=frozenset({"file"}))).model
    assert model.scale.item() == 7.0 and not model.other.is_meta and model.linear.weight.tolist() == [[1, 1], [1, 1]]
