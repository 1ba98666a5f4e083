"""`kftrain shards`: what a dataset's shards hold, and whether they still do."""

from __future__ import annotations

import json

import click

from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo


@click.group("shards")
def shards_command() -> None:
    """Look at the shards of a dataset. URI: its manifest.json, its folder, or a run."""


@shards_command.command()
@click.argument("uri")
@json_option
def show(uri: str, as_json: bool) -> None:
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


@shards_command.command()
@click.argument("uri")
@click.option("--quick", is_flag=True, help="Compare sizes only.")
@json_option
def verify(uri: str, quick: bool, as_json: bool) -> None:
    """Compare every shard with the manifest, and its keys; exit code 11 names the first that is wrong."""
    from kftrain.data.shards.manifest import read_manifest
    from kftrain.data.shards.verify import verify_keys, verify_shards
    from kftrain.tasks.run_dataset import find_manifest

    found = find_manifest(uri)
    manifest = read_manifest(found)
    verify_shards(found, manifest, "size" if quick else "sha256")
    if not quick:
        verify_keys(found, manifest)
    splits = manifest.splits
    result = {
        "manifest_uri": found,
        "checked": "size" if quick else "sha256",
        "shards": sum(len(split.shards) for split in splits.values()),
        "bytes": sum(split.num_bytes for split in splits.values()),
    }
    echo(json.dumps(result) if as_json else f"{result['shards']} shards are as the manifest says: {found}")


@shards_command.command()
@click.argument("uri")
@config_options
@json_option
def adopt(uri: str, config_file: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Make a dataset of WebDataset shards that others wrote, where they are: nothing is copied.

    URI: a .tar, a folder of them, or a pattern as shard-{000..012}.tar. Index and manifest go to the storage root.
    """
    from kftrain import config as configuration
    from kftrain.data.shards import manifest
    from kftrain.sharding.adopted.adopting import adopt as adopt_shards
    from kftrain.stages import resolve

    chosen = [*overrides, f"data.source={json.dumps(uri)}", "data.shards=adopt"]
    found = adopt_shards(
        resolve.anchor_paths(configuration.load(config_file, chosen), "."), None, lambda line: echo(line, err=True)
    )
    described = {"manifest_uri": found.manifest_uri, **manifest.describe(found.manifest)}
    echo(json.dumps(described, indent=2) if as_json else found.manifest_uri)
