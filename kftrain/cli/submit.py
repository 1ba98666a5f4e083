"""`kftrain compile | submit`: the pipeline as YAML for Kubeflow, and as a run on Kubeflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from kftrain.cli.options import Command, config_options, resume_option
from kftrain.client.compile import compile_with
from kftrain.client.console import echo
from kftrain.client.local_run import load_run
from kftrain.client.submit import build_submission, submit
from kftrain.errors import ConfigError
from kftrain.kubeflow.client import ENDPOINT_ENV, TOKEN_ENV, Connection, Pipelines
from kftrain.stages import preflight

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


def image_options(command: Command) -> Command:
    """Add the options of the steps' pods: their image, and what those that launch a job request while they watch it."""
    for option in (
        click.option("--launcher-memory", metavar="QUANTITY", help="Their memory request; default: 512Mi."),
        click.option("--launcher-cpu", metavar="QUANTITY", help="CPU request of train and evaluate; default: 100m."),
        click.option("--steps-image", help="Image of the steps; default: the one of this version."),
    ):
        command = option(command)
    return command


@click.command("compile")
@click.option("-o", "--output", default="pipeline.yaml", show_default=True, help="File to write; - for stdout.")
@image_options
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

        if k8s_manifest:
            text = manifests(names["namespace"], names["pipeline_name"], names["version_name"])
        else:
            text = compiled(pipeline)
    how = ", or with `kftrain submit`" if pipeline == "train" else ""
    _write_pipeline(text, output, "kubectl apply -f it" if k8s_manifest else f"upload it in the Kubeflow UI{how}")
    if k8s_manifest:
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


def _write_pipeline(text: str, output: str, then: str) -> None:
    if output == "-":
        echo(text, nl=False)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write the pipeline: {error}", where="--output", value=output) from error
    echo(f"wrote {output}: {then}")


def connection_options(command: Command) -> Command:
    """Add the options that say where Kubeflow Pipelines is, and as whom to talk to it."""
    for option in (
        click.option(
            "--ca-file",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            help="Certificates to trust; default: the public ones.",
        ),
        click.option(
            "--existing-token-env",
            metavar="VARIABLE",
            default=TOKEN_ENV,
            show_default=True,
            help="The environment variable with a bearer token, if one is needed.",
        ),
        click.option("--namespace", default="", help="Yours, on a multi-user installation."),
        click.option("--host", metavar="URL", envvar=ENDPOINT_ENV, help="Kubeflow Pipelines, its UI or its API."),
    ):
        command = option(command)
    return command


@click.command("submit")
@config_options
@connection_options
@click.option("--experiment", default="", help="Of Kubeflow; default: named as that of MLflow.")
@click.option("--name", "run_name", default="", help="What the UI calls the run; default: its name and the time.")
@resume_option
@image_options
@click.option("--wait", is_flag=True, help="Follow the run; exit 0 only if it succeeds.")
@click.option("--timeout-seconds", type=click.FloatRange(min=0, min_open=True), help="Give up waiting after this.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
def submit_command(
    config_file: tuple[str, ...],
    overrides: tuple[str, ...],
    experiment: str,
    run_name: str,
    resume: str,
    steps_image: str | None,
    launcher_cpu: str | None,
    launcher_memory: str | None,
    wait: bool,
    timeout_seconds: float | None,
    dry_run: bool,
    **connection: Any,
) -> None:
    """Upload the pipeline to Kubeflow and start a run: its id and its URL go to stdout."""
    if timeout_seconds and not wait:
        raise click.UsageError("--timeout-seconds needs --wait.")
    if not (connection["host"] or dry_run):
        raise click.UsageError("Missing option '--host'.")
    config, resume_run = load_run(config_file, overrides, Path.cwd(), resume)
    preflight.require_remote(config)
    submission = build_submission(
        config,
        resume_run,
        connection["host"] or "",
        experiment,
        run_name,
        steps_image=steps_image,
        launcher_cpu=launcher_cpu,
        launcher_memory=launcher_memory,
    )
    if dry_run:
        echo(submission.to_yaml(), nl=False)
        return
    submitted = submit(Pipelines(Connection(**connection)), submission, config, resume_run)
    echo(f"{submitted.id}\n{submitted.url}")
    echo(f"its folder will be {submitted.run_uri}", err=True)
    if wait:
        echo(submitted.wait(timeout_seconds), err=True)
