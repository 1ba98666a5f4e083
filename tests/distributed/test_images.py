"""The example of encoded, augmented images: killed and resumed it is the same training, from a folder as from tars."""

import importlib.util
from pathlib import Path

import pytest
import webdataset
from helpers import jobs

from kftrain.core import storage
from kftrain.run import attempts

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["train.steps=12", "train.global_batch_size=10", "train.log_interval_steps=1", "checkpoint.interval_steps=4"]
SMALL += ["evaluate.interval_steps=0", "model.num_layers=1", "model.dim=16", "launch.processes_per_node=2"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 60 images of five classes."""
    spec = importlib.util.spec_from_file_location("make_images", EXAMPLES / "make_images.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("photos")
    module.make(folder, 60)
    return folder


def prepare(root, source):
    return jobs.prepare(root, (EXAMPLES / "images.yaml").read_text(), [f"data.source={source}", *SMALL])


def weights(paths):
    """The files of the exported model, every bit of them."""
    return [path.read_bytes() for path in sorted(storage.local_path(paths.uri).glob("export/**/*.safetensors"))]


def test_killed_and_resumed_it_sees_the_same_parts_of_the_same_images(photos, tmp_path):
    assert len({path.suffix for path in photos.rglob("*.*")}) == 3
    expected, resolved = prepare(tmp_path / "whole", photos)
    done = jobs.run_worker(expected, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    paths, resolved = prepare(tmp_path / "killed", photos)
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 5/12")
    jobs.kill_tree(process)
    assert not storage.exists(paths.complete)
    resumed = jobs.run_worker(paths, resolved)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert attempts.find_last_attempt(paths) == 2
    assert jobs.losses(paths) == jobs.losses(expected)
    assert weights(paths) == weights(expected) != []


def test_it_trains_on_shards_that_webdataset_wrote(photos, tmp_path):
    (tmp_path / "tars").mkdir()
    names = sorted(path.name for path in photos.iterdir())
    with webdataset.ShardWriter(f"{tmp_path}/tars/photos-%03d.tar", maxcount=25, verbose=0) as writer:
        for path in sorted(photos.rglob("*.*")):
            label = names.index(path.parent.name)
            writer.write({"__key__": path.stem, path.suffix[1:]: path.read_bytes(), "cls": label})
    paths, resolved = prepare(tmp_path, tmp_path / "tars")
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(jobs.losses(paths)) == 12
