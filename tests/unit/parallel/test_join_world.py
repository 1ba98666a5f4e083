"""A machine that was to have GPUs."""

import pytest
import torch
from helpers import in_process

from kftrain import config
from kftrain.errors import LaunchError
from kftrain.parallel.world import join_world


@pytest.mark.parametrize(("backend", "gpus"), [("pytorchjob", 1), ("local", 0)])
def test_a_pod_must_have_its_gpus_and_a_laptop_may_read_the_clusters_file(backend, gpus):
    settings = [f"launch.backend={backend}", "launch.kubernetes.gpus_per_node=1"]
    assert config.parse("{}", settings).launch.gpus_per_node == gpus


def test_a_torch_that_sees_no_gpu_is_refused_where_there_must_be_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = r"launch.kubernetes.gpus_per_node: the pod was to have GPUs, and torch sees none \(got 1\)"
    with in_process.alone(monkeypatch), pytest.raises(LaunchError, match=message), join_world(10.0, gpus_per_node=1):
        pass


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with in_process.alone(monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(LaunchError, match="process 2 of this machine has no GPU: torch sees 2"), join_world(10.0):
            pass
