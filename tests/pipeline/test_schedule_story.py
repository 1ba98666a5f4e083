"""The days of a schedule with real trainings: each day is a run of what Kubeflow's scheduler has.

The API server of Kubeflow is scripted, the clock is what a run says of its creation; the rest is as on a cluster.
"""

from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from helpers.fakes.kfp_server import Server
from helpers.fakes.webhook import Webhook

from kftrain import config as configuration
from kftrain.core import storage
from kftrain.errors import DataError
from kftrain.kubeflow.client import TOKEN_ENV, Connection, Pipelines
from kftrain.registry.journal import Journal, find_champion_version
from kftrain.registry.promotion import rollback
from kftrain.run import documents
from kftrain.run.documents import Registration
from kftrain.run.paths import RunPaths
from kftrain.schedule import apply
from kftrain.schedule.apply import Executor
from kftrain.schedule.plan import Content, Wanted
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import History
from kftrain.schedule.turn import Turn
from kftrain.sharding.parts.store import PartStore
from kftrain.stages.evaluate import evaluate
from kftrain.stages.finish import finish
from kftrain.stages.firing import ALERT_URL_ENV
from kftrain.stages.register import register
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train
from kftrain.tasks.run_dataset import read_dataset

pytestmark = pytest.mark.slow

FIRST = datetime(2026, 11, 1, 2, 0, 20, tzinfo=timezone.utc)

CONFIG = """
run: {{name: story, storage_root: "{root}/store"}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
data: {{source: "{root}/raw", validation_fraction: 0.3, window: {{by: path}}}}
task: {{kind: image_classification, image_size: 8, num_classes: 10, num_channels: 1}}
model: {{kind: vision_transformer, dim: 32, num_layers: 1, num_heads: 2, patch_size: 2}}
optimizer: {{learning_rate: 0.003}}
train: {{steps: 150, global_batch_size: 32, from: champion}}
evaluate: {{num_bootstrap: 200}}
registry: {{metric: accuracy, goal: maximize}}
schedule: {{name: nightly, cron: "{cron}", window_hours: 8760, alert_over_http: true}}
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
    """A schedule, and its runs as Kubeflow would start them, one a day."""

    def __init__(self, root, server):
        self.root = root
        self.server = server
        self.lines = []
        self.config = self.config_at("0 0 2 * * *")
        self.history = History.of(self.config.run.storage_root, "nightly")

    def config_at(self, cron):
        """The configuration of a schedule that is due at other times."""
        return configuration.parse(CONFIG.format(root=self.root, cron=cron))

    @property
    def executor(self):
        api = Pipelines(Connection(self.server.url, "", TOKEN_ENV, None))
        return Executor(api, "nightly", Turn.of(self.config.run.storage_root, "nightly", print), print)

    def apply(self, cron):
        """What `kftrain schedule apply` does once the pipeline is there; what is left of before."""
        parameters = {"config": self.config_at(cron).to_yaml()}
        content = Content("nightly", cron, "p-1", "e-1", parameters)
        return self.executor.converge(lambda: Wanted(content, enabled=self.history.read_pause() is None))

    def raw(self, number):
        """Folder of what came in on the day before a run."""
        return self.root / "raw" / f"date={FIRST + timedelta(days=number - 2):%Y-%m-%d}"

    def day(self, number, during=lambda: None):
        """All steps of the run of a day; what the first one returned, or None where it failed."""
        (due,) = [each for each in self.server.recurring if each["mode"] == "ENABLE"]
        run = self.server.fire(due["recurring_run_id"])
        text, job = due["runtime_config"]["parameters"]["config"], f"day{number}"
        created = format_instant(FIRST + timedelta(days=number - 1, hours=3))
        state = "FAILED"
        try:
            opened = shard_from_pipeline(text, {}, "", job, self.lines.append, created=created)
            train(opened.run_uri, self.lines.append)
            during()
            evaluate(opened.run_uri, self.lines.append)
            register(opened.run_uri, self.lines.append)
            state = "SUCCEEDED"
        except DataError:
            return None
        finally:
            finish(text, "", "", job, {"SUCCEEDED": "COMPLETE"}.get(state, state), self.lines.append)
            run["state"] = state
        return opened.summary

    def paths(self, number):
        return RunPaths.of(self.config.run.storage_root, f"story-day{number}")

    def registration(self, number):
        return documents.read(Registration, self.paths(number).registration)

    def shards(self, number):
        """Digests of the shards that a day's run has trained on."""
        _, described = read_dataset(self.paths(number))
        return {shard.sha256 for split in described.splits.values() for shard in split.shards}

    def champion(self):
        return find_champion_version(Journal.of(self.config.run.storage_root, "story").entries())

    def modes(self):
        return {each["recurring_run_id"]: each["mode"] for each in self.server.recurring}


@pytest.fixture
def encoded(monkeypatch):
    """The files that were encoded since it was cleared."""
    found = []
    encode = PartStore.encode

    def counted(self, source, part, progress):
        found.extend(piece["file"]["name"] for piece in part.pieces)
        return encode(self, source, part, progress)

    monkeypatch.setattr(PartStore, "encode", counted)
    return found


@pytest.fixture
def story(tmp_path, monkeypatch):
    import kfp

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", f"{tmp_path}/context.json")
    monkeypatch.setattr(apply, "SETTLE_SECONDS", 0.0)
    with Server() as server:
        yield Story(tmp_path, server)


@pytest.fixture
def webhook(monkeypatch):
    with Webhook() as started:
        monkeypatch.setenv(ALERT_URL_ENV, started.url)
        yield started


@pytest.mark.timeout(1800)
def test_days_of_a_schedule(story, webhook, encoded):
    assert story.apply("0 0 2 * * *") == [] and story.modes() == {"r-1": "ENABLE"}

    write_images(story.raw(1), 0, 400)
    assert story.day(1)["result"].startswith("shards written")
    assert story.registration(1).promoted and story.champion() == 1 and len(encoded) == 400

    assert not storage.exists(story.paths(1).comparison)

    assert story.day(2)["why"] == "unchanged"
    assert story.champion() == 1

    encoded.clear()
    write_images(story.raw(3), 400, 1200)
    assert story.day(3)["result"].startswith("shards written")
    assert len(encoded) == 800 and {Path(name).parts[0] for name in encoded} == {story.raw(3).name}
    assert story.shards(1) < story.shards(3)
    third = story.registration(3)
    assert third.promoted and third.improvement.low > 0 and story.champion() == 2, third.reason
    assert story.paths(3).comparison in storage.read_text(story.paths(3).report)
    assert "version 2" in storage.read_text(story.paths(3).comparison)
    assert any("train.from champion: version 1, the champion" in line for line in story.lines)

    write_images(story.raw(4), 1200, 1700, np.random.default_rng(0))
    story.day(4)
    fourth = story.registration(4)
    assert not fourth.promoted and fourth.reason and story.champion() == 2

    broken = story.raw(5) / "3" / "broken.png"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no picture")
    assert [story.day(number) for number in (5, 6, 7)] == [None] * 3
    assert story.history.read_pause().line.startswith("3 failures in a row")
    assert len(webhook.texts) == 3 and webhook.texts[0].startswith("nightly has failed: ")
    assert webhook.texts[-1].startswith("nightly is paused after 3 failures in a row")
    assert webhook.texts[-1].endswith(story.paths(7).uri)
    assert story.day(8)["why"] == "paused"

    rollback(story.config)
    assert story.champion() == 1

    broken.unlink()
    resumed = (FIRST + timedelta(days=7.5)).timestamp()
    assert story.history.add_event("resumed", "by hand", resumed) and story.executor.enable()
    change_while_a_run_lives(story)
    results = [found.result for found in story.history.iterate_ends()][::-1]
    assert results == ["trained", "skipped", "trained", "trained", "failed", "failed", "failed", "trained", "skipped"]


def change_while_a_run_lives(story):
    """The schedule is changed while the run of day 9 trains: it goes on to its end, and one schedule is left."""
    write_images(story.raw(9), 1700, 1797)
    left = []
    story.day(9, during=lambda: left.append((story.apply("0 0 3 * * *"), story.modes())))
    assert left == [(["r-1"], {"r-1": "DISABLE", "r-2": "ENABLE"})]
    assert documents.read(Registration, story.paths(9).registration).version == 4 and not story.server.killed
    assert story.apply("0 0 3 * * *") == [] and story.modes() == {"r-2": "ENABLE"}
    assert story.day(10)["why"] == "unchanged"
    assert not story.server.killed
