"""The command line. Commands are imported when they are called, so that `kftrain --help` imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from kftrain import __version__
from kftrain.client.console import echo
from kftrain.core import outages
from kftrain.errors import BUG_CODE, ConfigError, InterruptedByUser, KftrainError, RetryableError, print_traceback
from kftrain.process import signals

EXTRAS = {
    **{"torch": "train", "safetensors": "train", "kfp": "kfp", "mlflow": "mlflow", "s3fs": "s3"},
    **{"kubernetes": "kubeflow", "kubeflow": "kubeflow"},
    **{"pyarrow": "sources", "PIL": "sources", "datasets": "sources", "tokenizers": "sources"},
}
"""Module of an optional dependency -> the extra of kftrain that installs it."""

COMMANDS = {
    "init": ("kftrain.cli.init", "Write a project: configuration, data, task, model, test."),
    "run": ("kftrain.cli.run", "The whole pipeline on this machine."),
    "compile": ("kftrain.cli.submit", "Write the pipeline as YAML for the Kubeflow UI."),
    "submit": ("kftrain.cli.submit", "Upload the pipeline to Kubeflow and start a run."),
    "schedule": ("kftrain.cli.schedule", "Recurring runs as files: apply, compare, pause, run now."),
    "shard": ("kftrain.cli.stages", "Start a run: check everything cheap, write the dataset's shards."),
    "train": ("kftrain.cli.stages", "Train the model of a run."),
    "evaluate": ("kftrain.cli.stages", "Measure the trained model of a run."),
    "register": ("kftrain.cli.stages", "Register the model of a run and promote it by policy."),
    "gate": ("kftrain.cli.stages", "Decide again whether a registered model becomes champion."),
    "shards": ("kftrain.cli.shards", "Look at the shards of a dataset."),
    "tokenizer": ("kftrain.cli.shards", "Train a tokenizer."),
    "checkpoints": ("kftrain.cli.checkpoints", "Look at the checkpoints of a run."),
    "models": ("kftrain.cli.models", "Compare, promote and roll back registered models."),
    "runs": ("kftrain.cli.jobs", "List runs: state, step, metric, champion."),
    "status": ("kftrain.cli.jobs", "Show the jobs on the cluster, or a run of this machine."),
    "logs": ("kftrain.cli.jobs", "Print what the workers of a run print."),
    "cancel": ("kftrain.cli.jobs", "End the jobs of a run after a commit."),
    "suspend": ("kftrain.cli.jobs", "Take the pods of a run away after a commit."),
    "unsuspend": ("kftrain.cli.jobs", "Let the suspended jobs of a run go on."),
    "scale": ("kftrain.cli.jobs", "Change the number of servers of a run at work."),
    "gc": ("kftrain.cli.jobs", "Delete jobs that nobody will take away."),
    "config": ("kftrain.cli.config", "Show the configuration and its schema."),
    "bandwidth": ("kftrain.cli.bandwidth", "Measure the network between the processes of a job."),
    "worker": ("kftrain.cli.worker", "One node of a job; started by a launcher."),
    "server": ("kftrain.cli.worker", "A parameter server of a job; started by a launcher."),
}
"""Command -> the module that defines it, and its line in the help."""

FORMER_NAMES = {"resume": "unsuspend"}
"""Name of a command in the release before -> its name now. The old name works for one release, with a line."""

RETRYING = frozenset(("run", "shard", "train", "evaluate", "register", "gate", "bandwidth", "worker", "server"))
"""Commands that ride out storage that is away; a person waits for the others."""


class LazyGroup(click.Group):
    """A group whose commands are imported only when they run; the help shows what stands in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands in the order in which a run uses them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by its name; None where there is none."""
        if cmd_name in FORMER_NAMES:
            now = FORMER_NAMES[cmd_name]
            echo(f"kftrain {cmd_name} is now called kftrain {now}; the next release knows only that", err=True)
            cmd_name = now
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kftrain")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Distributed training pipelines on Kubeflow that do not lose runs."""
    if ctx.invoked_subcommand not in RETRYING:
        ctx.with_resource(outages.retry_for(0))


def main(arguments: list[str] | None = None) -> None:
    """Run the `kftrain` program.

    An expected failure is one line on stderr and its exit code; a bug keeps its traceback. Asked to stop, it gives back
    what it holds, such as the turn to change a schedule.
    """
    try:
        with signals.handle_signals(signals.STOP, _exit), outages.explain_disk_errors(""):
            code = cli.main(arguments, prog_name="kftrain", standalone_mode=False)
    except KftrainError as error:
        fail(error.line, error.exit_code)
    except click.ClickException as error:
        fail_usage(error)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            fail_unexpectedly(error)
        fail(f"{error.name} is needed for this; pip install 'kftrain[{extra}]'", ConfigError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", InterruptedByUser.exit_code)
    except Exception as error:  # noqa: BLE001 - drivers of object stores raise what they like; the rest are bugs
        fail_unexpectedly(error)
    sys.exit(code if isinstance(code, int) else 0)


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(signals.to_shell_code(-number))


def fail(line: str, code: int) -> NoReturn:
    """End the program with one line."""
    echo(f"kftrain: error: {line}", err=True)
    sys.exit(code)


def fail_unexpectedly(error: Exception) -> NoReturn:
    """End the program: a store that refuses is one line, as where it is away; a bug has its traceback."""
    if outages.is_from_driver(error):
        what = f"{outages.UNREACHABLE}: {outages.one_line(error)}"
        refused = RetryableError(what, fix="check its address and the credentials")
        fail(refused.line, refused.exit_code)
    print_traceback(error)
    sys.exit(BUG_CODE)


def fail_usage(error: click.ClickException) -> NoReturn:
    """End the program for a wrong command line; a group that was called without a command shows its help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        fail(error.format_message(), error.exit_code)
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        sys.exit(error.exit_code)
    fail(f"{error.format_message()} Try: {context.command_path} --help", error.exit_code)
