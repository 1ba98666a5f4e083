"""How well training mixes its samples: the order against a full permutation of the same dataset.

    python benchmarks/shuffle_quality.py [--samples 1000000] [--batch 256] [--ranks 8] [--epochs 4]

Order 2 has no lanes. Every figure is the mean over epochs; 1.00 is a full permutation where a ratio is shown.

    rank correlation    Spearman's, of place in the order and place in the dataset
    distance            between samples that follow each other in the order, over that in a full permutation
    neighbours          share of the pairs that follow each other and lie within 1024 places in the dataset: with lanes
                        these are mostly of one lane, and so of one range
    near in a batch     the same share of all pairs of a batch, which is what a step sees: nobody sees it in an order
    batch spread        standard deviation of the batches' means of place / samples, over that of independent draws:
                        what a label that grows with the place (classes or dates in order) adds to a batch's noise
    a rank's spread     the same for the part of the first of so many ranks: its gradient, or statistics of its own
    again in a batch    pairs of a batch that share one in the next epoch, too, over a full permutation's

The last column is the CPU time that it takes to look up a batch, tables of windows included. Below stands that of a
batch of 64, of both orders in turns: the least of five passes over all samples.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np

from kftrain.data.lanes import Lanes
from kftrain.data.order import BatchPlan, TrainingOrder

NEAR = 1024
LANES = 64
WINDOWS = {
    "1024 x 64 (default)": (1024, 64),
    "256 x 256": (256, 256),
    "64 x 1024": (64, 1024),
    "64 x 4096": (64, 4096),
}
COLUMNS = (
    *("rank correlation", "distance", "neighbours", "near in a batch", "batch spread", "a rank's spread"),
    *("again in a batch", "us per batch"),
)


def full_permutation(num_samples: int) -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(0)
    return lambda epoch: generator.permutation(num_samples)


def make_order(num_samples: int, sizes: tuple[int, int], batch: int, num_lanes: int) -> TrainingOrder:
    lanes = Lanes(num_lanes, batch, sizes[0]) if num_lanes else None
    return TrainingOrder(num_samples, 0, *sizes, lanes=lanes)


def ordered(order: TrainingOrder, batch: int) -> Callable[[int], np.ndarray]:
    def epoch_of(epoch: int) -> np.ndarray:
        starts = range(epoch * order.num_samples, (epoch + 1) * order.num_samples, batch)
        stop = (epoch + 1) * order.num_samples
        return np.concatenate([order.locate(np.arange(start, min(start + batch, stop))) for start in starts])

    return epoch_of


def rank_correlation(samples: np.ndarray) -> float:
    return float(abs(np.corrcoef(np.arange(len(samples)), samples)[0, 1]))


def batches_of(samples: np.ndarray, batch: int) -> np.ndarray:
    return samples[: len(samples) // batch * batch].reshape(-1, batch)


def spread(samples: np.ndarray, batch: int, part: int) -> float:
    """The spread of the means of the first `part` samples of each batch."""
    means = batches_of(samples, batch)[:, :part].mean(axis=1) / len(samples)
    return float(means.std() * np.sqrt(12 * part))


def near_in_a_batch(samples: np.ndarray, batch: int) -> float:
    rows = np.sort(batches_of(samples, batch), axis=1)
    pairs = sum(int(np.searchsorted(row, row + NEAR, side="right").sum()) for row in rows)  # with itself and before
    near = pairs - len(rows) * batch * (batch + 1) // 2
    return float(near / (len(rows) * batch * (batch - 1) / 2))


def pairs_again(samples: np.ndarray, following: np.ndarray, batch: int) -> float:
    """Of all pairs of a batch: share that is in one batch again, over the expected share."""
    batch_of = np.empty(len(samples), np.int64)
    batch_of[following] = np.arange(len(following)) // batch
    rows = batch_of[batches_of(samples, batch)]
    keys = rows + len(samples) * np.arange(len(rows))[:, None]
    counts = np.unique(keys, return_counts=True)[1]
    together = (counts * (counts - 1)).sum() / (rows.size * (batch - 1))
    return float(together / ((batch - 1) / (len(samples) - 1)))


def measured(epoch_of: Callable[[int], np.ndarray], num_epochs: int, batch: int, num_ranks: int) -> list[str]:
    start = time.process_time()
    epochs = [epoch_of(epoch) for epoch in range(num_epochs)]
    seconds = time.process_time() - start
    distances = [np.abs(np.diff(samples)) for samples in epochs]
    batches = sum(-(-len(samples) // batch) for samples in epochs)
    part = BatchPlan(batch, num_ranks).share(0)[1]
    return [
        f"{np.mean([rank_correlation(samples) for samples in epochs]):.4f}",
        f"{np.mean([distance.mean() / (len(distance) / 3) for distance in distances]):.2f}",
        f"{np.mean([(distance <= NEAR).mean() for distance in distances]):.2%}",
        f"{np.mean([near_in_a_batch(samples, batch) for samples in epochs]):.2%}",
        f"{np.mean([spread(samples, batch, batch) for samples in epochs]):.2f}",
        f"{np.mean([spread(samples, batch, part) for samples in epochs]):.2f}",
        f"{np.mean([pairs_again(*pair, batch) for pair in itertools.pairwise(epochs)]):.2f}",
        f"{1e6 * seconds / batches:.0f}",
    ]


def compare_lookups(num_samples: int, batch: int = 64, rounds: int = 5) -> tuple[float, float]:
    """Return the microseconds that looking up a batch costs in order 2 and in order 3, both in the same run."""
    least = [np.inf, np.inf]
    for _, (number, num_lanes) in itertools.product(range(rounds), enumerate((0, LANES))):
        order = make_order(num_samples, WINDOWS["1024 x 64 (default)"], batch, num_lanes)
        start = time.process_time()
        for first in range(0, num_samples - batch, batch):
            order.locate(np.arange(first, first + batch))
        least[number] = min(least[number], 1e6 * (time.process_time() - start) / (num_samples // batch))
    return least[0], least[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    samples, batch = arguments.samples, arguments.batch
    orders = {}
    for (name, sizes), num_lanes in itertools.product(WINDOWS.items(), (0, LANES)):
        order = make_order(samples, sizes, batch, num_lanes)
        orders[f"{name}, {f'{num_lanes} lanes' if num_lanes else 'order 2'}"] = ordered(order, batch)
    orders["full permutation"] = full_permutation(samples)
    print(f"{samples:,} samples, batches of {batch} over {arguments.ranks} ranks, {arguments.epochs} epochs\n")
    print(f"| range x window | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name, epoch_of in orders.items():
        print(f"| {name} | {' | '.join(measured(epoch_of, arguments.epochs, batch, arguments.ranks))} |", flush=True)
    before, now = compare_lookups(samples)
    print(f"\na batch of 64: {before:.1f} us in order 2, {now:.1f} us with lanes: {now / before:.2f}")


if __name__ == "__main__":
    main()
