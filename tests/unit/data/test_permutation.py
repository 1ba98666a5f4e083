import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data import permutation


def permuted(size: int, text: str = "key") -> np.ndarray:
    keys = np.repeat(permutation.derive_key(text), size)
    return permutation.permute(np.arange(size, dtype=np.uint64), np.full(size, size, np.uint64), keys)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.text(max_size=5))
def test_permute_is_a_bijection_of_its_range(size: int, text: str) -> None:
    assert np.array_equal(np.sort(permuted(size, text)), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 4095, 4096, 4097])
def test_sizes_around_squares_and_powers_of_two_are_permuted_too(size: int) -> None:
    assert sorted(permuted(size).tolist()) == list(range(size))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(2**40, 2**52), st.integers(0, 2**40 - 51))
def test_huge_ranges_need_no_table_and_stay_injective(size: int, start: int) -> None:
    elements = np.arange(start, start + 50, dtype=np.uint64)
    images = permutation.permute(elements, np.full(50, size, np.uint64), np.repeat(permutation.derive_key(""), 50))
    assert len(set(images.tolist())) == 50 and images.max() < size


def test_mixed_sizes_and_keys_in_one_call_equal_separate_calls() -> None:
    sizes = np.array([3, 1000, 3, 17], np.uint64)
    keys = permutation.derive_subkeys(permutation.derive_key("x"), np.arange(4, dtype=np.uint64))
    together = permutation.permute(np.array([2, 999, 0, 5], np.uint64), sizes, keys)
    apart = [
        permutation.permute(np.array([e], np.uint64), sizes[i : i + 1], keys[i : i + 1])[0]
        for i, e in enumerate([2, 999, 0, 5])
    ]
    assert together.tolist() == [int(value) for value in apart]


def test_over_many_keys_every_order_of_four_comes_about_equally_often() -> None:
    num_keys = 24_000
    keys = permutation.derive_subkeys(permutation.derive_key("orders"), np.arange(num_keys, dtype=np.uint64))
    size = np.full(num_keys, 4, np.uint64)
    orders = np.stack([permutation.permute(np.full(num_keys, e, np.uint64), size, keys) for e in range(4)], axis=1)
    counts = Counter(map(tuple, orders.tolist()))
    assert set(counts) == set(itertools.permutations(range(4)))
    assert max(abs(count - 1000) for count in counts.values()) < 160  # five standard deviations


def test_neighbours_are_torn_apart() -> None:
    images = permuted(10_007).astype(np.int64)
    assert abs(np.corrcoef(np.arange(10_007), images)[0, 1]) < 0.05
    assert (np.abs(np.diff(images)) == 1).mean() < 0.01


def test_the_numbers_are_fixed_for_all_times_and_machines() -> None:
    assert permuted(10, "fixed").tolist() == [5, 2, 3, 4, 6, 9, 1, 8, 0, 7]
    assert permutation.shuffle(6, permutation.derive_key("fixed")).tolist() == [2, 4, 0, 3, 5, 1]
