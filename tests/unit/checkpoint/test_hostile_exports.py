"""Exports, and URIs of exports, that somebody else has written: nothing of theirs runs, only what is listed loads."""

import hashlib
import json
import os
import sys

import pytest
import safetensors.torch
import torch

from kftrain.checkpoint.export import load_export, verify_export
from kftrain.errors import CheckpointError, ConfigError, KftrainError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import KINDS_VARIABLE, ROOTS_VARIABLE, Trust

TASK = {"kind": "language_modeling", "sequence_length": 8}
MODEL = {"kind": "transformer", "dim": 8, "num_layers": 1, "num_heads": 2}
ARGUMENTS = build_task(TaskConfig(**TASK)).model_arguments()
ANYWHERE = Trust(schemes=frozenset({"file", "memory"}))

KINDS = [
    "os:system",
    "builtins:eval",
    "builtins:exec",
    "subprocess:check_output",
    "kftrain.core.storage:remove",
    "kftrain.models.registry:build_model",
    "torch.hub:load",
    "pickle:loads",
    "os.path:os.system",
    " os:system",
    "os :system",
    "transformer:os.system",
    "…:system",
    "os:system\n",
    ":",
    "",
]


@pytest.fixture
def trained():
    torch.manual_seed(0)
    return build_model(ModelConfig(**MODEL), ARGUMENTS)


def weights(model):
    seen, tensors = set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def write(folder, model, *, description=None, files=None, listed=None, entries=None):
    """An export as its format says, made by hand; returns its URI and digest."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": 1, "model": MODEL, "task": TASK, "model_arguments": ARGUMENTS, **(description or {})}
    contents = {
        "kftrain.json": json.dumps(document).encode(),
        "config.json": b"{}",
        "model.safetensors": safetensors.torch.save(weights(model)),
        **(files or {}),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    names = contents if listed is None else listed
    manifest = {
        "schema_version": 1,
        "checkpoint_digest": "c",
        "training_digest": "t",
        "dataset_digest": "d",
        "step": 1,
        "files": {
            name: {"bytes": len(contents[name]), "sha256": hashlib.sha256(contents[name]).hexdigest()} for name in names
        }
        | (entries or {}),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder), hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def test_an_export_is_loaded_with_its_very_weights(tmp_path, trained):
    loaded = load_export(*write(tmp_path / "export", trained))
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(loaded.model(tokens), trained.eval()(tokens)) and not loaded.model.training


@pytest.mark.parametrize("section", ["task", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_reader_has_allowed_is_neither_imported_nor_called(tmp_path, trained, monkeypatch, section, kind):
    called = []
    for name in ("system", "popen"):
        monkeypatch.setattr(os, name, lambda *given, **named: called.append(given))
    options = {"command": f"touch {tmp_path}/marker", "uri": str(tmp_path), "args": ["touch", f"{tmp_path}/marker"]}
    export = write(tmp_path / "export", trained, description={section: {"kind": kind, **options}})
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=f"{section}.kind"):
        load_export(*export)
    assert not called and not (tmp_path / "marker").exists()
    assert not {name for name in set(sys.modules) - before if not name.startswith(("torch", "kftrain"))}


def test_a_module_with_side_effects_is_not_imported(tmp_path, trained, monkeypatch):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Model: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    export = write(tmp_path / "export", trained, description={"model": {"kind": "evil_module:Model"}})
    with pytest.raises(ConfigError, match="evil_module:Model"):
        load_export(*export)
    assert not (tmp_path / "marker").exists()


class NoModule:
    """Counts how often it is made."""

    made = 0

    def __init__(self, **arguments):
        NoModule.made += 1


class OwnModel(torch.nn.Linear):
    def __init__(self, **arguments):
        super().__init__(1, 1)


def test_a_kind_that_the_environment_lists_is_built(tmp_path, trained, monkeypatch):
    kind = f"{__name__}:OwnModel"
    export = write(tmp_path / "export", OwnModel(), description={"model": {"kind": kind}})
    with pytest.raises(ConfigError, match=f"{KINDS_VARIABLE}"):
        load_export(*export)
    monkeypatch.setenv(KINDS_VARIABLE, f"some.other:Model, {kind}")
    assert isinstance(load_export(*export).model, OwnModel)


def test_a_class_that_is_no_module_is_not_called_even_where_it_is_allowed(tmp_path, trained):
    kind = f"{__name__}:NoModule"
    export = write(tmp_path / "export", trained, description={"model": {"kind": kind}})
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        load_export(*export, trust=Trust(frozenset({kind}), schemes=frozenset({"file"})))
    task = write(tmp_path / "other", trained, description={"task": {"kind": kind}})
    with pytest.raises(ConfigError, match=r"task\.kind: is no task"):
        load_export(*task, trust=Trust(frozenset({kind}), schemes=frozenset({"file"})))
    assert NoModule.made == 0


@pytest.mark.parametrize(
    "uri",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://example.org/export",
        "ftp://example.org/export",
        "github://org:repo@/export",
        "simplecache::http://169.254.169.254/x",
        "simplecache::s3://bucket/x",
        "s3://bucket/x::http://169.254.169.254/x",
        "zip://x::http://169.254.169.254/x",
        "reference://x",
        "memory://x",
        "FILE:///tmp/x",
        "HTTP://169.254.169.254/x",
        "s3://bucket/a/../../b",
        "s3://bucket/a\\..\\b",
        "/tmp/a\0b",
        "/tmp/a\nb",
    ],
)
def test_a_place_that_no_reader_has_allowed_is_not_asked(monkeypatch, uri):
    import fsspec

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *given, **named: pytest.fail(f"was asked for {given}"))
    with pytest.raises(ConfigError, match="be read"):
        load_export(uri, "0" * 64)


def test_what_the_environment_lists_may_be_read(tmp_path, trained, monkeypatch):
    import fsspec

    uri, digest = write(tmp_path / "export", trained)
    filesystem = fsspec.filesystem("memory")
    filesystem.put(uri, "/trusted/export", recursive=True)
    with pytest.raises(ConfigError, match=ROOTS_VARIABLE):
        load_export("memory://trusted/export", digest)
    monkeypatch.setenv(ROOTS_VARIABLE, "s3://other, memory://trusted/")
    assert load_export("memory://trusted/export", digest).model is not None
    with pytest.raises(ConfigError, match=ROOTS_VARIABLE):
        load_export("memory://trusted-not/export", digest)
    filesystem.rm("/trusted", recursive=True)


@pytest.mark.parametrize("place", ["{root}-2/export", "{root}/../other/export", "{root}/link/export", "{other}/export"])
def test_only_what_lies_below_the_readers_roots_is_read(tmp_path, trained, place):
    root, other = tmp_path / "root", tmp_path / "other"
    (root).mkdir()
    for folder in (other, tmp_path / "root-2"):
        export = write(folder / "export", trained)
    (root / "link").symlink_to(other)
    with pytest.raises(ConfigError, match=r"registry\.trusted_roots"):
        load_export(place.format(root=root, other=other), export[1], trust=Trust(roots=(str(root),)))
    inside = write(root / "runs" / "export", trained)
    (tmp_path / "mount").symlink_to(root)
    for uri in (inside[0], f"file://{inside[0]}", f"{tmp_path}/mount/runs/export", f"{root}/a/../runs/export"):
        (root / "a").mkdir(exist_ok=True)
        assert load_export(uri, inside[1], trust=Trust(roots=(str(root),))).model is not None


def test_only_the_files_of_the_manifest_are_loaded(tmp_path, trained):
    uri, digest = write(tmp_path / "export", trained)
    other = {name: torch.zeros_like(tensor) for name, tensor in weights(trained).items()}
    safetensors.torch.save_file(other, tmp_path / "export" / "zz.safetensors")
    safetensors.torch.save_file(other, tmp_path / "export" / "a.safetensors")
    loaded = load_export(uri, digest).model
    assert all(torch.equal(tensor, weights(trained)[name]) for name, tensor in weights(loaded).items())


@pytest.mark.parametrize("name", ["model.safetensors", "kftrain.json", "manifest.json", "config.json"])
def test_an_export_with_a_flipped_bit_is_refused(tmp_path, trained, name):
    """So is one with another space: a document that reads as before is known by its digest alone."""
    uri, digest = write(tmp_path / "export", trained)
    content = bytearray((tmp_path / "export" / name).read_bytes())
    content[-2] ^= 1
    for changed in (content, content[:-2] + bytes([content[-2] ^ 1]) + b" " + content[-1:]):
        (tmp_path / "export" / name).write_bytes(changed)
        with pytest.raises(CheckpointError):
            load_export(uri, digest)


@pytest.mark.parametrize("name", ["model.safetensors", "kftrain.json", "manifest.json", "config.json"])
def test_the_bytes_that_are_checked_are_the_ones_that_are_loaded(tmp_path, trained, monkeypatch, name):
    """Whoever can write replaces each file between any two times that it is opened."""
    from kftrain.core import storage

    uri, digest = write(tmp_path / "export", trained)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in weights(trained).items()}
    evil = {
        "model.safetensors": safetensors.torch.save(zeros),
        "kftrain.json": json.dumps({"schema_version": 1, "model": MODEL | {"dim": 4}, "task": TASK}).encode(),
        "manifest.json": b"{}",
        "config.json": b'{"evil": true}',
    }[name]
    good, opened = (tmp_path / "export" / name).read_bytes(), []

    def racing(read):
        def swapped(target, *options):
            if target.endswith(name):
                (tmp_path / "export" / name).write_bytes(evil if opened else good)
                opened.append(target)
            return read(target, *options)

        return swapped

    for function in ("open_read", "read_bytes"):
        monkeypatch.setattr(storage, function, racing(getattr(storage, function)))
    loaded = load_export(uri, digest)
    assert opened
    assert all(torch.equal(tensor, weights(trained)[name]) for name, tensor in weights(loaded.model).items())
    assert loaded.config == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"listed": []}, "files"),
        ({"listed": ["kftrain.json", "config.json"]}, "no tensors"),
        ({"listed": ["model.safetensors", "config.json"]}, "kftrain.json"),
        ({"entries": {"../evil.safetensors": {"bytes": 1, "sha256": "0"}}}, "not a plain file name"),
        ({"entries": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}}, "not a plain file name"),
        ({"entries": {"a\0b": {"bytes": 1, "sha256": "0"}}}, "not a plain file name"),
        ({"entries": {"gone.safetensors": {"bytes": 1, "sha256": "0"}}}, "is missing"),
        ({"files": {"model.safetensors": b"\xff" * 65536}}, "no safetensors file"),
        ({"files": {"kftrain.json": b"[]"}}, "kftrain.json"),
        ({"files": {"kftrain.json": b"\xff\xfe"}}, "kftrain.json"),
        ({"files": {"config.json": b"\xff\xfe"}}, "config.json"),
        ({"description": {"model": {"kind": 5}}}, "valid string"),
        ({"description": {"model": {"kind": "transformer", "dim": 12}}}, "do not fit"),
        ({"description": {"model_arguments": {"vocab_size": "x", "sequence_length": 8}}}, "kftrain.json|model"),
        ({"description": {"model_arguments": {"vocab_size": -5, "sequence_length": 8}}}, "kftrain.json|model"),
    ],
)
def test_an_export_that_says_nonsense_is_refused_in_one_line(tmp_path, trained, options, reason):
    export = write(tmp_path / "export", trained, **options)
    with pytest.raises(KftrainError, match=reason) as caught:
        load_export(*export)
    assert "\n" not in caught.value.line


def test_an_export_of_no_files_does_not_verify(tmp_path, trained):
    with pytest.raises(CheckpointError, match="files"):
        verify_export(*write(tmp_path / "export", trained, listed=[]))


def test_a_model_in_an_object_store_is_loaded_from_the_listed_files(tmp_path, trained):
    import fsspec

    uri, digest = write(tmp_path / "export", trained)
    fsspec.filesystem("memory").put(uri, "/hostile/export", recursive=True)
    loaded = load_export("memory://hostile/export", digest, trust=ANYWHERE).model
    assert all(torch.equal(tensor, weights(trained)[name]) for name, tensor in weights(loaded).items())
    fsspec.filesystem("memory").pipe("/hostile/export/kftrain.json", b"{}")
    with pytest.raises(CheckpointError, match="wrong length"):
        load_export("memory://hostile/export", digest, trust=ANYWHERE)
    fsspec.filesystem("memory").rm("/hostile", recursive=True)
