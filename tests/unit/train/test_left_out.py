"""Samples that cannot be decoded: counted once, on all processes alike, over attempts, up to a budget."""

import pytest

from kftrain.data.decoding import BadSample
from kftrain.errors import DataError
from kftrain.train.loop import LeftOutSamples


class World:
    """One of three processes, the others of which have met what they are told to."""

    is_main = True

    def __init__(self, *others):
        self.others = others

    def gather(self, own):
        return [self.others[0], own, self.others[1]]


def bad(*numbers):
    return [BadSample(number, DataError("damaged", where=f"s.tar, key-{number}")) for number in numbers]


def test_a_sample_counts_once_whoever_meets_it_and_however_often(capsys):
    world = World(bad(5), bad(7, 5))
    left_out = LeftOutSamples(world, 4)
    left_out.take(bad(3))
    left_out.take(bad())
    assert left_out.numbers == {3, 5, 7}
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"kftrain| warning: left out, {count} of at most 4: s.tar, key-{number}: damaged"
        for count, number in enumerate((3, 5, 7), start=1)
    ]


def test_one_more_than_allowed_ends_the_run_on_every_process_and_a_resumed_run_counts_on():
    for is_main in (True, False):
        world = World(bad(), bad(8))
        world.is_main = is_main
        left_out = LeftOutSamples(world, 2)
        left_out.resume([1, 8])
        left_out.take(bad(1))
        with pytest.raises(DataError, match=r"3 samples cannot be decoded.*s\.tar, key-9: damaged \(got 2\)") as caught:
            left_out.take(bad(9))
        assert caught.value.exit_code == 11
