"""Sizes the axes of a run with `parallel.layout: auto`, by its machines and its model, before anything is started."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.errors import ConfigError
from kftrain.launch.kubernetes.fabric import choose_rates
from kftrain.launch.spec import count_processes_per_node
from kftrain.models.signature import options_of, splits_of
from kftrain.models.sizes import count_parameters
from kftrain.parallel.layout import Machines, Work, choose_layout, describe_layouts
from kftrain.tasks import build_task

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float8": 2}
BYTES_PER_GIGABIT = 1e9 / 8
MODEL = "transformer"
"""Kind of model whose sizes are known without building it."""


def with_layout(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with sizes in place of `parallel.layout: auto`, and the table of what there was.

    Sizes of an earlier launch are not kept. Raises ConfigError where none fits, or where sizes are not known.
    """
    if config.parallel.layout != "auto":
        return config, []
    machines, work = _describe_machines(config), _describe_work(config)
    candidates = choose_layout(machines, work)
    first, shape = candidates[0], candidates[0].shape
    if first.why_not:
        least = min(candidates, key=lambda candidate: candidate.state_bytes)
        what = f"no layout fits; the least state, {least.state_bytes / 1e9:.3g} GB, has {least.name}: {least.why_not}"
        fix = "use more or larger devices, smaller micro batches, or bf16"
        raise ConfigError(what, where="parallel.layout", value="auto", fix=fix)
    sizes = {"replicate": shape.replicate, "shard": shape.shard, "tensor": shape.tensor}
    changes = {**sizes, "strategy": first.strategy, "exchange": first.exchange, "reshard_after_forward": True}
    parallel = config.parallel.model_copy(update=changes)
    return config.model_copy(update={"parallel": parallel}), describe_layouts(candidates, machines)


def _describe_machines(config: Config) -> Machines:
    launch, fabric = config.launch, config.launch.kubernetes.fabric
    if not launch.device_memory_gib:
        what = "the memory of a GPU, or of a process without one, is not known"
        raise ConfigError(what, where="launch.device_memory_gib", value=0, fix="set it for parallel.layout: auto")
    between, within = (rate * BYTES_PER_GIGABIT for rate in choose_rates(fabric))
    memory_bytes = launch.device_memory_gib * 2**30
    return Machines(launch.nodes, count_processes_per_node(config), memory_bytes, between, within)


def _describe_work(config: Config) -> Work:
    if config.model.kind != MODEL:
        what = f"auto knows the sizes of the built-in {MODEL} only"
        fix = "set parallel.layout to given and parallel.strategy to auto, which weighs any model once it is built"
        raise ConfigError(what, where="parallel.layout", value=config.model.kind, fix=fix)
    arguments = build_task(config.task).model_arguments()
    options, splits = {**options_of(config.model), **arguments}, splits_of(config.model, arguments)
    length = splits.pop("sequence_length")
    splits.pop("num_layers")
    divided = [*splits.values(), *([length] if config.parallel.sequence_parallel else [])]
    is_split = config.train.micro_batch_size != "auto"  # which measures the whole model
    largest = min(divided) if is_split else 1
    return Work(
        num_parameters=count_parameters(options),
        num_layers=options["num_layers"],
        num_features=options["dim"] * (4 * options["num_layers"] + 2),
        places_of_row=length,
        batch_rows=config.train.batch_sizes.sizes[0],
        micro_batch_rows=config.train.most_micro_rows,
        compute_bytes=ITEM_BYTES[config.precision.compute],
        reduce_bytes=ITEM_BYTES[config.precision.reduce],
        tensor_sizes=tuple(n for n in range(1, largest + 1) if all(size % n == 0 for size in divided)),
    )
