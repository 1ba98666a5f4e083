"""Requests about Kubeflow's recurring runs through kfp's client: to list, create, enable, disable and delete them.

A recurring run names its pipeline by id without a version, which kfp's own convenience methods refuse: then each run
has the newest version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kftrain.errors import ConfigError
from kftrain.kubeflow.client import (
    EQUALS,
    NOT_FOUND,
    READ_TIMEOUT_SECONDS,
    TOKEN_ENV,
    WRITE_TIMEOUT_SECONDS,
    Connection,
    Pipelines,
    asked,
    named,
)
from kftrain.kubeflow.submission import ENDED
from kftrain.schedule.plan import Content, Recurring

PAGE_SIZE = 100
MAX_DESCRIPTION_LENGTH = 1000

ENABLE, DISABLE = "ENABLE", "DISABLE"


class RecurringPipelines(Pipelines):
    """A Kubeflow Pipelines installation with its recurring runs. Every method raises LaunchError."""

    def list_recurring(self, name: str = "") -> list[Recurring]:
        """List the recurring runs of a name; without one, all of them."""
        service, filters = self._client.recurring_runs, {"filter": named(name)} if name else {}

        def page(token: str) -> tuple[list[Any], str]:
            answer = service.recurring_run_service_list_recurring_runs(
                page_token=token,
                page_size=PAGE_SIZE,
                **filters,
                **self._scope(),
                _request_timeout=READ_TIMEOUT_SECONDS,
            )
            return answer.recurring_runs or [], answer.next_page_token or ""

        return [recurring(listed) for listed in self._iterate_pages(page)]

    def create(self, content: Content) -> None:
        """Create a recurring run, disabled: whoever calls looks at it before it may start anything."""
        models = self._models
        reference = models.V2beta1PipelineVersionReference(pipeline_id=content.pipeline_id)
        document = models.V2beta1RecurringRun(
            display_name=content.name,
            description=content.description[:MAX_DESCRIPTION_LENGTH],
            experiment_id=content.experiment_id,
            namespace=self._namespace,
            pipeline_version_reference=reference,
            runtime_config=models.V2beta1RuntimeConfig(parameters=content.parameters),
            service_account=content.service_account or None,
            max_concurrency=str(content.max_runs),
            no_catchup=content.no_catchup,
            trigger=models.V2beta1Trigger(cron_schedule=models.V2beta1CronSchedule(cron=content.cron)),
            mode=DISABLE,
        )
        with asked(self._host):
            self._client.recurring_runs.recurring_run_service_create_recurring_run(
                recurring_run=document, _request_timeout=WRITE_TIMEOUT_SECONDS
            )

    def enable(self, recurring_id: str) -> None:
        """Let a recurring run start runs from now on."""
        self._call_for_one(self._client.recurring_runs.recurring_run_service_enable_recurring_run, recurring_id)

    def disable(self, recurring_id: str) -> None:
        """Let a recurring run start no more runs; those that it has started go on."""
        self._call_for_one(self._client.recurring_runs.recurring_run_service_disable_recurring_run, recurring_id)

    def delete(self, recurring_id: str) -> None:
        """Delete a recurring run; Kubernetes kills its runs that have not ended."""
        self._call_for_one(self._client.recurring_runs.recurring_run_service_delete_recurring_run, recurring_id)

    def live_runs(self, recurring_id: str) -> list[str]:
        """List the names of its runs that have not ended."""
        predicate = {"operation": EQUALS, "key": "recurring_run_id", "stringValue": recurring_id}
        filters = {"filter": json.dumps({"predicates": [predicate]}), **self._scope()}

        def page(token: str) -> tuple[list[Any], str]:
            answer = self._client.runs.run_service_list_runs(
                page_token=token, page_size=PAGE_SIZE, **filters, _request_timeout=READ_TIMEOUT_SECONDS
            )
            return answer.runs or [], answer.next_page_token or ""

        return [str(run.display_name) for run in self._iterate_pages(page) if run.state not in ENDED]

    def find_ids(self, pipeline: str, experiment: str) -> tuple[str, str]:
        """Find the ids of a pipeline and of an experiment; empty where there is none of this name. Creates nothing."""
        with asked(self._host):
            owner, group = self._find_pipeline(pipeline), self._find_experiment(experiment)
        return str(owner.pipeline_id) if owner else "", str(group.experiment_id) if group else ""

    def latest_version(self, pipeline_id: str) -> str:
        """Read the name of the version that a run without one would have; empty where the pipeline has none."""
        with asked(self._host):
            answer = self._client.pipelines.pipeline_service_list_pipeline_versions(
                pipeline_id, sort_by="created_at desc", page_size=1, _request_timeout=READ_TIMEOUT_SECONDS
            )
        newest = next(iter(answer.pipeline_versions or []), None)
        return str(newest.display_name) if newest is not None else ""

    def _iterate_pages(self, page: Callable[[str], tuple[list[Any], str]]) -> Iterator[Any]:
        token, more = "", True
        while more:
            with asked(self._host):
                items, token = page(token)
            yield from items
            more = bool(token)

    def _call_for_one(self, method: Callable[..., Any], recurring_id: str) -> None:
        """Call a method of one recurring run; one that is gone is left alone: the next listing shows it."""
        import kfp_server_api  # type: ignore[import-untyped]

        with asked(self._host):
            try:
                method(recurring_id, _request_timeout=WRITE_TIMEOUT_SECONDS)
            except kfp_server_api.ApiException as error:
                if error.status != NOT_FOUND:
                    raise


def recurring(listed: Any) -> Recurring:
    """Convert a recurring run from the API's form into ours; fields that the API leaves out become empty."""
    reference, cron = listed.pipeline_version_reference, listed.trigger.cron_schedule if listed.trigger else None
    content = Content(
        name=listed.display_name or "",
        cron=(cron.cron if cron else "") or "",
        pipeline_id=(reference.pipeline_id if reference else "") or "",
        experiment_id=listed.experiment_id or "",
        parameters=dict((listed.runtime_config.parameters if listed.runtime_config else None) or {}),
        service_account=listed.service_account or "",
        version_id=(reference.pipeline_version_id if reference else "") or "",
        no_catchup=bool(listed.no_catchup),
        max_runs=int(listed.max_concurrency or 1),
    )
    return Recurring(listed.recurring_run_id, content, listed.mode == ENABLE, str(listed.created_at or ""))


def disable_all(host: str, namespace: str, names: Iterable[str], dry_run: bool) -> list[str]:
    """Disable what is enabled of these schedules, as this pod's account; return a line for each. Raises LaunchError.

    `namespace` counts on a multi-user installation. With `dry_run` nothing is disabled.
    """
    pipelines = _connect_from_pod(host, namespace)
    enabled = [run for name in names for run in pipelines.list_recurring(name) if run.enabled]
    for run in () if dry_run else enabled:
        pipelines.disable(run.id)
    return [
        f"{'would disable' if dry_run else 'disabled'} {run.content.name} in Kubeflow: it is paused" for run in enabled
    ]


def _connect_from_pod(host: str, namespace: str) -> RecurringPipelines:
    try:
        return RecurringPipelines(Connection(host, "", TOKEN_ENV, None))
    except ConfigError:  # a multi-user installation wants to know whose
        return RecurringPipelines(Connection(host, namespace, TOKEN_ENV, None))
