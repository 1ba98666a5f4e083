import math
import zlib
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.tasks.compression import compression_baselines, order2_probabilities


class AdaptiveModel:
    """The same model as a decoder would run it: one byte at a time, from counts of what it has already decoded."""

    def __init__(self):
        self.counts = defaultdict(Counter)
        self.history = []

    def contexts(self):
        padded = ["start", "start", *self.history]
        return [(), (padded[-1],), tuple(padded[-2:])]

    def distribution(self):
        probabilities = np.full(256, 1 / 256)
        for context in self.contexts():
            counts = self.counts[context]
            if counts:
                seen = np.array([counts[symbol] for symbol in range(256)])
                probabilities = (seen + len(counts) * probabilities) / (seen.sum() + len(counts))
        return probabilities

    def update(self, symbol):
        for context in self.contexts():
            self.counts[context][symbol] += 1
        self.history.append(symbol)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(b"ab\x00\xff"), max_size=60).map(bytes) | st.binary(max_size=60))
def test_the_probabilities_are_those_of_a_decoder_that_knows_only_the_past(data):
    decoder, expected = AdaptiveModel(), []
    for symbol in data:
        expected.append(decoder.distribution()[symbol])
        decoder.update(symbol)
    np.testing.assert_allclose(order2_probabilities(data), expected, rtol=1e-12)


@pytest.mark.parametrize("prefix", [b"", b"a", b"abab", b"the cat sat on the mat; the cat"])
def test_the_probabilities_of_all_next_bytes_sum_to_one(prefix):
    total = sum(order2_probabilities(prefix + bytes([symbol]))[-1] for symbol in range(256))
    assert total == pytest.approx(1, abs=1e-12)


def test_random_bytes_do_not_compress_and_repetition_does():
    noise = np.random.default_rng(0).bytes(20_000)
    assert 8 <= compression_baselines(noise)["order-2 context model"] < 9
    assert compression_baselines(b"ab" * 10_000)["order-2 context model"] < 0.01


def test_the_figures_are_bits_per_byte():
    data = b"def f(x):\n    return x + 1\n" * 5
    figures = compression_baselines(data)
    assert figures["zlib -9"] == 8 * len(zlib.compress(data, 9)) / len(data)
    expected = -sum(math.log2(p) for p in order2_probabilities(data)) / len(data)
    assert figures["order-2 context model"] == pytest.approx(expected)


def test_no_data_has_no_figures():
    assert compression_baselines(b"") == {}
