"""The weights of an export become those of a training: tied ones, frozen ones, buffers, on every process."""

import hashlib
import json

import pytest
import torch
from helpers import ranks
from helpers.models import drawn as drawn_models
from safetensors.torch import save_file
from torch import nn

from kftrain import config
from kftrain.train.spmd_factory import build_empty, choose_initial_weights


class Normed(nn.Module):
    """Has a table that is kept and one that is not, and counts its batches."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def exported(root, tensors, kind):
    """An export of these tensors below a storage root; the overrides of a run that starts with it."""
    folder = root / "runs" / "a" / "export" / "b"
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    described = {"schema_version": 1, "model": {"kind": kind}, "task": {"kind": "language_modeling"}}
    (folder / "kftrain.json").write_text(json.dumps({**described, "model_arguments": {}}))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    content = json.dumps({"schema_version": 1, "step": 1, "files": files, **digests})
    (folder / "manifest.json").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    found = {"asked": "champion", "origin": "version 3", "export_uri": str(folder), "export_digest": digest}
    return [
        f"run.storage_root={root}",
        f"model.kind={kind}",
        "train.from=champion",
        f"train.initial_weights={json.dumps(found)}",
    ]


def filled(world, overrides):
    """All tensors of the model on one process, as lists."""
    resolved = config.parse("", overrides)
    model, weights = build_empty(resolved.model, {}, world, seed=world.rank)
    choose_initial_weights(model, weights, resolved, world).fill(model)
    return {name: tensor.tolist() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def random_state(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.tensor(41)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("tied", ["enter.weight", "twin.weight"])
def test_each_process_gets_all_of_a_model_whichever_name_a_tied_weight_has(tmp_path, num_processes, tied):
    state = random_state(drawn_models.Drawn())
    state = {name: tensor for name, tensor in state.items() if name not in {"enter.weight", "twin.weight"} - {tied}}
    overrides = exported(tmp_path, state, "helpers.models.drawn:Drawn")
    expected = {name.replace(tied, "enter.weight"): tensor.tolist() for name, tensor in state.items()}
    for found in ranks.on(num_processes, filled, overrides):
        assert not isinstance(found, str), found
        assert found.keys() == {*expected, "table"}
        assert all(found[name] == values for name, values in expected.items())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_buffers_that_are_kept_come_with_the_weights(tmp_path, num_processes):
    state = random_state(Normed())
    overrides = exported(tmp_path, state, f"{__name__}:Normed")
    for found in ranks.on(num_processes, filled, overrides):
        assert not isinstance(found, str), found
        assert all(found[name] == tensor.tolist() for name, tensor in state.items())
        assert found["table"] == [0.0, 1.0, 2.0, 3.0] and found["norm.num_batches_tracked"] == 41


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("norm.weight"), "norm.weight is [4], and missing there"),
        (lambda state: state.pop("norm.running_mean"), "norm.running_mean is [4], and missing there"),
        (lambda state: state.update(more=torch.zeros(2)), "more is missing, and [2] there"),
        (lambda state: state.update({"enter.bias": torch.zeros(5)}), "enter.bias is [4], and [5] there"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_on_all_processes(tmp_path, change, said):
    state = random_state(Normed())
    change(state)
    answers = ranks.on(2, filled, exported(tmp_path, state, f"{__name__}:Normed"))
    assert all(answer.startswith("ConfigError: train.from") and said in answer for answer in answers), answers


def test_an_export_of_another_kind_is_not_read_unless_it_is_trusted(tmp_path):
    overrides = exported(tmp_path, random_state(Normed()), f"{__name__}:Normed")
    answers = ranks.on(1, filled, [*overrides, "model.kind=helpers.models.drawn:Drawn"])
    assert "neither built-in nor one that may be built here" in answers[0]
