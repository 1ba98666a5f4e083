"""`kftrain bandwidth` as a job of a real cluster: what two pods measure between them."""

import pytest
from e2e.commands import kftrain, options

pytestmark = pytest.mark.timeout(900, func_only=True)

TWO_PODS = {"launch.nodes": 2, "launch.processes_per_node": 1, "launch.kubernetes.cpu": "250m"}
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
LINK_GBPS = 100
"""No link of a test cluster is as fast."""


def test_two_pods_measure_the_network_between_them_and_leave_nothing(settings, namespace, tmp_path):
    fabric = {"launch.kubernetes.fabric.between_nodes_gbps": LINK_GBPS}
    rows = kftrain("bandwidth", "--json", *options({**settings, **TWO_PODS, **fabric}), folder=tmp_path)
    assert {row["collective"] for row in rows} == COLLECTIVES
    for row in rows:
        assert (row["axis"], row["processes"]) == ("between nodes", 2)
        assert row["share"] == pytest.approx(row["bus_bytes_per_second"] * 8e-9 / LINK_GBPS)
        assert 0 < row["share"] < 1
        print(f"{row['collective']} of {row['bytes'] >> 20} MiB: {row['bus_bytes_per_second'] * 8e-9:.2f} Gbit/s")
    assert not namespace.jobs()
