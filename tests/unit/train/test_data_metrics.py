import sys
import types

import psutil
import pytest
import torch

from kftrain.data.counters import Counters
from kftrain.train import usage
from kftrain.train.usage import DataMetrics, measure_usage


class World:
    """Two processes; the other one has measured the same, unless it is said how long it has waited."""

    size = 2
    device = torch.device("cpu")

    def __init__(self, stall_seconds=None):
        self.stall_seconds = stall_seconds

    def sum(self, values):
        other = list(values)
        if self.stall_seconds is not None:
            first = list(vars(Counters())).index("stall_seconds")
            other[first] = self.stall_seconds
            other[len(vars(Counters()))] = self.stall_seconds**2
        return [own + theirs for own, theirs in zip(values, other, strict=True)]


def test_the_numbers_of_a_point_are_those_since_the_one_before_over_all_processes(tmp_path):
    counters = Counters()
    metrics = DataMetrics(counters, World(), str(tmp_path))
    for factor in (1, 3):
        counters.stall_seconds += 0.5 * factor
        counters.read_seconds += 2.0 * factor
        counters.decode_seconds += 4.0 * factor
        counters.num_bytes += 1000 * factor
        counters.ready_steps += 5 * factor
        counters.num_steps += 2
        counters.add(Counters(retries=factor, cache_hits=3 * factor, cache_misses=factor))
        found = metrics.collect()
        machine = {name: found.pop(name) for name in ("memory_bytes", "disk_used_share")}
        assert found == {
            "data_stall_seconds": 0.5 * factor,
            "data_stall_skew_seconds": 0,
            "data_read_seconds": 4.0 * factor,
            "data_decode_seconds": 8.0 * factor,
            "data_bytes": 2000 * factor,
            "data_queue_depth": 2.5 * factor,
            "storage_retries": 2 * factor,
            "data_cache_hit_share": 0.75,
        }
        assert machine["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
        assert machine["disk_used_share"] == pytest.approx(psutil.disk_usage(str(tmp_path)).percent / 100, abs=0.05)
    found = metrics.collect()
    assert found["data_queue_depth"] == 0 and "data_cache_hit_share" not in found, "nothing was asked for"


def test_the_skew_is_how_much_processes_differ_in_waiting():
    counters = Counters()
    metrics = DataMetrics(counters, World(stall_seconds=7.0))
    counters.stall_seconds = 1.0
    found = metrics.collect()
    assert found["data_stall_seconds"] == 4.0 and found["data_stall_skew_seconds"] == pytest.approx(3.0)


class NVMLError(Exception):
    """As NVML's library has it: no RuntimeError."""


def test_a_gpu_is_measured_and_how_busy_it_is_where_somebody_can_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(NVMLError=NVMLError))
    found = measure_usage(psutil.Process(), torch.device("cuda", 0), str(tmp_path))
    assert found["gpu_memory_share"] == 0.75 and found["gpu_use_share"] == 0.87

    known = types.SimpleNamespace(size=2, device=torch.device("cuda", 0), sum=World().sum)
    for error in (NVMLError("not supported"), RuntimeError("no driver"), ModuleNotFoundError("no pynvml")):

        def utilization(device, error=error):
            raise error

        monkeypatch.setattr(torch.cuda, "utilization", utilization)
        found = DataMetrics(Counters(), known, str(tmp_path)).collect()
        assert found["gpu_memory_share"] == 0.75 and "gpu_use_share" not in found


def test_a_folder_that_is_gone_ends_no_training(tmp_path):
    found = DataMetrics(Counters(), World(), str(tmp_path / "gone")).collect()
    assert "disk_used_share" not in found and "data_bytes" in found


def test_the_machine_is_measured_once_a_second(tmp_path, monkeypatch):
    now, asked = [5.0], []
    monkeypatch.setattr(usage, "monotonic", lambda: now[0])
    monkeypatch.setattr(usage, "measure_usage", lambda *of: asked.append(of) or {"memory_bytes": float(len(asked))})
    metrics = DataMetrics(Counters(), World(), str(tmp_path))
    found = []
    for now[0] in (5.0, 5.9, 6.0, 6.5):
        found.append(metrics.collect()["memory_bytes"])
    assert found == [1.0, 1.0, 2.0, 2.0]
