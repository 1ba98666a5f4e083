"""`kftrain shards | tokenizer`: what a dataset's shards hold, and a tokenizer by itself, which trainings may share."""

from __future__ import annotations

import json

import click

from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo


@click.group("shards")
def shards_command() -> None:
    """Look at the shards of a dataset. URI: its manifest.json, its folder, or a run."""


@shards_command.command("show")
@click.argument("uri")
@json_option
def show_shards_command(uri: str, as_json: bool) -> None:
    """Print what the shards hold."""
    from kftrain.data.shards import manifest
    from kftrain.tasks.run_dataset import find_manifest

    described = manifest.describe(manifest.read_manifest(find_manifest(uri)))
    if as_json:
        echo(json.dumps(described, indent=2))
        return
    for key in ("dataset_digest", "source", "task"):
        echo(f"{key:16}{described[key]}")
    for name, kind in described["fields"].items():
        echo(f"{'field':16}{name}: {kind}")
    for name, source in described["components"].items():
        echo(f"{'component':16}{name}: {source}")
    for name, split in described["splits"].items():
        echo(f"{name:16}" + ", ".join(f"{value:,} {key}" for key, value in split.items()))


@shards_command.command("verify")
@click.argument("uri")
@click.option("--quick", is_flag=True, help="Compare sizes only.")
@json_option
def verify_shards_command(uri: str, quick: bool, as_json: bool) -> None:
    """Compare every shard with the manifest, and its keys; exit code 11 names the first that is wrong.

    A dataset that lacks tables of digests, by which what is read of a remote shard verifies itself, gets them.
    """
    from kftrain.data.shards.block_tables import mend_tables
    from kftrain.data.shards.manifest import read_manifest
    from kftrain.data.shards.verify import check_listing, verify_keys, verify_shards
    from kftrain.sharding.unchanged import forget_if_damaged
    from kftrain.tasks.run_dataset import find_manifest

    manifest_uri = find_manifest(uri)
    manifest, num_tables = read_manifest(manifest_uri), 0
    with forget_if_damaged(manifest_uri, manifest):
        check_listing(manifest_uri, manifest)
        if not quick:
            try:
                manifest, num_tables = mend_tables(manifest_uri, manifest)
            except OSError as error:
                echo(f"the tables of digests that it lacks cannot be written: {error}", err=True)
            verify_shards(manifest_uri, manifest)
            verify_keys(manifest_uri, manifest)
    splits = manifest.splits
    result = {
        "manifest_uri": manifest_uri,
        "checked": "size" if quick else "sha256",
        "shards": sum(len(split.shards) for split in splits.values()),
        "bytes": sum(split.num_bytes for split in splits.values()),
        "tables_written": num_tables,
    }
    told = f"; {num_tables} tables of digests were missing, and are written" if num_tables else ""
    echo(json.dumps(result) if as_json else f"{result['shards']} shards are as the manifest says: {manifest_uri}{told}")


@shards_command.command("adopt")
@click.argument("uri")
@config_options
@json_option
def adopt_command(uri: str, config_file: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Make a dataset of WebDataset shards that others wrote, where they are: nothing is copied.

    URI: a .tar, a folder of them, or a pattern as shard-{000..012}.tar. Index and manifest go to the storage root.
    """
    from kftrain import config as configuration
    from kftrain.data.shards import manifest
    from kftrain.sharding.adopted.adopting import adopt as adopt_shards
    from kftrain.stages import resolve

    chosen = [*overrides, f"data.source={json.dumps(uri)}", "data.shards=adopt"]
    config = resolve.anchor_paths(configuration.load(config_file, chosen), ".")
    shards = adopt_shards(config, None, lambda line: echo(line, err=True))
    described = {"manifest_uri": shards.manifest_uri, **manifest.describe(shards.manifest)}
    echo(json.dumps(described, indent=2) if as_json else shards.manifest_uri)


@click.group("tokenizer")
def tokenizer_command() -> None:
    """Train a tokenizer."""


@tokenizer_command.command("train")
@config_options
@click.option("--out", metavar="URI", required=True, help="The tokenizer.json to write.")
@click.option("--vocab-size", type=int, help="Number of ids; without it, task.tokenizer.train.vocab_size.")
@json_option
def train_tokenizer_command(
    config_file: tuple[str, ...], overrides: tuple[str, ...], out: str, vocab_size: int | None, as_json: bool
) -> None:
    """Train a byte-level BPE on the training split of data.source, as the shard step does.

    Name the file in task.tokenizer.
    """
    from kftrain import config as configuration
    from kftrain.stages.tokenizer import train_tokenizer

    trained = train_tokenizer(configuration.load(config_file, overrides), out, vocab_size)
    text = f"{trained['uri']}: {trained['num_ids']:,} ids, {trained['bytes_per_token']:.2f} bytes of text per token"
    echo(json.dumps(trained) if as_json else text)
