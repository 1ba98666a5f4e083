"""The tokenizer lies in the export: other programs load it, and a loaded model asks nothing else."""

import json

import pandas
import pytest
import torch
from helpers.documents import entry_of
from safetensors.torch import save_file

from kftrain.checkpoint import export, exporting
from kftrain.checkpoint.export import load_export
from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.schema import Record
from kftrain.errors import CheckpointError, ConfigError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.run.export import ExportManifest, compute_export_digest
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.train.completing import describe_export

MODEL = ModelConfig(kind="transformer", dim=32, num_layers=1, num_heads=2)
TEXTS = ["def naïve(x):\n    return x  # 日本語\n", " a leading space, <|document|> and <s>\n\n", "x" * 40]
TRAIN = {"train": {"vocab_size": 300}}


def trained(tokenizer):
    task = build_task(TaskConfig(kind="language_modeling", sequence_length=16, tokenizer=tokenizer))
    task.learn(Record(str(number), {"text": text}) for number, text in enumerate(TEXTS * 3))
    return task


def write(folder, task, tokenizer, left_out=()):
    """An export as `export_checkpoint` lays it out."""
    config = Config(model=MODEL, task=TaskConfig(kind="language_modeling", sequence_length=16, tokenizer=tokenizer))
    arguments = task.model_arguments()
    torch.manual_seed(0)
    model = build_model(MODEL, arguments)
    described = describe_export(model, config, task, arguments)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(storage.dump_json(described.model_config))
    (folder / "kftrain.json").write_text(storage.dump_json(described.description.to_dict()))
    for name, content in described.task_files.items():
        if name not in left_out:
            (folder / name).write_bytes(content)
    files = {path.name: entry_of(str(path)) for path in sorted(folder.iterdir())}
    digests = dict.fromkeys(("checkpoint_digest", "training_digest", "dataset_digest"), "0" * 64)
    storage.publish_json(f"{folder}/manifest.json", ExportManifest(**digests, step=1, files=files).to_dict())
    return str(folder), compute_export_digest(str(folder))


@pytest.mark.parametrize("tokenizer", ["bytes", TRAIN], ids=["bytes", "trained"])
def test_auto_tokenizer_gives_the_ids_that_the_model_is_trained_on(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    task = trained(tokenizer)
    uri, _ = write(tmp_path / "export", task, tokenizer)
    theirs = AutoTokenizer.from_pretrained(uri)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == task.tokenizer.encode_document(text.encode()).tolist()
        assert theirs.decode(ids[1:]) == text
    assert theirs.bos_token_id == task.tokenizer.document and theirs.pad_token_id == task.tokenizer.padding
    assert json.loads((tmp_path / "export" / "config.json").read_text())["bos_token_id"] == task.tokenizer.document


def test_a_loaded_model_uses_the_tokenizer_of_its_export_alone(tmp_path):
    task = trained(TRAIN)
    source = tmp_path / "tokenizer.json"
    source.write_bytes(task.tokenizer.content)
    named = build_task(TaskConfig(kind="language_modeling", sequence_length=16, tokenizer=str(source)))
    export_ = write(tmp_path / "export", named, str(source))
    expected = named.predict(load_export(*export_).model, pandas.DataFrame({"text": TEXTS}))
    source.unlink()
    loaded = load_export(*export_)
    answer = loaded.task.predict(loaded.model, pandas.DataFrame({"text": TEXTS}))
    assert answer.equals(expected) and answer["num_bytes"].tolist() == [len(text.encode()) for text in TEXTS]


def test_an_export_without_its_tokenizer_or_with_a_huge_one_is_refused(tmp_path, monkeypatch):
    task = trained(TRAIN)
    with pytest.raises(CheckpointError, match=r"the export has no tokenizer\.json"):
        load_export(*write(tmp_path / "export", task, TRAIN, left_out=("tokenizer.json",)))
    monkeypatch.setattr(export, "MAX_TASK_FILE_BYTES", 10)
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        load_export(*write(tmp_path / "other", task, TRAIN))


def test_an_export_of_before_has_no_tokenizer_and_is_loaded(tmp_path):
    left_out = ("tokenizer.json", "tokenizer_config.json")
    loaded = load_export(*write(tmp_path / "export", trained("bytes"), "bytes", left_out))
    assert loaded.task.tokenizer.name == "bytes"


@pytest.mark.parametrize("name", ["../x", "config.json", "kftrain.json", "model.safetensors", "A b", ""])
def test_a_file_of_a_task_replaces_none_of_ours(name):
    with pytest.raises(ConfigError, match="no name of a task's file"):
        exporting.require_task_file(name)
