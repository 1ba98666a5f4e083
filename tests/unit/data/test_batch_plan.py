import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 70), st.data())
def test_ranks_share_the_global_batch_without_gap_or_overlap(batch: int, data: st.DataObject) -> None:
    plan = BatchPlan(batch, data.draw(st.integers(1, batch)), data.draw(st.integers(0, batch)))
    kept = [plan.offsets(rank)[plan.weights(rank) == 1] for rank in range(plan.num_ranks)]
    assert np.concatenate(kept).tolist() == list(range(batch))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 70), st.data())
def test_all_ranks_run_equal_micro_batches_no_larger_than_asked(batch: int, data: st.DataObject) -> None:
    micro = data.draw(st.integers(1, batch))
    plan = BatchPlan(batch, data.draw(st.integers(1, batch)), micro)
    assert 1 <= plan.micro_batch_rows <= micro
    for rank in range(plan.num_ranks):
        assert plan.weights(rank).shape == (plan.num_micro_batches, plan.micro_batch_rows)
        assert plan.weights(rank).dtype == np.float32 and plan.weights(rank).sum() >= 1


def test_an_uneven_batch_is_padded_as_little_as_possible() -> None:
    plan = BatchPlan(10, 4, micro_batch_size=2)
    assert [plan.share(rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert plan.weights(0).tolist() == [[1, 1], [1, 0]]
    assert plan.weights(3).tolist() == [[1, 1], [0, 0]]
    assert plan.offsets(3).tolist() == [[8, 9], [9, 9]]


def test_five_rows_in_micro_batches_of_four_make_two_of_three() -> None:
    plan = BatchPlan(5, 1, micro_batch_size=4)
    assert (plan.num_micro_batches, plan.micro_batch_rows) == (2, 3)


def test_more_processes_than_samples_of_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"9 processes .* batch of 8 "):
        BatchPlan(8, 9)
