"""The training split of a dataset, or of the datasets of a mixture, and the order in which it is seen."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.data.conversion import Conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Samples
from kftrain.data.length_groups import LengthGroups
from kftrain.data.mixture import Concatenated, MixtureOrder, Phase
from kftrain.data.order import Order, TrainingOrder
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
) -> tuple[Samples, Order]:
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
    orders = [_order_of(part, config, name) for part, name in zip(parts, names or [""], strict=True)]
    for part, order in zip(parts, orders, strict=True):
        part.expect_window(order.window_ranges, order.range_samples)
    if not names:
        return parts[0], orders[0]
    return Concatenated(parts), MixtureOrder(orders, phases_of(config))


def phases_of(config: Config) -> list[Phase]:
    """Return the weights of a mixture from position to position."""
    first_steps = [0, *(phase.first_step for phase in config.data.mixture_phases)]
    positions = [step * config.train.global_batch_size for step in first_steps]
    return [Phase(*phase) for phase in zip(positions, config.data.mixture_weights(), strict=True)]


def _order_of(dataset: ShardedDataset | TokenWindows, config: Config, name: str) -> TrainingOrder:
    data, seed = config.data, config.run.seed
    groups = None
    if data.length_group_batches:
        groups = LengthGroups(dataset.sample_bytes, config.train.global_batch_size, data.length_group_batches)
    sizes = (data.shuffle_range_samples, data.shuffle_window_ranges)
    return TrainingOrder(dataset.num_samples, seed, *sizes, name, groups)
