"""The examples for GPU nodes: each compiles, its jobs can be built, its model has the size that its first line says."""

from pathlib import Path

import pytest
import torch
import yaml

from kftrain import config
from kftrain.models.registry import build_model
from kftrain.stages.dry_run import describe_jobs_of_new_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    return config.load((str(EXAMPLES / f"{name}.yaml"),), ())


@pytest.mark.parametrize(("name", "nodes"), [("llama-1b", 1), ("llama-8b", 4), ("vit-base", 2)])
def test_the_jobs_of_an_example_take_whole_nodes(name, nodes):
    jobs = [job for job in yaml.safe_load_all(describe_jobs_of_new_run(load(name))) if job]
    assert [job["metadata"]["name"] for job in jobs] == [f"{name}-dry-run-train", f"{name}-dry-run-evaluate"]
    for job in jobs:
        worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        assert worker["replicas"] == nodes
        (container,) = worker["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    ("name", "arguments", "num_parameters"),
    [
        # blocks x (attention + feed-forward part + norms) + embedding + head + norm
        ("llama-1b", {"vocab_size": 32_000}, 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 4096) + 2 * 32_000 * 2048 + 2048),
        ("llama-8b", {"vocab_size": 128_256}, 8_030_261_248),  # as Meta states it of Llama 3 8B
        ("vit-base", {"image_size": 224, "num_channels": 3, "num_classes": 1000}, 86_566_120),
    ],
)
def test_the_model_has_the_size_that_the_example_says(name, arguments, num_parameters):
    with torch.device("meta"):
        model = build_model(load(name).model, arguments)
    assert sum(each.numel() for each in model.parameters()) == num_parameters
