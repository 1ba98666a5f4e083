"""A training on a GPU: its way there and back, what it keeps, and how fast it is."""

import contextlib
import time

import pytest
import torch
from helpers import in_process, jobs
from helpers.models import regression
from safetensors.torch import load_file
from torch import nn

from kftrain.core import storage
from kftrain.errors import Preempted
from kftrain.run import documents
from kftrain.run.documents import Completion
from kftrain.train.averages import Averages
from kftrain.train.eight_bit import AdamW8bit
from kftrain.train.optimizer_kinds import AdamW
from kftrain.train.step import CudaStreams

TEXT = (
    regression.BASE
    + """
run: {name: gpu, seed: 3}
model: {kind: "helpers.models.regression:Network", dim: 64, dropout: 0.2}
optimizer: {learning_rate: 0.02, warmup_steps: 5}
train: {steps: 12, global_batch_size: 10, log_interval_steps: 1}
launch: {gpus_per_node: 1}
"""
)
EIGHT_BIT = ["optimizer.state=8bit"]
ALL = [[], ["precision.compute=bf16"], ["precision.compute=fp16"], EIGHT_BIT, ["train.average_decay=0.9"]]


def exported(paths):
    uri = documents.read(Completion, paths.complete).export_uri
    return load_file(storage.local_path(uri) / "model.safetensors")


@pytest.mark.parametrize("overrides", ALL, ids=str)
def test_a_resume_is_exact_to_the_bit(tmp_path, monkeypatch, overrides):
    straight, resolved = jobs.prepare(tmp_path, TEXT, [*overrides, "precision.deterministic=true"], "straight")
    in_process.train(straight, resolved, monkeypatch)
    stopped, _ = jobs.prepare(tmp_path, TEXT, overrides, "stopped")
    with contextlib.suppress(Preempted):
        in_process.train(stopped, resolved, monkeypatch, in_process.StopAfter(7))
    in_process.train(stopped, resolved, monkeypatch)
    assert jobs.losses(stopped) == jobs.losses(straight)
    for name, value in exported(straight).items():
        assert torch.equal(exported(stopped)[name], value), name


def trained(device, kind, num_steps=8):
    """Weights and averages after some steps, the fourth of which is skipped."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(device)
    optimizer = kind([{"params": list(model.parameters()), "weight_decay": 0.1}], 1e-3, (0.9, 0.95), 1e-3)
    averages, rows = Averages(model, 0.7, 1), torch.linspace(-1, 1, 16 * 64).view(16, 64).to(device)
    for step in range(num_steps):
        model(rows).square().mean().backward()
        found_inf = torch.tensor(float(step == 3), device=device)
        optimizer.found_inf = found_inf
        optimizer.step()
        optimizer.zero_grad()
        averages.update(found_inf)
    kept = averages.make_part().save()["weights"]
    return {name: value.detach().cpu() for name, value in [*model.state_dict().items(), *kept.items()]}


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_fused_kernels_and_averages_compute_what_a_cpu_computes(kind):
    expected = trained("cpu", kind)
    for name, value in trained("cuda", kind).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_batch_is_copied_beside_the_computation_and_whole_when_it_is_needed(record):
    streams, rows = CudaStreams(torch.device("cuda", 0)), torch.randn(64, 1 << 18)
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        busy = busy @ busy * 1e-4
    asked = time.perf_counter() - start
    with streams.aside():
        copied, event = streams.copy(rows), streams.mark()
    event.synchronize()
    arrived = time.perf_counter() - start
    torch.cuda.synchronize()
    computed = time.perf_counter() - start
    streams.wait(event)
    streams.hold(copied)
    assert torch.equal(copied.cpu(), rows)
    assert asked < computed and arrived < computed, "the copy does not wait for the computation"
    record("copy of 64 MiB beside a computation: ends after", "< 1 x", f"{arrived / computed:.2f} x of it")


def measure_rate(work, num_times):
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_times):
        work()
    torch.cuda.synchronize()
    return num_times / (time.perf_counter() - start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_faster_than_fp32(record, dtype):
    matrices = {each: torch.randn(4096, 4096, device="cuda", dtype=each) for each in (torch.float32, dtype)}
    rates = {each: measure_rate(lambda own=own: own @ own, 50) for each, own in matrices.items()}
    ratio = rates[dtype] / rates[torch.float32]
    record(f"products of matrices in {dtype} over fp32 without TF32", "≥ 2", f"{ratio:.1f} x")
    assert ratio >= 2
