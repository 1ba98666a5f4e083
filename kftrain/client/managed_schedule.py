"""A schedule's file beside the Kubeflow that runs it: applied, compared, paused, and run by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kftrain.client.console import echo
from kftrain.client.submit import SubmittedRun, build_submission, submit, upload
from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.kubeflow.client import Pipelines
from kftrain.kubeflow.submission import Submission
from kftrain.run.best_effort import best_effort
from kftrain.run.paths import RunPaths
from kftrain.schedule import cron
from kftrain.schedule.apply import Executor
from kftrain.schedule.plan import Change, Content, Recurring, Wanted, list_changes
from kftrain.schedule.spec import Schedule
from kftrain.schedule.state import History
from kftrain.schedule.turn import Turn
from kftrain.stages import firing, resolve
from kftrain.tracking.runs import find_git_commit


@dataclass(frozen=True)
class ManagedSchedule:
    """A schedule as its file says it, and the installation of Kubeflow in which it is to be. Methods raise LaunchError.

    `executor` changes what is there, `history` is what the storage root knows of its runs and pauses.
    """

    schedule: Schedule
    pipelines: Pipelines

    @property
    def name(self) -> str:
        """Name of the schedule."""
        return self.schedule.name

    @property
    def history(self) -> History:
        """The schedule's documents in the storage root."""
        return History.of(self.schedule.config.run.storage_root, self.name)

    @property
    def executor(self) -> Executor:
        """Carries out changes in Kubeflow, and prints each to stderr."""

        def progress(line: str) -> None:
            echo(line, err=True)

        turn = Turn.of(self.schedule.config.run.storage_root, self.name, progress)
        return Executor(self.pipelines, self.name, turn, progress)

    def apply(self, wait_seconds: float) -> list[str]:
        """Make the recurring run what the file says; return the ids of old ones that stay because runs of theirs live.

        Args:
            wait_seconds: Time for which such runs are waited for.
        """
        submission, history = self._build_submission(self.schedule.config), self.history
        pipeline_id, _, uploaded = upload(self.pipelines, submission)
        if uploaded:
            echo(f"version {submission.version} uploaded", err=True)
        content = self._build_content(submission, pipeline_id, self.pipelines.ensure_experiment(submission.experiment))
        return self.executor.converge(lambda: Wanted(content, history.read_pause() is None), wait_seconds)

    def compare(self, listed: Sequence[Recurring]) -> list[Change]:
        """Compare the recurring runs of its name with the file, the newest version of the pipeline too."""
        submission = self._build_submission(self.schedule.config)
        pipeline_id, experiment_id = self.pipelines.find_ids(submission.pipeline, submission.experiment)
        content = self._build_content(submission, pipeline_id, experiment_id)
        changes = list_changes(Wanted(content, enabled=self.history.read_pause() is None), listed)
        newest = self.pipelines.read_latest_version(pipeline_id) if pipeline_id else ""
        if newest != submission.version:
            changes.append(Change("pipeline version", newest, submission.version))
        return changes

    def start_run(self, trigger: str, instant: str = "") -> SubmittedRun:
        """Start a run by hand, `manual` or a `backfill`; the latter promotes nothing."""
        config = self.schedule.config
        section = config.schedule.model_copy(update={"trigger": trigger, "instant": instant})
        changed: dict[str, Any] = {"schedule": section}
        if trigger == "backfill":
            changed["registry"] = config.registry.model_copy(update={"promotion": "never"})
        config = config.model_copy(update=changed)
        resolve.require_run_id(f"{config.run.name}-{'0' * resolve.JOB_ID_CHARACTERS}")
        name = f"{self.name}-{instant or trigger + time.strftime('-%Y%m%d-%H%M%S')}"
        return submit(self.pipelines, self._build_submission(config, name), config, "")

    def _build_submission(self, config: Config, run_name: str = "") -> Submission:
        file, host = self.schedule.file, self.pipelines.host
        return build_submission(config, "", host, file.experiment, run_name, steps_image=file.steps_image or None)

    def _build_content(self, submission: Submission, pipeline_id: str, experiment_id: str) -> Content:
        file = self.schedule.file
        return Content(
            name=self.name,
            cron=str(
                cron.convert_to_utc(
                    cron.parse_cron(file.cron), cron.load_zone(file.time_zone), datetime.now(timezone.utc)
                )
            ),
            pipeline_id=pipeline_id,
            experiment_id=experiment_id,
            parameters=dict(submission.parameters),
            service_account=file.service_account,
            description=f"managed by kftrain schedule: {self.schedule.where}, commit {find_git_commit() or 'unknown'}",
        )


def follow_scheduled(submitted: SubmittedRun) -> str:
    """Follow a run of a schedule; return how it ended, in words.

    Raises LaunchError where it failed, or did nothing because another one was at work.
    """
    line, skipped = submitted.wait(), None
    with best_effort("whether the run had nothing to do is not known"):
        skipped = firing.read_skipped(RunPaths(submitted.run_uri))
    line = f"nothing to do: {skipped.line}" if skipped is not None else line
    if skipped is not None and skipped.why == "overlap":
        raise LaunchError(line, where=submitted.url, fix="start it again when that one has ended")
    return line
