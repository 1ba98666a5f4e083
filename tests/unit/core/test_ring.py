"""The ring: servers hold about as much each, and hardly more keys move than must."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core.ring import Ring

pytestmark = pytest.mark.timeout(60)

NAMES = st.lists(st.text("abcdefgh0123456789.-", min_size=1, max_size=12), min_size=2, max_size=12, unique=True)


@settings(max_examples=25, deadline=None)
@given(names=NAMES, start=st.integers(-(2**62), 2**62), stride=st.integers(1, 2**20))
def test_balance_and_moved_keys(names, start, stride):
    keys = start + stride * np.arange(30_000)
    owners = Ring(names).find_owners(keys)
    assert np.bincount(owners, minlength=len(names)).max() / (len(keys) / len(names)) <= 1.15
    fewer = Ring(names[:-1]).find_owners(keys)
    moved = owners != fewer
    assert (owners[moved] == len(names) - 1).all(), "a key moved between servers that stay"
    assert moved.mean() <= 1.15 / len(names)


def test_the_order_of_the_names_decides_nothing():
    keys = np.arange(-5_000, 5_000)
    names = ["a", "b", "c"]
    forth, back = Ring(names).find_owners(keys), Ring(names[::-1]).find_owners(keys)
    assert np.array_equal(np.array(names)[forth], np.array(names[::-1])[back])
