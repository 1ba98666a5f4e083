"""The export: the trained tensors, readable by others."""

import pytest
import torch
from helpers import jobs

from kftrain import storage
from kftrain.checkpoint import export, exporting
from kftrain.checkpoint.export import load_export
from kftrain.checkpoint.exporting import group_by_size
from kftrain.errors import CheckpointError
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("export"), ["train.steps=5"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return documents.read(Completion, paths.complete)


def test_transformers_loads_it_and_gives_our_logits(completion):
    from transformers import LlamaForCausalLM

    theirs, info = LlamaForCausalLM.from_pretrained(
        completion.export_uri, output_loading_info=True, attn_implementation="sdpa", dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = load_export(completion.export_uri, completion.export_digest).model
    tokens = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_large_model_is_cut_into_files_with_an_index(completion, monkeypatch, tmp_path):
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 40_000)
    files = commit.read_checkpoint_manifest(completion.checkpoint_uri)[0].files
    exporting._write_tensors(completion.checkpoint_uri, files, str(tmp_path))
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = storage.read_json(str(tmp_path / "model.safetensors.index.json"))
    assert set(index["weight_map"].values()) == set(names)
    from safetensors.torch import load_file

    whole = load_file(storage.local_path(storage.join(completion.export_uri, "model.safetensors")))
    parts = {name: tensor for file in names for name, tensor in load_file(tmp_path / file).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_an_export_that_was_never_finished_is_written_anew(completion, tmp_path, monkeypatch):
    """A process that is killed while files go to an object store leaves some of them, but never the manifest."""
    found = storage.read_json(storage.join(completion.export_uri, "kftrain.json"))
    description = export.Description.model_validate(found)
    paths = RunPaths(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "publish_json", killed)
        with pytest.raises(KeyboardInterrupt):
            exporting.export_checkpoint(paths, completion.checkpoint_uri, description, {})
    (unfinished,) = (tmp_path / "export").iterdir()
    assert not (unfinished / "manifest.json").exists()
    (unfinished / "model.safetensors").write_bytes(b"half")
    uri, digest = exporting.export_checkpoint(paths, completion.checkpoint_uri, description, {})
    assert storage.local_path(uri) == unfinished
    assert export.verify_export(uri, digest).step == completion.step


def killed(*arguments):
    raise KeyboardInterrupt


def test_an_export_holds_no_pickle(completion):
    names = storage.list_names(completion.export_uri)
    ours = ["config.json", "kftrain.json", "manifest.json", "model.safetensors"]
    assert names == [*ours, "tokenizer.json", "tokenizer_config.json"]


def test_another_digest_than_asked_for_is_refused(completion):
    with pytest.raises(CheckpointError, match="not the expected one"):
        load_export(completion.export_uri, "0" * 64)
    with pytest.raises(CheckpointError, match="no export here"):
        load_export(completion.export_uri + "-none", completion.export_digest)


def test_tensors_are_grouped_in_order_up_to_the_limit():
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 1}
    assert group_by_size(sizes, 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert group_by_size({}, 6) == []
