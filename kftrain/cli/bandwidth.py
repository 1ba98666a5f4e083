"""`kftrain bandwidth`: a job that measures the network between the processes that a training would have."""

from __future__ import annotations

import json
from typing import Any

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, json_option
from kftrain.cli.stages import new_run_id
from kftrain.client.console import echo
from kftrain.config import Config
from kftrain.core import storage
from kftrain.run.paths import RunPaths

BITS = 8 / 1e9


@click.command("bandwidth")
@config_options
@json_option
def bandwidth_command(config_file: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure collectives within and between nodes: bus bandwidth, and its share of what the links can carry.

    It starts the processes that a training would have, on this machine or on the cluster. Limits are those of
    launch.kubernetes.fabric.
    """
    from kftrain import launch
    from kftrain.stages import resolve

    config = resolve.anchor_paths(configuration.load(config_file, overrides), ".")
    paths = RunPaths(storage.join(config.run.storage_root, "bandwidth", new_run_id("bandwidth")))
    rows = [{**row, "share": _compute_share(row, config)} for row in launch.run_bandwidth(paths, config)]
    echo(json.dumps(rows) if as_json else "\n".join(_write_table(rows)))


def _compute_share(row: dict[str, Any], config: Config) -> float:
    """Compute the share of the limit: of a process within its node, else of what its part of the node's link carries.

    A ring over all processes leaves each node once, so that it alone may have the node's link.
    """
    from kftrain.launch.kubernetes import fabric
    from kftrain.launch.spec import count_processes_per_node

    between_gbps, within_gbps = fabric.choose_rates(config.launch.kubernetes.fabric)
    own_gbps = between_gbps / count_processes_per_node(config)
    limits = {"within nodes": within_gbps, "between nodes": own_gbps, "all": between_gbps}
    return float(row["bus_bytes_per_second"] * BITS / limits[row["axis"]])


def _write_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'axis':<14} {'collective':<15} {'processes':>9} {'MiB':>6} {'ms':>9} {'bus Gbit/s':>11} {'of the link':>11}"
    ]
    for row in rows:
        rate, milliseconds = row["bus_bytes_per_second"] * BITS, row["seconds"] * 1e3
        cells = f"{row['processes']:>9} {row['bytes'] / 2**20:>6.0f} {milliseconds:>9.2f} {rate:>11.2f}"
        lines.append(f"{row['axis']:<14} {row['collective']:<15} {cells} {row['share']:>11.1%}")
    return lines
