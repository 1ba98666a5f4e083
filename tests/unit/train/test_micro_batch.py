"""The micro batch that `auto` finds: by a line through two sizes, within a limit that a larger one would break."""

import contextlib
import ctypes
import io
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import jobs, ranks
from helpers.parity import defects

from kftrain import config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.models.registry import build_model
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.process.stop_request import StopRequest
from kftrain.run import documents
from kftrain.run.documents import MicroBatchChoice
from kftrain.tasks import build_task
from kftrain.train import micro_batch, session
from kftrain.train.micro_batch import USED_SHARE, choose_rows, resolve_micro_batch
from kftrain.train.reading import read_training

LIMIT_BYTES = 800_000_000

ARENA_MAX, MMAP_THRESHOLD = -8, -3
"""Of glibc's malloc: each thread reserves 64 MiB of addresses otherwise, which the limit counts. And a large block that
was freed makes malloc take the next ones from its heap, of whose holes nothing is given back: which there are depends
on what threads do meanwhile, so that 433 MB of tensors took 700 to 790."""


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
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 128 << 10)  # as it begins; set, it stays
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
    free = micro_batch.measure_own_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "measure_own_bytes", lambda: 30_000_000 if world.rank else free())
        return find_again(world, paths, resolved)


def test_all_processes_take_what_fits_into_the_smallest_memory(tmp_path):
    sizes = ["train.global_batch_size=128", "task.sequence_length=256", "train.micro_batch_size=auto"]
    one, other = ranks.on(2, smallest, *jobs.make_run(tmp_path, sizes))
    assert one == other and 1 <= one < 64


def estimates(world, paths, variants):
    """The bytes of a row, and the fixed ones, of each of these configurations; and those of the parameters."""
    with defects.patched(micro_batch, "choose_rows", lambda share, *sizes: sizes[:2]):
        found = [micro_batch.find_rows(read_training(paths, each), Mesh(Shape(), world)) for each in variants]
    model = build_model(variants[0].model, build_task(variants[0].task).model_arguments())
    return found, 4 * sum(parameter.numel() for parameter in model.parameters())


def test_batches_that_begin_small_change_nothing_and_averages_and_compression_take_four_bytes_a_parameter(tmp_path):
    sizes = ["train.global_batch_size=128", "train.micro_batch_size=auto", "launch.processes_per_node=1"]
    growing = "train.batch_warmup=[{steps: 1, batch_size: 1}]"
    paths, resolved = jobs.make_run(tmp_path, sizes)
    packed, topk = (f"parallel.compression={{kind: {kind}}}" for kind in ("int8", "topk"))
    settings = (["run.seed=1"], [growing], ["train.average_decay=0.9"], [packed], [topk, "optimizer.kind=sgd"])
    variants = [config.parse(resolved.to_yaml(), ["parallel.strategy=ddp", *more]) for more in settings]
    (((plain, grown, averaged, lossy, sparse), parameter_bytes),) = ranks.on(1, estimates, paths, variants)
    assert plain == grown and plain[0] > 1
    assert averaged == (plain[0], plain[1] + parameter_bytes)
    # What is sent, what comes, and what was lost; of topk the momenta as well, before and after a step.
    assert lossy == (plain[0], plain[1] + 3 * parameter_bytes)
    assert sparse == (plain[0], plain[1] + 5 * parameter_bytes)


def rows_where_memory_ends(world, paths, resolved, most_rows):
    """The rows that are found where a model may compute so many at a time, as the errors of a CPU and of a GPU say."""
    compute, answers = micro_batch.compute_loss_sum, []
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ):

        def compute_some(model, task, tensors, error=error):
            if len(tensors.weight) > most_rows:
                with user_code("model.forward"):
                    raise error
            return compute(model, task, tensors)

        with defects.patched(micro_batch, "compute_loss_sum", compute_some):
            try:
                answers.append(micro_batch.find_rows(read_training(paths, resolved), Mesh(Shape(), world)))
            except ConfigError as refused:
                answers.append(refused.line)
    return answers


def test_memory_that_ends_while_rows_are_tried_says_how_many_fit(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.micro_batch_size=auto", "launch.processes_per_node=1"])
    assert ranks.on(1, rows_where_memory_ends, paths, resolved, 1) == [[1, 1, 1]]
    ((*lines,),) = ranks.on(1, rows_where_memory_ends, paths, resolved, 0)
    assert all(line.startswith("train.micro_batch_size: one row needs more memory than there is") for line in lines)
