"""`kftrain compile`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from kftrain.cli.options import Command
from kftrain.client.compile import compile_with
from kftrain.client.console import echo
from kftrain.errors import ConfigError

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
KUBERNETES_NAMES = {
    "namespace": LABEL,
    "pipeline_name": rf"(?=.{{1,200}}$){LABEL}(\.{LABEL})*",
    "version_name": rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*",
}
"""Option -> pattern of its names: a DNS-1123 label or subdomain. A version's name has the pipeline's in it."""

NEEDS_NATIVE_STORE = (
    "an API server without --pipelinesStoreKubernetes, which a stock installation is, accepts these resources and "
    "ignores them: there use `kftrain submit`"
)


def launcher_options(command: Command) -> Command:
    """Add the options with what the steps that launch a job request, while they watch it."""
    cpu = click.option("--launcher-cpu", metavar="QUANTITY", help="CPU request of train and evaluate; default: 100m.")
    memory = click.option("--launcher-memory", metavar="QUANTITY", help="Their memory request; default: 512Mi.")
    return cpu(memory(command))


@click.command("compile")
@click.option("-o", "--output", default="pipeline.yaml", show_default=True, help="File to write; - for stdout.")
@click.option("--steps-image", help="Image of the steps; default: the one of this version.")
@launcher_options
@click.option(
    "--pipeline",
    type=click.Choice(["train", "promote"]),
    default="train",
    show_default=True,
    help="Which; promote is for people who decide in the Kubeflow UI.",
)
@click.option("--k8s-manifest", is_flag=True, help="Write the resources Pipeline and PipelineVersion, for kubectl.")
@click.option("--namespace", default="", help="Their namespace; default: kubectl's.")
@click.option("--pipeline-name", default="", help="Name of the Pipeline; default: kftrain-train.")
@click.option("--version-name", default="", help="Name of the PipelineVersion; default: release and digest.")
def compile_command(
    output: str,
    steps_image: str | None,
    launcher_cpu: str | None,
    launcher_memory: str | None,
    pipeline: str,
    k8s_manifest: bool,
    **names: str,
) -> None:
    """Write the pipeline as YAML: upload it in the Kubeflow UI."""
    if k8s_manifest and pipeline != "train":
        raise click.UsageError("--k8s-manifest is of the pipeline train alone.")
    for name, value in names.items():
        if value:
            _require_usable(name, value, k8s_manifest)
    with compile_with(steps_image, launcher_cpu, launcher_memory):
        from kftrain.pipelines.compile import compiled, manifests

        if not k8s_manifest:
            how = ", or with `kftrain submit`" if pipeline == "train" else ""
            _write(compiled(pipeline), output, f"upload it in the Kubeflow UI{how}")
            return
        text = manifests(names["namespace"], names["pipeline_name"], names["version_name"])
    _write(text, output, "kubectl apply -f it")
    echo(NEEDS_NATIVE_STORE, err=True)


def _require_usable(name: str, value: str, k8s_manifest: bool) -> None:
    option = f"--{name.replace('_', '-')}"
    if not k8s_manifest:
        raise click.UsageError(f"{option} needs --k8s-manifest.")
    if not re.fullmatch(KUBERNETES_NAMES[name], value):
        raise ConfigError(
            "not a name that Kubernetes takes",
            where=option,
            value=value,
            fix="use lower-case letters, digits and dashes",
        )


def _write(text: str, output: str, then: str) -> None:
    if output == "-":
        echo(text, nl=False)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write the pipeline: {error}", where="--output", value=output) from error
    echo(f"wrote {output}: {then}")
