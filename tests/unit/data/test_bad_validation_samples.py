"""Validation samples that cannot be decoded: found before a training, refused or left out, and decoded once."""

import io

import numpy as np
import pytest
from helpers import in_process, jobs
from helpers.splits import open_split
from PIL import Image

from kftrain import config
from kftrain.core import storage
from kftrain.data.shards.manifest import read_manifest
from kftrain.errors import DataError, UserCodeError
from kftrain.evaluate.session import evaluate
from kftrain.stages.shard import shard
from kftrain.tasks.image_classification import ImageClassification

IMAGES = """
run: {name: images, storage_root: ROOT}
data: {source: SOURCE, validation_fraction: 0.3}
task: {kind: image_classification, storage: files, image_size: 8, num_channels: 3, num_classes: 2, resize: crop}
model: {kind: vision_transformer, dim: 16, num_layers: 1, num_heads: 2, patch_size: 4}
train: {steps: 2, global_batch_size: 8}
evaluate: {interval_steps: 1, batch_size: 5, num_bootstrap: 100}
launch: {processes_per_node: 1}
registry: {metric: accuracy, goal: maximize}
"""


@pytest.fixture
def source(tmp_path):
    """60 JPEGs of two classes."""
    generator = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "in" / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(path)
    return tmp_path / "in"


def configured(source, root, *overrides):
    return config.parse(IMAGES.replace("SOURCE", str(source)).replace("ROOT", str(root)), overrides)


def sharded(resolved, run_id="r"):
    """What the stage answers, and the lines that it says."""
    lines = []
    outcome = shard(resolved, run_id, progress=lines.append)
    return outcome, lines


def validation_files(source, root):
    """The files of the validation split, in stored order."""
    outcome, _ = sharded(configured(source, root))
    manifest_uri = outcome.summary["manifest_uri"]
    keys = open_split(manifest_uri, "validation").group_keys()
    return [source / key for key in keys], manifest_uri


def truncate(path):
    path.write_bytes(path.read_bytes()[:-60])
    with Image.open(path) as image, pytest.raises(OSError, match="truncated"):
        image.load()


def test_a_truncated_jpeg_of_the_validation_split_ends_the_run_when_it_is_sharded(source, tmp_path):
    files, _ = validation_files(source, tmp_path / "good")
    truncate(files[3])
    with pytest.raises(
        DataError, match=rf"validation-000000\.tar, {files[3].relative_to(source)}: .*truncated"
    ) as caught:
        sharded(configured(source, tmp_path / "root"))
    assert caught.value.exit_code == 11


def evaluated(resolved, run_id, monkeypatch):
    """Figures of the run's model on the whole split and after the last step, and the keys that were scored."""
    outcome, lines = sharded(resolved, run_id)
    paths = jobs.RunPaths(outcome.run_uri)
    in_process.train(paths, resolved, monkeypatch)
    jobs.request_evaluation(paths)
    with in_process.alone(monkeypatch):
        evaluate(paths, resolved)
    (uri,) = storage.local_path(paths.uri).glob("evaluation/*/e/metrics.json")
    found = storage.read_json(str(uri))
    statistics = np.load(io.BytesIO(uri.with_name("statistics.npz").read_bytes()))
    history = [
        {name: value for name, value in point.items() if "seconds" not in name}
        for point in storage.read_json(paths.history)
    ]
    return found, statistics["keys"].tolist(), history, lines


def test_within_the_budget_it_is_as_if_the_bad_ones_had_never_been_there(source, tmp_path, monkeypatch):
    files, _ = validation_files(source, tmp_path / "good")
    bad = [files[0], files[4], files[-1]]
    for path in bad:
        truncate(path)
    resolved = configured(source, tmp_path / "root", "data.max_bad_samples=3")
    found, keys, history, lines = evaluated(resolved, "bad", monkeypatch)
    warnings = [line for line in lines if line.startswith("warning: left out of validation, 3 of at most 3: ")]
    assert [path.name for path in bad] == [next(p.name for p in bad if p.name in line) for line in warnings]
    with pytest.raises(DataError, match=r"data\.max_bad_samples: 3 validation samples .*truncated.*got 2"):
        sharded(configured(source, tmp_path / "root", "data.max_bad_samples=2"), "fewer")
    for path in bad:
        path.unlink()
    expected, other_keys, other_history, _ = evaluated(configured(source, tmp_path / "other"), "good", monkeypatch)
    assert keys == other_keys and len(keys) == len(files) - 3
    for name in ("metrics", "num_samples", "num_groups", "confusion", "examples", "slices"):
        assert found[name] == expected[name], name
    assert [point.get("eval_loss") for point in history] == [point.get("eval_loss") for point in other_history]


def test_the_split_is_decoded_once_for_a_dataset_and_a_task_and_its_digest_stays(source, tmp_path, monkeypatch):
    decoded, decode = [], ImageClassification.decode
    monkeypatch.setattr(ImageClassification, "decode", lambda *a: decoded.append(a) or decode(*a))
    files, manifest_uri = validation_files(source, tmp_path / "root")
    assert len(decoded) >= len(files)
    decoded.clear()
    outcome, lines = sharded(configured(source, tmp_path / "root"), "again")
    assert decoded == [] and outcome.summary["manifest_uri"] == manifest_uri and "decoding" not in " ".join(lines)
    sharded(configured(source, tmp_path / "root", "task.image_size=12"), "another size")
    assert len(decoded) >= len(files), "other options may fail where these did not"
    # a dataset that a release before has written
    for path in storage.local_path(manifest_uri).parent.glob("decoded-*"):
        path.unlink()
    truncate_stored = read_manifest(manifest_uri)
    decoded.clear()
    outcome, lines = sharded(configured(source, tmp_path / "root"), "of before")
    assert len(decoded) >= len(files) and outcome.summary["dataset_digest"] == truncate_stored.dataset_digest


def test_a_task_that_only_the_training_image_can_decode_is_not_refused(source, tmp_path, monkeypatch):
    original = ImageClassification.decode

    def decode(self, sample, generator):
        import no_such_module  # noqa: F401

    monkeypatch.setattr(ImageClassification, "decode", decode)
    _, lines = sharded(configured(source, tmp_path / "root"))
    assert any("it cannot be decoded here" in line and "no_such_module" in line for line in lines)
    good = iter([True])
    monkeypatch.setattr(ImageClassification, "decode", lambda *a: original(*a) if next(good, False) else 1 / 0)
    with pytest.raises(UserCodeError, match="division by zero"):
        sharded(configured(source, tmp_path / "root"))
