"""How well training mixes its samples: the order against a full permutation of the same dataset.

    python benchmarks/shuffle_quality.py [--samples 1000000] [--batch 256] [--epochs 4]

Every figure is the mean over epochs; 1.00 is a full permutation where a ratio is shown.

    rank correlation    Spearman's, of place in the order and place in the dataset
    distance            between samples that follow each other in the order, over that in a full permutation
    neighbours          share of the pairs that follow each other and lie within 1024 places in the dataset
    batch spread        standard deviation of the batches' means of place / samples, over that of independent draws:
                        what a label that grows with the place (classes or dates in order) adds to a batch's noise
    again in a batch    pairs of a batch that share one in the next epoch, too, over a full permutation's

The last column is the CPU time that it takes to look up a batch, tables of windows included.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np

from kftrain.data.order import TrainingOrder

NEAR = 1024
WINDOWS = {
    "1024 x 64 (default)": (1024, 64),
    "256 x 256": (256, 256),
    "64 x 1024": (64, 1024),
    "64 x 4096": (64, 4096),
}


def full_permutation(num_samples: int) -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(0)
    return lambda epoch: generator.permutation(num_samples)


def ordered(num_samples: int, range_samples: int, window_ranges: int, batch: int) -> Callable[[int], np.ndarray]:
    order = TrainingOrder(num_samples, 0, range_samples, window_ranges)

    def epoch_of(epoch: int) -> np.ndarray:
        starts = range(epoch * num_samples, (epoch + 1) * num_samples, batch)
        stop = (epoch + 1) * num_samples
        return np.concatenate([order.locate(np.arange(start, min(start + batch, stop))) for start in starts])

    return epoch_of


def rank_correlation(samples: np.ndarray) -> float:
    return float(abs(np.corrcoef(np.arange(len(samples)), samples)[0, 1]))


def batch_spread(samples: np.ndarray, batch: int) -> float:
    whole = samples[: len(samples) // batch * batch].reshape(-1, batch) / len(samples)
    return float(whole.mean(axis=1).std() * np.sqrt(12 * batch))


def pairs_again(samples: np.ndarray, following: np.ndarray, batch: int) -> float:
    """Of the pairs that follow each other in a batch: share that is in one batch again, over the expected share."""
    batch_of = np.empty(len(samples), np.int64)
    batch_of[following] = np.arange(len(following)) // batch
    is_pair = np.arange(1, len(samples)) // batch == np.arange(len(samples) - 1) // batch
    together = (batch_of[samples[1:]] == batch_of[samples[:-1]])[is_pair].mean()
    return float(together / ((batch - 1) / (len(samples) - 1)))


def measured(epoch_of: Callable[[int], np.ndarray], num_epochs: int, batch: int) -> list[float]:
    start = time.process_time()
    epochs = [epoch_of(epoch) for epoch in range(num_epochs)]
    seconds = time.process_time() - start
    distances = [np.abs(np.diff(samples)) for samples in epochs]
    batches = sum(-(-len(samples) // batch) for samples in epochs)
    return [
        float(np.mean([rank_correlation(samples) for samples in epochs])),
        float(np.mean([distance.mean() / (len(distance) / 3) for distance in distances])),
        float(np.mean([(distance <= NEAR).mean() for distance in distances])),
        float(np.mean([batch_spread(samples, batch) for samples in epochs])),
        float(np.mean([pairs_again(*pair, batch) for pair in itertools.pairwise(epochs)])),
        1e6 * seconds / batches,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    orders = {name: ordered(arguments.samples, *sizes, arguments.batch) for name, sizes in WINDOWS.items()}
    orders["full permutation"] = full_permutation(arguments.samples)
    print(f"{arguments.samples:,} samples, batches of {arguments.batch}, {arguments.epochs} epochs\n")
    print(
        "| range x window | rank correlation | distance | neighbours | batch spread | again in a batch | us per batch |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, epoch_of in orders.items():
        correlation, distance, near, spread, again, cost = measured(epoch_of, arguments.epochs, arguments.batch)
        cells = f"{correlation:.4f} | {distance:.2f} | {near:.2%} | {spread:.2f} | {again:.1f} | {cost:.0f}"
        print(f"| {name} | {cells if name in WINDOWS else cells.rpartition(' | ')[0] + ' | '} |")


if __name__ == "__main__":
    main()
