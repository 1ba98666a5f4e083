"""The training split of a dataset, or of the datasets of a mixture, and the order in which it is seen."""

from __future__ import annotations

import functools

from kftrain.config import Config
from kftrain.data.conversion import Conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.lanes import Lanes
from kftrain.data.length_groups import LengthGroups
from kftrain.data.mixture import Concatenated, MixtureOrder, MixturePhases, Phase
from kftrain.data.order import Order, TrainingOrder
from kftrain.data.read_ahead import StoredSamples
from kftrain.data.schema import Window
from kftrain.data.shards.manifest import Manifest
from kftrain.data.shards.verified import Uses
from kftrain.data.windows import TokenWindows, cut_windows
from kftrain.errors import DataError


def open_training_split(
    manifest_uri: str,
    manifest: Manifest,
    config: Config,
    window: Window | None = None,
    uses: Uses | None = None,
    conversion: Conversion | None = None,
) -> tuple[StoredSamples, Order]:
    """Open what training reads, by number, and the order of numbers.

    `uses`: where is said which shards are read.

    `window`: how a stream is cut into samples. `conversion`: of adopted ones.

    Raises DataError where the shards are not those of the configuration's mixture.
    """
    names = [component.name for component in manifest.components]
    if names != [component.name for component in config.data.components]:
        raise DataError(
            "the shards are not of this mixture", where=manifest_uri, value=names, fix="run the shard step again"
        )
    datasets = [
        ShardedDataset(manifest_uri, component, "train", uses, conversion)
        for component in manifest.split_by_component()
    ]
    parts = [cut_windows(dataset, window) for dataset in datasets]
    phases = MixturePhases(phases_of(config)) if names else None
    orders = [_order_of(part, config, number, phases) for number, part in enumerate(parts)]
    for part, order in zip(parts, orders, strict=True):
        part.expect_window(order.window_ranges, order.range_samples)
    if phases is None:
        return parts[0], orders[0]
    return Concatenated(parts), MixtureOrder(orders, phases)


def phases_of(config: Config) -> list[Phase]:
    """Return the weights of a mixture from position to position."""
    first_steps = [0, *(phase.first_step for phase in config.data.mixture_phases)]
    positions = [config.train.batch_sizes.count_samples(step) for step in first_steps]
    return [Phase(*phase) for phase in zip(positions, config.data.mixture_weights(), strict=True)]


def _order_of(
    dataset: ShardedDataset | TokenWindows, config: Config, number: int, phases: MixturePhases | None
) -> TrainingOrder:
    data, batch = config.data, config.train.global_batch_size
    groups = LengthGroups(dataset.sample_bytes, batch, data.length_group_batches) if data.length_group_batches else None
    lanes = None
    if data.order > 2:
        positions = functools.partial(phases.find_positions, number) if phases else None
        lanes = Lanes(data.lanes, batch, data.shuffle_range_samples, positions)
    name = data.components[number].name if phases else ""
    sizes = (data.shuffle_range_samples, data.shuffle_window_ranges)
    return TrainingOrder(dataset.num_samples, config.run.seed, *sizes, name, groups, lanes)
