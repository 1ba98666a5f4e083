"""Nodes of a job that do not meet: each ends when its own share is done, in any order, and waits for nobody."""

import os
import sys

import pytest
from helpers.toy_data import text_folder, toy_config

from kftrain.core import storage
from kftrain.data.settings import DataConfig
from kftrain.errors import Preempted
from kftrain.run.config import keep_job_config
from kftrain.run.documents import SHARES_ENV
from kftrain.run.error import ErrorDocument
from kftrain.run.job_tasks import SHARDING, TRAINING
from kftrain.run.paths import RunPaths
from kftrain.sharding.parts import share
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.worker import root_cause
from kftrain.worker.node import NodeSpec
from kftrain.worker.root_cause import Stop
from kftrain.worker.supervisor import Supervisor


class Agent:
    """Runs the rank in this process: what the supervisor would have an agent fork."""

    pid = None

    def __init__(self, work):
        self._work = work

    def start(self, environment):
        pass

    def wait(self):
        self._work()
        return 0


@pytest.mark.timeout(120)
def test_a_node_ends_when_its_share_is_done(tmp_path, monkeypatch):
    """The second of two first: a node that meets others would look for the first one, and be lost."""
    from kftrain.sharding.parts.share import encode_share

    monkeypatch.setattr(share, "PROCESS_BYTES", 1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    source, codes = text_folder(tmp_path / "texts", 120), []
    paths = RunPaths.of(str(tmp_path / "root"), "r-1")

    def run_nodes(config, shares):
        monkeypatch.setenv(SHARES_ENV, ",".join(one.digest for one in shares))
        for rank, one in enumerate(shares):
            storage.publish_json(paths.share(config.digest(), rank), one.to_dict())
        keep_job_config(paths, config)
        for rank in (1, 0):
            monkeypatch.setenv("RANK", str(rank))
            node = NodeSpec("shard", paths.uri, config.digest(), 1, nodes=2, node_rank=rank, address="nowhere.invalid")
            codes.append(Supervisor(node, Agent(lambda: encode_share(paths, config))).run())
        SHARDING.read_results(paths, config)
        return paths.encoded_parts

    config = toy_config(source, tmp_path / "root", part_size_bytes=1 << 16, processes=1, shard_pods=2)
    config = config.model_copy(update={"task": TaskConfig(kind="helpers.models.toy_task:ToyTask")})
    assert isinstance(config.data, DataConfig)
    shard_dataset(config, build_task(config.task), lambda line: None, run_nodes)
    assert codes == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_node_answers_for_the_others(rank):
    def judge(task):
        return root_cause.judge_node(None, Stop(), NodeSpec(task.name, "r", "d", 1, nodes=2, node_rank=rank))

    assert judge(SHARDING) is None
    assert (judge(TRAINING) is not None) == (rank == 0)
    stopped = ErrorDocument.salvage({"exit_code": Preempted.exit_code, "line": "x", "rank": 0})
    assert "are not encoded again" in root_cause.explain_stop(stopped, "shard").line
