import hashlib
import json

import pytest
from helpers.toy_data import text_folder

from kftrain.cli import main
from kftrain.config import parse
from kftrain.data.shards.manifest import read_manifest
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task

CONFIG = """
data: {source: SOURCE, validation_fraction: 0.3}
task: {kind: language_modeling, sequence_length: 16, tokenizer: {train: {vocab_size: 300}}}
run: {storage_root: ROOT}
"""


@pytest.fixture
def text(tmp_path):
    source = text_folder(tmp_path / "texts")
    return CONFIG.replace("SOURCE", str(source)).replace("ROOT", str(tmp_path / "store"))


def digest_of_shards(text, overrides=()):
    config = parse(text, overrides)
    manifest = read_manifest(shard_dataset(config, build_task(config.task), lambda line: None).manifest_uri)
    return manifest.task_settings["assets"]["tokenizer.json"]


def test_a_tokenizer_by_itself_is_the_one_of_the_shard_step_and_can_be_named(tmp_path, text, capsys):
    (tmp_path / "c.yaml").write_text(text)
    out = tmp_path / "mine" / "tokenizer.json"
    with pytest.raises(SystemExit) as ended:
        main(["tokenizer", "train", "--config", str(tmp_path / "c.yaml"), "--out", str(out), "--json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_ids"] <= 300 and printed["bytes_per_token"] > 2
    in_step = digest_of_shards(text)
    assert printed["sha256"] == in_step
    named = text.replace("{train: {vocab_size: 300}}", str(out))
    assert digest_of_shards(named) == in_step


def test_what_has_no_tokenizer_and_too_few_ids_are_refused(tmp_path, capsys):
    out = str(tmp_path / "t.json")
    for arguments in (["--set", "task.kind=image_classification"], ["--vocab-size", "7"]):
        with pytest.raises(SystemExit) as ended:
            main(["tokenizer", "train", "--out", out, *arguments])
        assert ended.value.code == 10 and not (tmp_path / "t.json").exists()
    assert "vocab_size" in capsys.readouterr().err


def test_an_appended_dataset_keeps_its_tokenizer(tmp_path, text):
    first = digest_of_shards(text)
    for number in range(6):
        (tmp_path / "texts" / f"more-{number}.txt").write_text("something very different, again and again " * 50)
    assert digest_of_shards(text) == first
    fresh = digest_of_shards(text, [f"run.storage_root={tmp_path}/other"])
    assert fresh != first


def write_strata(path, num_records):
    rows = [
        {"text": hashlib.sha256(f"{label} {number}".encode()).hexdigest() * 4, "label": label}
        for label in "abcdefghijkl"
        for number in range(num_records)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_tokenizer_by_itself_reads_the_training_split_of_a_stratified_dataset_that_has_grown(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    text = CONFIG.replace("SOURCE", f"{source}, stratify: label").replace("ROOT", str(tmp_path / "store"))
    write_strata(source, 5)
    config = parse(text, ["task.tokenizer=bytes"])
    shard_dataset(config, build_task(config.task), lambda line: None)
    write_strata(source, 60)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["tokenizer", "train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "t.json"), "--json"])
    assert json.loads(capsys.readouterr().out)["sha256"] == digest_of_shards(text)
