"""Checkpoints that somebody has tampered with: nothing of theirs runs."""

import errno
import io
import pickle
from datetime import datetime, timezone

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.documents import entry_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

from kftrain.checkpoint import load, reader
from kftrain.checkpoint.reader import ALLOWED
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, RetryableError

STATE = {
    "weights": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "optimizer": {"step": torch.tensor(7), "lr": 0.5, "betas": (0.9, 0.95), "fused": None, "name": "adamw"},
}


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def empty():
    """A state that is to be filled."""
    optimizer = {**dict.fromkeys(STATE["optimizer"], 0), "step": torch.tensor(0)}
    return {"weights": torch.zeros(2, 3, dtype=torch.bfloat16), "optimizer": optimizer}


def files_of(uri):
    """What a manifest of the folder as it is would list."""
    return {name: entry_of(storage.join(uri, name)) for name in storage.list_names(uri)}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as DCP writes it."""
    uri = str(tmp_path / "checkpoint")
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(uri), no_dist=True)
    return uri


def test_what_dcp_writes_is_read_as_dcp_reads_it(checkpoint):
    state = empty()
    reader.fill_state(state, checkpoint, files_of(checkpoint), alone=True)
    assert torch.equal(state["weights"], STATE["weights"]) and int(state["optimizer"]["step"]) == 7
    assert [state["optimizer"][key] for key in ("lr", "betas", "fused", "name")] == [0.5, (0.9, 0.95), None, "adamw"]


def test_a_checkpoint_in_an_object_store_is_read(checkpoint, tmp_path):
    uri = f"memory://{tmp_path.name}-remote"
    for name in storage.list_names(checkpoint):
        storage.publish(storage.join(uri, name), storage.read_bytes(storage.join(checkpoint, name)))
    state = empty()
    reader.fill_state(state, uri, files_of(uri), alone=True)
    assert torch.equal(state["weights"], STATE["weights"]) and int(state["optimizer"]["step"]) == 7


@pytest.mark.parametrize(
    "error", [RetryableError("storage cannot be reached: refused"), TimeoutError("no answer"), OSError(errno.EIO, "x")]
)
def test_an_outage_while_a_checkpoint_is_read_says_nothing_about_the_checkpoint(error, tmp_path, monkeypatch):
    """As a damaged one it would be passed over for good, or end the job."""

    def away(*arguments):
        raise CheckpointException("x", {0: (error, None)})

    monkeypatch.setattr(reader, "fill_state", away)
    with pytest.raises(RetryableError, match="the checkpoint could not be read"):
        load.load_into({}, str(tmp_path), {})


@pytest.mark.parametrize("place", ["state_dict_metadata", "planner_data", "storage_data"])
def test_a_function_in_the_metadata_is_not_called(checkpoint, tmp_path, place):
    parts = {"state_dict_metadata": {}, "planner_data": {}, "storage_data": {}, "storage_meta": StorageMeta()}
    metadata = Metadata(**{**parts, place: {"x": Payload(tmp_path / "marker")}})
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names what no checkpoint holds.*io\.open") as caught:
        load.load_into(empty(), checkpoint, files_of(checkpoint))
    assert checkpoint in caught.value.line
    with pytest.raises(CheckpointError, match="names what no checkpoint holds"):
        reader.reader(checkpoint, files_of(checkpoint)).read_metadata()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("place", ["../other/__0_0.distcp", "{other}/__0_0.distcp", "unlisted.distcp"])
def test_tensors_of_files_that_the_manifest_does_not_list_are_not_loaded(checkpoint, tmp_path, place):
    """`.metadata` may send the loader to any file, whose content nobody has checked."""
    other = tmp_path / "other"
    evil = {**STATE, "weights": STATE["weights"] + 1}
    dcp.save(evil, storage_writer=dcp.FileSystemWriter(str(other)), no_dist=True)
    files = files_of(checkpoint)
    (tmp_path / "checkpoint" / "unlisted.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((tmp_path / "checkpoint" / ".metadata").read_bytes())
    for entry in metadata.storage_data.values():
        entry.relative_path = place.format(other=other)
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(metadata))
    files[".metadata"] = entry_of(f"{checkpoint}/.metadata")
    state = empty()
    with pytest.raises(CheckpointError, match="names a file that is none of the checkpoint's"):
        load.load_into(state, checkpoint, files)
    assert not state["weights"].any()


def test_metadata_that_was_changed_after_it_was_checked_is_not_read(checkpoint, tmp_path):
    files = files_of(checkpoint)
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    with pytest.raises(CheckpointError, match="not the one of the checkpoint's manifest"):
        load.load_into(empty(), checkpoint, files)


def test_metadata_of_another_kind_is_refused(checkpoint, tmp_path):
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="the metadata is none"):
        reader.reader(checkpoint, files_of(checkpoint)).read_metadata()


def test_a_function_in_an_entry_that_is_no_tensor_is_not_called(tmp_path, monkeypatch):
    uri = str(tmp_path / "checkpoint")
    dcp.save(
        {"optimizer": {"lr": Payload(tmp_path / "marker")}}, storage_writer=dcp.FileSystemWriter(uri), no_dist=True
    )
    (tmp_path / "marker").unlink(missing_ok=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        reader.fill_state({"optimizer": {"lr": 0.0}}, uri, files_of(uri), alone=True)
    assert not (tmp_path / "marker").exists()


def pickled_getattr(module, kind, name):
    arguments = b"".join(b"X" + len(text).to_bytes(4, "little") + text.encode() for text in [name])
    named = pickle.GLOBAL + f"{module}\n{kind}\n".encode()
    return pickle.PROTO + b"\x02" + pickle.GLOBAL + b"builtins\ngetattr\n" + named + arguments + b"\x86R" + pickle.STOP


def test_members_of_the_memory_format_are_read_as_any_python_writes_them():
    """Python 3.11.2, Debian's, pickles a member of an enumeration as `getattr(class, name)`."""
    content = pickled_getattr("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "TORCH_PRESERVE_FORMAT")
    found = reader._MetadataUnpickler(io.BytesIO(content)).load()
    assert found is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize("name", ["__class__", "__init__", "load_id"])
def test_no_other_attribute_can_be_asked_for(name):
    content = pickled_getattr("torch.distributed.checkpoint.metadata", "StorageMeta", name)
    with pytest.raises(CheckpointError, match="asks for an attribute"):
        reader._MetadataUnpickler(io.BytesIO(content)).load()


class Extra(torch.nn.Linear):
    """Keeps something beside its tensors."""

    def __init__(self, extra):
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


@pytest.mark.parametrize("extra", [{"a": [1, 2.5, None, "b"]}, torch.ones(2), (True,)])
def test_a_model_may_keep_plain_data(extra):
    reader.require_readable(torch.nn.Sequential(Extra(extra)))


@pytest.mark.parametrize("extra", [datetime.now(timezone.utc), np.zeros(2), Payload("/nowhere/marker")])
def test_a_model_that_could_be_saved_but_not_resumed_is_refused_by_name(extra):
    with pytest.raises(ConfigError, match=r"model 0\._extra_state: the model keeps what cannot be read"):
        reader.require_readable(torch.nn.Sequential(Extra(extra)))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "WindowsPath"])
def test_the_path_of_any_writer_is_read(module, name):
    """Python 3.13 has it in another module; another system has another class."""
    content = (
        pickle.PROTO
        + b"\x02"
        + pickle.GLOBAL
        + f"{module}\n{name}\n".encode()
        + b"X\x02\x00\x00\x00/a\x85R"
        + pickle.STOP
    )
    assert str(reader._MetadataUnpickler(io.BytesIO(content)).load()) == "/a"


@pytest.mark.parametrize("module", ["torch", "torch.serialization", "pathlib", "builtins", "os"])
@pytest.mark.parametrize("name", ["load", "eval", "system", "hub", "_get_restore_location", "nn.Module", "Path"])
def test_nothing_else_can_be_named(module, name):
    assert (module, name) not in ALLOWED
    content = pickle.PROTO + b"\x02" + pickle.GLOBAL + f"{module}\n{name}\n".encode() + pickle.STOP
    with pytest.raises(CheckpointError, match="names what no checkpoint holds"):
        reader._MetadataUnpickler(io.BytesIO(content)).load()
