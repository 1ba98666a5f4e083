"""A small training on made-up clicks, with its servers in this process."""

import contextlib

import numpy as np

from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.server.moving import name_server
from kftrain.server.process import RunServer
from kftrain.sharding.sources.clicks import ClicksSource

NUM_FIELDS, DIM = 3, 4

SECRET = "only for this test"

SOURCE = ClicksSource(num_rows=600, num_fields=NUM_FIELDS, num_keys=60, exponent=0.6)

TEXT = """
run: {name: clicks, seed: 2}
data: {source: "helpers.clicks:records", validation_fraction: 0.3}
task: {kind: click_prediction, num_fields: 3}
model: {kind: click_network, dim: 4, hidden: [8]}
server: {num_servers: 1, tables: [{name: ids, dim: 4, optimizer: sgd, learning_rate: 2.0}]}
parallel: {strategy: ddp}
optimizer: {kind: sgd, learning_rate: 0.5, momentum: 0.0, schedule: constant, warmup_steps: 0, weight_decay: 0.0}
train: {steps: 8, global_batch_size: 24, gradient_clip_norm: 0, log_interval_steps: 1}
checkpoint: {interval_steps: 4, keep_last: 1}
evaluate: {interval_steps: 0, num_bootstrap: 100}
registry: {metric: auc, goal: maximize}
launch: {processes_per_node: 2, timeout_seconds: 300}
"""


def records():
    return SOURCE.records()


@contextlib.contextmanager
def serving(paths, resolved, monkeypatch, folder):
    """Servers of a run in threads of this process, each with its address in the run's folder."""
    monkeypatch.setenv(SERVER_SECRET_VARIABLE, SECRET)
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(resolved.server.num_servers):
            server = RunServer(paths, resolved, number, folder, SECRET.encode())
            server.start()
            stack.callback(server.stop)
            address = {"name": name_server(number), "host": "127.0.0.1", "port": server.address[1]}
            storage.publish_json(storage.join(paths.servers, f"{number}.json"), address)
            servers.append(server)
        yield servers


def rows_of(uri, kind="rows"):
    """Every number of every row that a checkpoint holds, ordered by key."""
    files = sorted(storage.local_path(uri).glob(f"tables-*-ids-{kind}.npy"))
    assert files, "the checkpoint has no tables"
    rows = np.concatenate([np.load(file) for file in files])
    return rows[np.argsort(rows["key"])]
