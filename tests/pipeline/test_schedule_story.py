"""The days of a schedule with real trainings: each day is a pipeline run that says when it was created."""

from datetime import datetime, timedelta, timezone

import numpy as np
import pytest

from kftrain import config as configuration
from kftrain.errors import DataError
from kftrain.registry.journal import Journal, champion_version
from kftrain.registry.promotion import rollback
from kftrain.run import documents
from kftrain.run.documents import Registration
from kftrain.run.paths import RunPaths
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import History
from kftrain.stages.evaluate import evaluate
from kftrain.stages.finish import finish
from kftrain.stages.register import register
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train

pytestmark = pytest.mark.slow

FIRST = datetime(2026, 11, 1, 2, 0, 20, tzinfo=timezone.utc)

CONFIG = """
run: {{name: story, storage_root: "{root}/store"}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
data: {{source: "{root}/raw", validation_fraction: 0.3}}
task: {{kind: image_classification, image_size: 8, num_classes: 10, num_channels: 1}}
model: {{kind: vision_transformer, dim: 32, num_layers: 1, num_heads: 2, patch_size: 2}}
optimizer: {{learning_rate: 0.003}}
train: {{steps: 150, global_batch_size: 32, from: champion}}
evaluate: {{num_bootstrap: 200}}
registry: {{metric: accuracy, goal: maximize}}
schedule: {{name: nightly, cron: "0 0 2 * * *"}}
"""


def write_images(folder, first, last, generator=None):
    """Digits as pictures in folders of classes; with a generator the classes are drawn."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(first, last):
        label = digits.target[number] if generator is None else generator.integers(10)
        path = folder / str(label) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(path)


class Story:
    """Pipeline runs as Kubeflow would start them, one a day."""

    def __init__(self, root):
        self.root = root
        self.lines = []
        self.config = configuration.parse(CONFIG.format(root=root))
        self.history = History.of(self.config.run.storage_root, "nightly")

    def day(self, number):
        """All steps of the run of a day; what the first one returned, or None where it failed."""
        text, job = self.config.to_yaml(), f"day{number}"
        created = format_instant(FIRST + timedelta(days=number - 1))
        try:
            opened = shard_from_pipeline(text, {}, "", job, self.lines.append, created=created)
            for stage in (train, evaluate, register):
                stage(opened.run_uri, self.lines.append)
        except DataError:
            finish(text, "", "", job, "FAILED", self.lines.append)
            return None
        finish(text, "", "", job, "COMPLETE", self.lines.append)
        return opened.summary

    def registration(self, number):
        paths = RunPaths.of(self.config.run.storage_root, f"story-day{number}")
        return documents.read(Registration, paths.registration)

    def champion(self):
        return champion_version(Journal.of(self.config.run.storage_root, "story").entries())


@pytest.mark.timeout(1800)
def test_days_of_a_schedule(tmp_path, monkeypatch):
    alerts = []
    monkeypatch.setattr("kftrain.schedule.alert.send", lambda line, link, *rest: alerts.append((line, link)))
    story = Story(tmp_path)

    write_images(tmp_path / "raw", 0, 400)
    assert story.day(1)["result"].startswith("shards written")
    assert story.registration(1).promoted and story.champion() == 1

    assert story.day(2)["why"] == "unchanged"
    assert story.champion() == 1

    write_images(tmp_path / "raw", 400, 1200)
    assert story.day(3)["result"].startswith("shards written")
    third = story.registration(3)
    assert third.promoted and third.improvement.low > 0 and story.champion() == 2, third.reason
    assert any("train.from champion: version 1, the champion" in line for line in story.lines)

    write_images(tmp_path / "raw", 1200, 1700, np.random.default_rng(0))
    story.day(4)
    fourth = story.registration(4)
    assert not fourth.promoted and fourth.reason and story.champion() == 2

    broken = tmp_path / "raw" / "3" / "broken.png"
    broken.write_bytes(b"no picture")
    assert [story.day(number) for number in (5, 6, 7)] == [None] * 3
    assert story.history.paused().line.startswith("3 failures in a row")
    assert len(alerts) == 3 and alerts[-1][0].startswith("nightly is paused after 3 failures in a row")
    assert story.day(8)["why"] == "paused"

    rollback(story.config)
    assert story.champion() == 1

    broken.unlink()
    assert story.history.add("resumed", "by hand")
    results = [found.result for found in story.history.outcomes()][::-1]
    assert results == ["trained", "skipped", "trained", "trained", "failed", "failed", "failed"]
