"""Which datasets a run's task can use: those of another length of its samples, too."""

from helpers.toy_data import toy_config

from kftrain.config import Config
from kftrain.run.documents import RunShards
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task
from kftrain.tasks.run_dataset import require_usable
from kftrain.tasks.settings import TaskConfig


def config_of(length):
    return Config(task=TaskConfig(kind="language_modeling", sequence_length=length))


def run_shards(result):
    return RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest)


def test_shards_of_text_fit_any_length(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("some text " * number)
    results = [
        shard_dataset(toy_config(folder, tmp_path / "root", validation_fraction=0.3), build_task(config.task), print)
        for config in (config_of(8), config_of(16))
    ]
    assert [result.reused for result in results] == [False, True]
    assert results[0].dataset_digest == results[1].dataset_digest
    for length in (8, 16):
        require_usable(run_shards(results[0]), results[0].manifest, config_of(length))
