"""The part of a sequence that each of some processes has."""

import pytest
import torch

from kftrain.errors import ConfigError
from kftrain.parallel.sequences import WHOLE_SEQUENCES, SequenceCut
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.shape import require_chunks


def cuts(size):
    return [SequenceCut(size, place) for place in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_processes_have_all_places_and_as_much_below_the_diagonal(size):
    chunks = [cut.list_chunks(24) for cut in cuts(size)]
    assert sorted(place for own in chunks for chunk in own for place in chunk) == list(range(24))
    assert len({sum(place + 1 for chunk in own for place in chunk) for own in chunks}) == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_that_are_joined_are_the_sequence(size, dim):
    shape = [2, 3, 4]
    shape[dim] = 24
    whole = torch.arange(2 * 3 * 4 * 24 // [2, 3, 4][dim]).view(shape)
    parts = torch.stack([cut.take_part(whole, dim) for cut in cuts(size)])
    assert parts.shape[dim + 1] == 24 // size
    for cut in cuts(size):
        torch.testing.assert_close(cut.join_parts(parts, dim), whole)
        torch.testing.assert_close(cut.view_parts(whole, dim), parts)


def test_a_batch_is_cut_where_it_has_sequences():
    batch = {"tokens": torch.arange(8).view(1, 8), "label": torch.ones(1)}
    assert SequenceCut(2, 1).cut_batch(batch, {"tokens": 1})["tokens"].tolist() == [[2, 3, 4, 5]]
    assert SequenceCut(2, 1).cut_batch(batch, {"tokens": 1})["label"] is batch["label"]
    assert WHOLE_SEQUENCES.cut_batch(batch, {"tokens": 1})["tokens"] is batch["tokens"]


@pytest.mark.parametrize(
    ("length", "context", "parts", "multiple"), [(8, 2, 1, 4), (24, 2, 3, 12), (16, 2, 4, 8), (16, 4, 2, 8)]
)
def test_a_length_is_refused_with_numbers_that_do(length, context, parts, multiple):
    assert require_chunks(length, context, parts) == multiple
    with pytest.raises(ConfigError, match=rf"got {length + 2}\); use a multiple of {multiple} such as"):
        require_chunks(length + 2, context, parts)


def test_a_length_is_refused_before_the_start():
    parallel = ParallelConfig(context=2, tensor=4)
    parallel.require_fitting({"num_heads": 4, "sequence_length": 16})
    with pytest.raises(ConfigError, match="cannot be cut for 2 processes"):
        parallel.require_fitting({"num_heads": 4, "sequence_length": 20})
