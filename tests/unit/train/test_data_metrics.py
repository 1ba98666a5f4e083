from kftrain.data.loader import Counters
from kftrain.train.loop import DataMetrics


class World:
    """Two processes; the other one has measured the same."""

    size = 2

    def sum(self, values):
        return [2 * value for value in values]


def test_the_numbers_of_a_point_are_those_since_the_one_before_over_all_processes():
    counters = Counters()
    metrics = DataMetrics(counters, World())
    for factor in (1, 3):
        counters.stall_seconds += 0.5 * factor
        counters.decode_seconds += 4.0 * factor
        counters.num_bytes += 1000 * factor
        counters.ready_steps += 5 * factor
        counters.num_steps += 2
        assert metrics.collect() == {
            "data_stall_seconds": 0.5 * factor,
            "data_decode_seconds": 8.0 * factor,
            "data_bytes": 2000 * factor,
            "data_queue_depth": 2.5 * factor,
        }
    assert metrics.collect()["data_queue_depth"] == 0
