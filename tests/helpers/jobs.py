"""Runs of a tiny language model, as the launcher starts them: real processes, gloo, one thread each."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import psutil

from kftrain import config
from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Completion, EvaluationRequest, EvaluationTarget
from kftrain.run.paths import RunPaths
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task

TINY = """
run: {name: tiny, seed: 1}
data: {source: SOURCE, shard_size_bytes: 65536, validation_fraction: 0.2}
task: {kind: language_modeling, sequence_length: 32, tokenizer: bytes}
model: {kind: transformer, dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 4}
train: {steps: 20, global_batch_size: 8, log_interval_steps: 1}
checkpoint: {interval_steps: 5}
evaluate: {interval_steps: 0, num_bootstrap: 100}
launch: {processes_per_node: 2, timeout_seconds: 300}
"""

TESTS = Path(__file__).parents[1]

WORDS = ("the", "of", "and", "shard", "rank", "loss", "step", "epoch", "gradient", "batch", "tensor", "mesh", "commit")


def write_texts(folder, num_files=24, num_words=400):
    """Files of plausible text, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num_files):
        generator = random.Random(index)
        (folder / f"text-{index:03d}.txt").write_text(" ".join(generator.choice(WORDS) for _ in range(num_words)))
    return folder


def make_run(root, overrides=(), run_id="r"):
    """A run that is ready to train: sharded data and config.yaml."""
    source = Path(root) / "texts"
    if not source.exists():
        write_texts(source)
    return prepare(root, TINY.replace("SOURCE", str(source)), overrides, run_id)


def prepare(root, text, overrides=(), run_id="r", data=None):
    """A run of any configuration that is ready to train; `data`: paths of a run that has the same."""
    resolved = config.parse(text, [f"run.storage_root={root}/store", *overrides])
    paths = RunPaths.of(resolved.run.storage_root, run_id)
    if data is None:
        result = shard_dataset(resolved, build_task(resolved.task), lambda line: None)
        sharded = {"schema_version": 1, "manifest_uri": result.manifest_uri, "dataset_digest": result.dataset_digest}
    else:
        sharded = storage.read_json(data.shards)
    storage.publish_json(paths.shards, sharded)
    storage.publish(paths.config, resolved.to_yaml())
    return paths, resolved


def request_evaluation(paths):
    """Asks for the evaluation of a complete run's model."""
    completion = documents.read(Completion, paths.complete)
    target = EvaluationTarget(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        checkpoint_digest=completion.checkpoint_digest,
        output_uri=paths.evaluation(completion.checkpoint_digest, "e"),
    )
    storage.publish_json(paths.evaluation_request, EvaluationRequest(evaluation_digest="e", targets=[target]).to_dict())


def worker_command(paths, resolved, task="train", processes=2, nodes=1):
    arguments = ["--task", task, "--run-uri", paths.uri, "--digest", resolved.digest()]
    sizes = ["--processes", str(processes), "--nodes", str(nodes)]
    return [sys.executable, "-m", "kftrain", "worker", *arguments, *sizes]


def worker_environment(environment):
    """Of a worker in a test: one thread, and modules of tests can be imported."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}


def run_worker(paths, resolved, task="train", processes=2, nodes=1, **environment):
    """Runs one node to its end; returns the completed process with its output as text."""
    return subprocess.run(
        worker_command(paths, resolved, task, processes, nodes),
        env=worker_environment(environment),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def start_worker(paths, resolved, processes=2, task="train", nodes=1, **environment):
    """Starts one node; its stdout is a pipe of lines."""
    return subprocess.Popen(
        worker_command(paths, resolved, task, processes, nodes),
        env=worker_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(process, part):
    """Reads until a line contains `part`; returns what was read."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if part in line:
            return lines
    raise AssertionError(f"{part!r} never came:\n" + "".join(lines))


def tree_of(process):
    """The process and all below it."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def kill_tree(process):
    """SIGKILL to the process and all below it at once: what a power cut does."""
    members = tree_of(process)
    for member in members:
        member.kill()
    process.communicate(timeout=120)
    psutil.wait_procs(members[1:], timeout=120)


def losses(paths):
    """Step -> loss as recorded, every bit of it."""
    return {point["step"]: point["loss"] for point in storage.read_json(paths.history) if "loss" in point}


def ranks_of(process):
    """The training processes below a supervisor."""
    (agent,) = [child for child in psutil.Process(process.pid).children() if "kftrain.worker.agent" in child.cmdline()]
    return agent.children()


def assert_same_curve(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys() == set(range(1, 21))
    for step, loss in theirs.items():
        assert math.isclose(ours[step], loss, rel_tol=tolerance), (step, ours[step], loss)
