"""`shards.json` names the dataset of a run: it is read from the run's own storage root, and from nowhere else."""

import pytest
from helpers.documents import sharded_run

from kftrain import trust
from kftrain.core import storage
from kftrain.data.shards import manifest
from kftrain.errors import DataError
from kftrain.tasks import run_dataset
from kftrain.tasks.run_dataset import read_dataset
from kftrain.train import reading
from kftrain.trust import read_shards


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A function that makes shards.json name a place; nothing may be asked of a store for it."""
    paths, config, shards = sharded_run(tmp_path)

    def name(uri):
        storage.publish_json(paths.shards, {**shards.to_dict(), "manifest_uri": uri})
        return paths, config

    return name


ELSEWHERE = ["http://169.254.169.254/latest/manifest.json", "s3://other/manifest.json", "/etc/manifest.json", "m", ""]
ELSEWHERE += ["simplecache::s3://other/manifest.json", "{root}/../manifest.json", "{root}-other/manifest.json"]


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_manifest_elsewhere_is_refused_before_it_is_asked_for(named, place, tmp_path, monkeypatch):
    paths, config = named(place.replace("{root}", f"{tmp_path}/store"))
    for reader in (manifest, run_dataset):
        monkeypatch.setattr(reader, "read_manifest", lambda uri, *given: pytest.fail(f"{uri} is read"))
    for read in (read_shards, read_dataset, lambda paths: reading.read_training(paths, config)):
        with pytest.raises(DataError, match="outside of the run's storage root") as caught:
            read(paths)
        assert caught.value.where == paths.shards and trust.ROOTS_VARIABLE in caught.value.fix


def test_the_own_root_and_one_that_the_reader_lists_are_read(named, tmp_path, monkeypatch):
    paths, _ = named(f"{tmp_path}/store/shards/d/manifest.json")
    assert read_shards(paths).manifest_uri == f"{tmp_path}/store/shards/d/manifest.json"
    paths, _ = named("s3://shared/shards/d/manifest.json")
    monkeypatch.setenv(trust.ROOTS_VARIABLE, "s3://shared/shards")
    assert read_shards(paths).manifest_uri == "s3://shared/shards/d/manifest.json"
