"""The micro batch that `auto` finds: by a line through two sizes, within a limit that a larger one would break."""

import contextlib
import ctypes
import io
import resource
import tempfile
from pathlib import Path

import pytest
from helpers import jobs, ranks

from kftrain import config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.parallel.mesh import Mesh
from kftrain.process.stop_request import StopRequest
from kftrain.run import documents
from kftrain.run.documents import MicroBatchChoice
from kftrain.train import micro_batch, session
from kftrain.train.micro_batch import USED_SHARE, choose_rows, resolve_micro_batch
from kftrain.train.reading import read_training

LIMIT_BYTES = 800_000_000

ARENA_MAX = -8
"""Of glibc's malloc: each thread reserves 64 MiB of addresses otherwise, which the limit counts."""


@pytest.mark.parametrize(
    ("share", "row_bytes", "fixed_bytes", "free_bytes", "rows"),
    [
        (64, 10, 100, 10_000, 64),  # all of it fits
        (64, 100, 0, 4000, 32),  # exactly: 0.8 of 4000
        (64, 100, 0, 3999, 22),  # 31 fit: three micro batches of 22, rather than two of 31 and one of 2
        (64, 100, 3100, 4000, 1),
        (7, 100, 0, 500, 4),
        (1, 100, 0, 200, 1),
    ],
)
def test_the_largest_equal_micro_batch_that_fits_is_chosen(share, row_bytes, fixed_bytes, free_bytes, rows):
    assert choose_rows(share, row_bytes, fixed_bytes, free_bytes) == rows
    assert fixed_bytes + rows * row_bytes <= USED_SHARE * free_bytes


def test_what_does_not_fit_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: .*one row needs"):
        choose_rows(8, 100, 3200, 4000)


def train_within(world, paths, resolved, num_bytes):
    """The rows of a micro batch, of a training whose process may take so many bytes more."""
    ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
    training, written = read_training(paths, resolved), io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(written):
        try:
            session.run_attempt(training, world, StopRequest(), Path(scratch))
        except RuntimeError as error:
            return str(error)
    return written.getvalue()


def test_a_training_fits_into_a_limit_that_its_whole_share_breaks(tmp_path):
    sizes = [
        "train.steps=1",
        "train.global_batch_size=192",
        "task.sequence_length=256",
        "checkpoint.asynchronous=false",
    ]
    sizes += ["model.dim=64", "model.num_layers=4", "launch.processes_per_node=1"]
    paths, resolved = jobs.make_run(tmp_path, [*sizes, "train.micro_batch_size=0"], "whole")
    (broken,) = ranks.on(1, train_within, paths, resolved, LIMIT_BYTES)
    assert "can't allocate memory" in broken
    paths, resolved = jobs.make_run(tmp_path, [*sizes, "train.micro_batch_size=auto"], "auto")
    (written,) = ranks.on(1, train_within, paths, resolved, LIMIT_BYTES)
    choice = documents.read(MicroBatchChoice, paths.micro_batch)
    assert 1 < choice.rows < 192 and f"auto takes {choice.rows}\n" in written and "step 1/1" in written
    assert resolved.training_identity("d") == resolved.model_copy().training_identity("d")
    # The next attempt does not look again, unless it has another layout.
    storage.publish_json(paths.micro_batch, {**choice.to_dict(), "rows": 3})
    assert ranks.on(1, find_again, paths, resolved) == [3]
    other = config.parse(resolved.to_yaml(), ["train.activation_checkpointing=blocks"])
    (rows,) = ranks.on(1, find_again, paths, other)
    assert rows != 3 and documents.read(MicroBatchChoice, paths.micro_batch).rows == rows


def find_again(world, paths, resolved):
    mesh = Mesh(resolved.parallel.shape(world.size), world)
    return resolve_micro_batch(read_training(paths, resolved), mesh).config.train.micro_batch_size


def smallest(world, paths, resolved):
    """What two processes take, of which the second has less memory."""
    free = micro_batch.read_available_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "read_available_bytes", lambda: 60_000_000 if world.rank else free())
        return find_again(world, paths, resolved)


def test_all_processes_take_what_fits_into_the_smallest_memory(tmp_path):
    sizes = ["train.global_batch_size=128", "task.sequence_length=256", "train.micro_batch_size=auto"]
    one, other = ranks.on(2, smallest, *jobs.make_run(tmp_path, sizes))
    assert one == other and 1 <= one < 64


def test_an_axis_that_splits_the_model_is_refused(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.micro_batch_size=auto", "parallel.tensor=2"])
    assert all("auto measures the whole model" in line for line in ranks.on(2, refusal, paths, resolved))


def refusal(world, paths, resolved):
    with pytest.raises(ConfigError) as raised:
        find_again(world, paths, resolved)
    return raised.value.line
