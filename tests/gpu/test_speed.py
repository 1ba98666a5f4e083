"""How fast a training is on a GPU beside a bare loop of torch that is compiled alike, and what its ways there give."""

import contextlib
import copy
import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import in_process
from helpers.parity import compiled, precision
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import BASE, text_rows
from helpers.parity.table import Row
from helpers.pool import Answer
from torch.utils._triton import has_triton

from kftrain import config
from kftrain.data.loader import MicroBatch
from kftrain.errors import ConfigError
from kftrain.models.registry import build_model
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.tasks.prepare import tensors_of
from kftrain.train import session
from kftrain.train.step import Carrier, count_loss_terms

needs_triton = pytest.mark.skipif(not has_triton(), reason="torch finds no Triton here")

LENGTH = 2048
LARGE = f"""
task: {{kind: language_modeling, sequence_length: {LENGTH}, tokenizer: bytes}}
model: {{kind: transformer, dim: 2048, num_layers: 26, num_heads: 16, ffn_dim: 5504}}
optimizer: {{learning_rate: 0.0001, schedule: constant}}
train: {{steps: 100, global_batch_size: 8, micro_batch_size: 4, compile: true}}
precision: {{compute: bf16}}
"""
"""1.3 billion parameters."""


def seconds_of(work, num_warm_up=3, num_times=10):
    """The time of one step, of several in a row."""
    for _ in range(num_warm_up):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_times


def make_step(world, resolved, rows):
    """A step of ours on a batch that is on the device."""
    task, mesh = build_task(resolved.task), Mesh(resolved.parallel.shape(1), world)
    with contextlib.closing(parity_rank.new_loader(resolved, task, mesh, rows)) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        with contextlib.closing(loader.steps(0, 1)) as steps:
            batch = next(steps)
    engine.set_learning_rate(resolved.optimizer.learning_rate)
    return engine, batch, lambda: engine.step(batch, batch.num_terms, lambda values: values)


def make_bare_step(plain, resolved, batch, device):
    """The same in plain torch: masters in fp32, a model in bf16 whose blocks are compiled, AdamW in one kernel."""
    task = build_task(resolved.task)
    half = copy.deepcopy(plain).bfloat16()
    for block in half.blocks():
        block.compile()
    masters, halves = list(plain.parameters()), list(half.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    tensors = [
        {name: tensor.to(device) for name, tensor in tensors_of(task, micro.arrays).items()}
        for micro in batch.micro_batches
    ]
    weight = torch.ones(len(batch.micro_batches[0].weight), device=device)

    def take():
        torch._foreach_copy_([each.data for each in halves], masters)
        for rows in tensors:
            (task.loss(half(*task.inputs(rows)), rows, weight) / batch.num_terms).backward()
        for master, each in zip(masters, halves, strict=True):
            master.grad, each.grad = each.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return take


def measure_peak_rate():
    """Operations of a second of dense products in bf16, as they are measured."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, num_times=30)


@needs_triton
def test_a_model_of_more_than_a_billion_parameters_uses_the_gpu_as_a_bare_compiled_loop_does(monkeypatch, record):
    resolved = config.parse(LARGE)
    rows = {"tokens": np.random.default_rng(0).integers(97, 123, (8, LENGTH + 1)).astype(np.uint16)}
    with in_process.world(monkeypatch) as world:
        engine, batch, take = make_step(world, resolved, rows)
        seconds, flops = seconds_of(take), engine.model.num_flops(resolved.train.global_batch_size)
        plain = build_model(resolved.model, build_task(resolved.task).model_arguments())
        del engine, take
        gc.collect()
        torch.cuda.empty_cache()
        bare_seconds = seconds_of(make_bare_step(plain.to(world.device), resolved, batch, world.device))
    share = flops / seconds / measure_peak_rate()
    record("1.3 billion parameters, 2,048 tokens: share of the measured dense peak", "≥ 0.60", f"{share:.2f}")
    record("its speed over that of a bare compiled loop", "≥ 0.99", f"{bare_seconds / seconds:.3f}")
    assert share >= 0.60
    assert bare_seconds / seconds >= 0.99


@needs_triton
@pytest.mark.parametrize("method", ["none", "blocks", "selective"])
def test_compiled_blocks_train_as_the_bare_loop_on_a_cpu(monkeypatch, method):
    row = Row("compiled", 1, ("train.compile=true", f"train.activation_checkpointing={method}"))
    row = replace(row, tolerance=1e-3, weight_tolerance=2e-3)
    with in_process.world(monkeypatch) as world, compiled.counted():
        parity.check(row, [Answer("done", parity_rank.train(world, row.job))])


SMALL = (
    "train.compile=true",
    "precision.compute=bf16",
    "train.global_batch_size=8",
    "train.micro_batch_size=0",
    "evaluate.interval_steps=4",
    "evaluate.batch_size=8",
)


@needs_triton
def test_blocks_that_repeat_graphs_train_as_those_that_are_compiled_alone(monkeypatch):
    curves = []
    for graphs in ("false", "true"):
        row = Row("graphs", 1, (*SMALL, f"train.cuda_graphs={graphs}"))
        with in_process.world(monkeypatch) as world:
            curves.append(parity_rank.train(world, row.job).history)
    for one, other in zip(*curves, strict=True):
        for name in ("loss", "gradient_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3), one["step"]


@needs_triton
def test_a_small_model_takes_less_time_with_graphs(monkeypatch, record):
    seconds = {}
    tokens = np.random.default_rng(0).integers(97, 123, (8, 129)).astype(np.uint16)
    for graphs in ("false", "true"):
        small = ("task.sequence_length=128", "model.dim=256", "model.num_layers=12", "model.ffn_dim=688")
        resolved = config.parse(BASE, (*SMALL, *small, f"train.cuda_graphs={graphs}"))
        with in_process.world(monkeypatch) as world:
            _, _, take = make_step(world, resolved, {"tokens": tokens})
            seconds[graphs] = seconds_of(take, num_warm_up=10, num_times=100)
    share = seconds["true"] / seconds["false"]
    record("12 blocks of width 256, 1,024 tokens: step with CUDA graphs, over compiled alone", "< 1", f"{share:.2f}")
    assert share < 1


def test_without_triton_compiling_is_refused_before_the_model_is_built(monkeypatch):
    if has_triton():
        pytest.skip("torch finds Triton here")
    row = Row("compiled", 1, ("train.compile=true",))
    with in_process.world(monkeypatch) as world, pytest.raises(ConfigError, match="torch cannot compile here"):
        parity_rank.train(world, row.job)


def test_activations_in_fp16_that_wait_on_the_host_give_the_same_bits_and_take_less(monkeypatch, record):
    curves, peaks = {}, {}
    for method in ("none", "offload"):
        overrides = (*precision.Scaling().overrides, f"train.activation_checkpointing={method}", "model.dim=256")
        job = parity_rank.Job(BASE, (*overrides, "precision.deterministic=true", "model.ffn_dim=1024"), text_rows)
        torch.cuda.reset_peak_memory_stats()
        with in_process.world(monkeypatch) as world:
            curves[method] = [point["loss"] for point in parity_rank.train(world, job).history]
        peaks[method] = torch.cuda.max_memory_allocated()
    assert curves["offload"] == curves["none"]
    record(
        "peak of memory with activations on the host, over without", "< 1", f"{peaks['offload'] / peaks['none']:.2f}"
    )
    assert peaks["offload"] < peaks["none"]


def test_the_carrier_brings_whole_batches_from_the_loaders_thread():
    resolved = config.parse(BASE)
    task, sent = build_task(resolved.task), []
    tokens = text_rows()["tokens"]
    batches = [MicroBatch({"tokens": tokens[start : start + 4]}, np.ones(4, np.float32)) for start in range(0, 24, 4)]
    carrier = Carrier.to(torch.device("cuda", 0), task)

    def send():
        sent.extend(carrier.send(micro, count_loss_terms(task, micro)) for micro in batches)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    for micro, each in zip(batches, sent, strict=True):
        received, expected = each.receive(), Carrier(task, None).send(micro, count_loss_terms(task, micro)).receive()
        assert received.batch.keys() == expected.batch.keys()
        for name, tensor in received.batch.items():
            assert tensor.is_cuda and torch.equal(tensor.cpu(), expected.batch[name])
        assert torch.equal(received.weight.cpu(), expected.weight)
        assert torch.equal(received.terms.cpu(), expected.terms)
