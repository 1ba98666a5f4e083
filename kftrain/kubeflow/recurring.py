"""Kubeflow's recurring runs through kfp's client: listed, created disabled, enabled, disabled, deleted.

By pipeline id without a version, which kfp's own convenience methods refuse: each run has the newest version then.
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
        """The recurring runs of a name; without one all of them."""
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

        return [recurring(found) for found in self._pages(page)]

    def create(self, content: Content) -> None:
        """A new one, disabled."""
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
        """From now on it starts runs."""
        self._of_one(self._client.recurring_runs.recurring_run_service_enable_recurring_run, recurring_id)

    def disable(self, recurring_id: str) -> None:
        """From now on it starts none."""
        self._of_one(self._client.recurring_runs.recurring_run_service_disable_recurring_run, recurring_id)

    def delete(self, recurring_id: str) -> None:
        """Kubernetes kills what it has started and has not ended."""
        self._of_one(self._client.recurring_runs.recurring_run_service_delete_recurring_run, recurring_id)

    def live_runs(self, recurring_id: str) -> list[str]:
        """Names of its runs that have not ended."""
        predicate = {"operation": EQUALS, "key": "recurring_run_id", "stringValue": recurring_id}
        filters = {"filter": json.dumps({"predicates": [predicate]}), **self._scope()}

        def page(token: str) -> tuple[list[Any], str]:
            answer = self._client.runs.run_service_list_runs(
                page_token=token, page_size=PAGE_SIZE, **filters, _request_timeout=READ_TIMEOUT_SECONDS
            )
            return answer.runs or [], answer.next_page_token or ""

        return [str(run.display_name) for run in self._pages(page) if run.state not in ENDED]

    def find_ids(self, pipeline: str, experiment: str) -> tuple[str, str]:
        """Ids of a pipeline and of an experiment; empty where there is none of this name. Creates nothing."""
        with asked(self._host):
            found, wanted = self._find_pipeline(pipeline), self._find_experiment(experiment)
        return str(found.pipeline_id) if found else "", str(wanted.experiment_id) if wanted else ""

    def latest_version(self, pipeline_id: str) -> str:
        """Name of the version that a run without one would have; empty where the pipeline has none."""
        with asked(self._host):
            answer = self._client.pipelines.pipeline_service_list_pipeline_versions(
                pipeline_id, sort_by="created_at desc", page_size=1, _request_timeout=READ_TIMEOUT_SECONDS
            )
        newest = next(iter(answer.pipeline_versions or []), None)
        return str(newest.display_name) if newest is not None else ""

    def _pages(self, page: Callable[[str], tuple[list[Any], str]]) -> Iterator[Any]:
        token, more = "", True
        while more:
            with asked(self._host):
                found, token = page(token)
            yield from found
            more = bool(token)

    def _of_one(self, method: Callable[..., Any], recurring_id: str) -> None:
        """Calls a method of one recurring run; one that is gone is left alone: the next listing shows it."""
        import kfp_server_api  # type: ignore[import-untyped]

        with asked(self._host):
            try:
                method(recurring_id, _request_timeout=WRITE_TIMEOUT_SECONDS)
            except kfp_server_api.ApiException as error:
                if error.status != NOT_FOUND:
                    raise


def recurring(found: Any) -> Recurring:
    """A recurring run as the API lists it."""
    reference, cron = found.pipeline_version_reference, found.trigger.cron_schedule if found.trigger else None
    content = Content(
        name=found.display_name or "",
        cron=(cron.cron if cron else "") or "",
        pipeline_id=(reference.pipeline_id if reference else "") or "",
        experiment_id=found.experiment_id or "",
        parameters=dict((found.runtime_config.parameters if found.runtime_config else None) or {}),
        service_account=found.service_account or "",
        version_id=(reference.pipeline_version_id if reference else "") or "",
        no_catchup=bool(found.no_catchup),
        max_runs=int(found.max_concurrency or 1),
    )
    return Recurring(found.recurring_run_id, content, found.mode == ENABLE, str(found.created_at or ""))


def disable_all(host: str, namespace: str, names: Iterable[str], dry_run: bool) -> list[str]:
    """Disables what is enabled of these schedules, as whoever this pod is; what was done, in lines. Raises LaunchError.

    `namespace` counts on a multi-user installation.
    """
    pipelines = _of_pod(host, namespace)
    enabled = [each for name in names for each in pipelines.list_recurring(name) if each.enabled]
    for each in () if dry_run else enabled:
        pipelines.disable(each.id)
    return [
        f"{'would disable' if dry_run else 'disabled'} {each.content.name} in Kubeflow: it is paused"
        for each in enabled
    ]


def _of_pod(host: str, namespace: str) -> RecurringPipelines:
    try:
        return RecurringPipelines(Connection(host, "", TOKEN_ENV, None))
    except ConfigError:  # a multi-user installation wants to know whose
        return RecurringPipelines(Connection(host, namespace, TOKEN_ENV, None))
