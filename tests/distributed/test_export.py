"""The export: the trained tensors, readable by others."""

import json

import pytest
import torch
from helpers import jobs
from safetensors import safe_open
from safetensors.torch import load_file

from kftrain.checkpoint import export, exporting
from kftrain.checkpoint.export import load_export
from kftrain.checkpoint.exporting import group_by_size
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.slow

LIMIT_BYTES = 40_000
"""Of a file of the export of many files."""


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("export"), ["train.steps=5"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return documents.read(Completion, paths.complete)


@pytest.fixture(scope="module")
def in_many_files(completion, tmp_path_factory):
    """URI and digest of an export of the same checkpoint, cut into files of at most 40 kB."""
    description, configuration = (
        storage.read_json(storage.join(completion.export_uri, name)) for name in ("kftrain.json", "config.json")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "MAX_FILE_BYTES", LIMIT_BYTES)
        return exporting.export_checkpoint(
            RunPaths(str(tmp_path_factory.mktemp("many"))),
            completion.checkpoint_uri,
            export.Description.model_validate(description),
            configuration,
        )


@pytest.mark.parametrize("cut", [False, True], ids=["one file", "many files"])
def test_transformers_loads_it_and_gives_our_logits(completion, in_many_files, cut):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    uri, digest = in_many_files if cut else (completion.export_uri, completion.export_digest)
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(
        storage.local_path(uri), output_loading_info=True, attn_implementation="sdpa", dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours = load_export(uri, digest).model
    tokens = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


def test_an_export_of_many_files_is_what_the_format_says(completion, in_many_files):
    """By safetensors alone: https://huggingface.co/docs/safetensors, and the index beside it."""
    folder = storage.local_path(in_many_files[0])
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index.keys() == {"metadata", "weight_map"}
    found, held = {}, {}
    for file in files:
        with safe_open(folder / file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            held.update(dict.fromkeys(tensors.keys(), file))
            parts = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        assert len(parts) == 1 or sum(each.nbytes for each in parts.values()) <= LIMIT_BYTES
        found.update(parts)
    assert index["weight_map"] == held and all("/" not in file for file in held.values())
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in found.values())}
    assert found.keys() == llama_names(json.loads((folder / "config.json").read_text())).keys()
    for name, shape in llama_names(json.loads((folder / "config.json").read_text())).items():
        assert found[name].dtype == torch.float32 and tuple(found[name].shape) == shape, name
    (single,) = storage.local_path(completion.export_uri).glob("*.safetensors")
    whole = load_file(single)
    assert whole.keys() == found.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def llama_names(settings):
    """Name -> shape of the tensors of a `LlamaForCausalLM`, as its documentation says."""
    dim, ffn, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_attention_heads"]
    kept = dim // heads * settings["num_key_value_heads"]
    layer = {
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
        "self_attn.q_proj.weight": (dim, dim),
        "self_attn.k_proj.weight": (kept, dim),
        "self_attn.v_proj.weight": (kept, dim),
        "self_attn.o_proj.weight": (dim, dim),
        "mlp.gate_proj.weight": (ffn, dim),
        "mlp.up_proj.weight": (ffn, dim),
        "mlp.down_proj.weight": (dim, ffn),
    }
    names = {"model.embed_tokens.weight": (settings["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not settings["tie_word_embeddings"]:
        names["lm_head.weight"] = (settings["vocab_size"], dim)
    for number in range(settings["num_hidden_layers"]):
        names.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    return names


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
