"""`kftrain tokenizer`: a tokenizer by itself, to be named by the trainings that share it."""

from __future__ import annotations

import json

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo


@click.group("tokenizer")
def tokenizer_command() -> None:
    """Train a tokenizer."""


@tokenizer_command.command()
@config_options
@click.option("--out", metavar="URI", required=True, help="The tokenizer.json to write.")
@click.option("--vocab-size", type=int, help="Number of ids; without it, task.tokenizer.train.vocab_size.")
@json_option
def train(
    config_file: tuple[str, ...], overrides: tuple[str, ...], out: str, vocab_size: int | None, as_json: bool
) -> None:
    """Train a byte-level BPE on the training split of data.source, as the shard step does.

    Name the file in task.tokenizer.
    """
    from kftrain.stages.tokenizer import train_tokenizer

    trained = train_tokenizer(configuration.load(config_file, overrides), out, vocab_size)
    if as_json:
        echo(json.dumps(trained))
        return
    echo(f"{trained['uri']}: {trained['num_ids']:,} ids, {trained['bytes_per_token']:.2f} bytes of text per token")
