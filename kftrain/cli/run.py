"""`kftrain run`: the pipeline that Kubeflow would run, compiled and run on this machine."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import click

from kftrain.cli.options import config_options, rehash_option, resume_option
from kftrain.client.console import echo
from kftrain.client.local_run import EndedRun, load_run, run_here
from kftrain.run.paths import RunPaths


@click.command("run")
@config_options
@rehash_option
@click.option(
    "--workdir", metavar="FOLDER", default=".", help="Relative paths start here; default: the current folder."
)
@resume_option
@click.option("--dry-run", is_flag=True, help="Print the jobs of training and evaluation, and do nothing.")
def run_command(
    config_file: tuple[str, ...], overrides: tuple[str, ...], workdir: str, resume: str, dry_run: bool
) -> None:
    """The whole pipeline on this machine: shard, train, evaluate, register.

    It is the very pipeline that `kftrain compile` writes, run by Kubeflow's own local runner.
    """
    from kftrain.stages import dry_run as dry_runs

    folder = Path(workdir).expanduser().resolve()
    config, resume_run = load_run(config_file, overrides, folder, resume)
    if dry_run:
        echo(dry_runs.describe_jobs_of_new_run(config, resume_run), nl=False)
        return
    if importlib.util.find_spec("kfp") is None:  # the pipeline's process could not say so any more
        raise ModuleNotFoundError("No module named 'kfp'", name="kfp")
    kept = (RunPaths.of(config.run.storage_root, resume_run).config,) if resume_run else ()
    _conclude(run_here(config, resume_run, folder, _build_command(config_file or kept, overrides, workdir)))


def _build_command(config_file: tuple[str, ...], overrides: tuple[str, ...], workdir: str) -> str:
    """Build the command line that starts such a run anew."""
    elsewhere = [] if workdir == "." else ["--workdir", workdir]
    configured = [f"--config={name}" for name in config_file] + [f"--set={pair}" for pair in overrides]
    return shlex.join(["kftrain", "run", *elsewhere, *configured])


def _conclude(ended: EndedRun) -> None:
    """Print the summary; exit with what stopped us, or with what the failed stage says."""
    from kftrain.cli import summary

    if ended.error is None:
        echo("\n".join(summary.success_lines(ended.run_uri)))
        return
    echo("\n".join(summary.failure_lines(ended.error, ended.situation)), err=True)
    echo(f"kftrain: error: {ended.error.line}", err=True)
    sys.exit(ended.stop_code or ended.error.exit_code)
