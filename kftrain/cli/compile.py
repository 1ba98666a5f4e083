"""`kftrain compile`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kftrain.errors import ConfigError


@click.command("compile")
@click.option("-o", "--output", default="pipeline.yaml", show_default=True, help="File to write; - for stdout.")
@click.option("--steps-image", help="Image of the steps; default: the one of this version.")
def compile_command(output: str, steps_image: str | None) -> None:
    """Write the pipeline as YAML: upload it in the Kubeflow UI."""
    if steps_image:
        os.environ["KFTRAIN_STEPS_IMAGE"] = steps_image  # read when the components are defined, which is now
    from kftrain.pipelines.compile import compiled

    text = str(compiled())
    if output == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write the pipeline: {error}", where="--output", value=output) from error
    click.echo(f"wrote {output}: upload it in the Kubeflow UI, or with kfp pipeline create")
