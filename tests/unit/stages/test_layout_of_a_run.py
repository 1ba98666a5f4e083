"""`parallel.layout: auto` from a configuration: where it is decided, shown, recorded and refused."""

import pytest

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.stages.dry_run import describe_jobs_of_new_run
from kftrain.stages.layouts import with_layout
from kftrain.stages.shard import shard

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
model: {dim: 1024, num_layers: 12, num_heads: 16}
task: {tokenizer: bytes, sequence_length: 1024}
precision: {compute: bf16}
train: {global_batch_size: 256, micro_batch_size: 4}
parallel: {layout: auto}
launch:
  backend: pytorchjob
  nodes: 2
  device_memory_gib: 80
  kubernetes: {gpus_per_node: 8, fabric: {kind: ethernet}}
"""


def sizes(resolved):
    parallel = resolved.parallel
    return parallel.strategy, parallel.exchange, parallel.replicate, parallel.shard, parallel.tensor


def test_sizes_stand_in_the_configuration_and_make_a_mesh_of_its_processes():
    resolved, table = with_layout(config.parse(TEXT))
    assert sizes(resolved) == ("zero1", "step", 2, 8, 1)
    assert resolved.parallel.shape(16).size == 16
    assert table[1].startswith("hybrid zero1 (replicate 2 shard 8): ") and table[1].endswith(": taken")
    assert config.parse(resolved.to_yaml()) == resolved  # as the run's folder keeps it


def test_a_run_that_goes_on_elsewhere_is_laid_out_anew():
    resolved, _ = with_layout(config.parse(TEXT))
    elsewhere = config.parse(resolved.to_yaml(), ["launch.nodes=1"])
    assert sizes(with_layout(elsewhere)[0]) == ("zero1", "step", 1, 8, 1)
    assert with_layout(elsewhere)[0].training_identity("d") == resolved.training_identity("d")


def test_rates_of_the_configuration_count():
    fast = config.parse(TEXT, ["launch.kubernetes.fabric.between_nodes_gbps=400"])
    assert sizes(with_layout(fast)[0]) == ("zero1", "step", 1, 16, 1)


def test_a_layout_that_is_given_stays():
    resolved = config.parse(TEXT, ["parallel.layout=given", "parallel.shard=4", "parallel.replicate=4"])
    assert with_layout(resolved) == (resolved, [])


def test_the_dry_run_shows_the_table():
    text = describe_jobs_of_new_run(config.parse(TEXT))
    assert "# layouts on 2 x 8 processes, 42.9 GB of state, 3.12 GB/s a node, 31.2 GB/s a process\n" in text
    assert "# hybrid zero1 (replicate 2 shard 8): " in text and ": not faster than the " in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.device_memory_gib=0", "launch.device_memory_gib: the memory of a GPU"),
        ("launch.device_memory_gib=0.001", "no layout fits; the least state, "),
        ("model.kind=vision_transformer", "built-in transformer only .*parallel.strategy to auto, which weighs any"),
        ("model.kind=my.module:Own", "built-in transformer only .*parallel.strategy to auto, which weighs any"),
    ],
)
def test_what_cannot_be_weighed_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        with_layout(config.parse(TEXT, [override]))


@pytest.mark.parametrize("other", ["parallel.context=2", "parallel.pipeline=2", "parallel.offload=true"])
def test_axes_that_auto_does_not_size_are_refused(other):
    with pytest.raises(ConfigError, match="layout must be given with "):
        config.parse(TEXT, [other, "parallel.strategy=fsdp"])


def test_a_micro_batch_that_is_measured_is_never_split():
    big = ["model.dim=4096", "model.num_layers=80", "train.global_batch_size=16", "train.micro_batch_size=auto"]
    resolved, table = with_layout(config.parse(TEXT, big))
    assert resolved.parallel.tensor == 1 and not any("tensor" in line for line in table)


def test_the_first_stage_says_and_keeps_what_was_taken(tmp_path):
    lines = []
    text = TEXT.replace('"s3://bucket/root"', str(tmp_path)).replace(
        '"http://mlflow:5000"', f'"sqlite:///{tmp_path}/m.db"'
    )
    local = ["launch.backend=local", "launch.nodes=1", "launch.processes_per_node=2", "data.source=missing/"]
    with pytest.raises(Exception, match="missing"):
        shard(config.parse(text, local), "r", progress=lines.append)
    assert any(line.startswith("zero1 (shard 2): ") and line.endswith(": taken") for line in lines)
    kept = config.parse((tmp_path / "runs" / "r" / "config.yaml").read_text())
    assert sizes(kept) == ("zero1", "step", 1, 2, 1)
