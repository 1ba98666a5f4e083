"""Requests to Kubeflow Pipelines through kfp's own client. Only this module talks to its API server.

Of the client we take how it connects (tokens, cookies, Google's proxies, namespaces) and the API that it carries;
its convenience methods have no timeouts, print to stdout, and wait for ever on a run that was canceled. A recurring run
names its pipeline by id without a version, which they refuse: then each run has the newest version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kftrain.errors import ConfigError, LaunchError, UnavailableError
from kftrain.kubeflow.submission import ENDED, RunState, Submission, compute_run_state
from kftrain.schedule.plan import Content, Recurring

READ_TIMEOUT_SECONDS = (10, 30)
WRITE_TIMEOUT_SECONDS = (10, 120)
"""Seconds to connect, and seconds to wait for the answer."""

NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS, FIRST_SERVER_ERROR = 404, 409, 429, 500
EQUALS = 1
ENABLE, DISABLE = "ENABLE", "DISABLE"

PAGE_SIZE = 100
MAX_DESCRIPTION_LENGTH = 1000

TOKEN_ENV = "KFP_EXISTING_TOKEN"
"""Variable from which kfp's own command line takes a bearer token."""

ENDPOINT_ENV = "KF_PIPELINES_ENDPOINT"
"""Variable from which kfp's own command line takes the host."""

IN_CLUSTER_HOST = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
"""The API server as pods of a stock installation reach it; kfp's client takes it, too, where none is named."""

NO_NAMESPACE = "kubeflow"
"""Namespace that kfp's client takes for "none given": then the one in ~/.config/kfp/context.json counts."""

UI_ENDPOINT_ENV = "KF_PIPELINES_UI_ENDPOINT"
"""Variable of kfp's own with the address of the UI, where that is not the API's address."""


@dataclass(frozen=True)
class Connection:
    """The address of an API server, and as whom to talk to it."""

    host: str
    namespace: str
    """Namespace of the user; a multi-user installation wants one, any other refuses it."""
    existing_token_env: str
    """Name of the environment variable that holds a bearer token; `TOKEN_ENV` need not be set, any other must."""
    ca_file: str | None
    """Certificates to trust; None: the public ones."""


class Pipelines:
    """A Kubeflow Pipelines installation. Every method raises LaunchError for what the API server refuses."""

    def __init__(self, connection: Connection) -> None:
        _require_url(connection.host)
        self.host = connection.host.rstrip("/")
        """Address of the installation, without a slash at its end."""
        with translate_errors(self.host):
            self._client = _connect(connection)
            self._models = self._client.api_models
            health = self._client.get_kfp_healthz()
        self._namespace = self._choose_namespace(connection.namespace, bool(health.multi_user))

    def ensure_pipeline(self, name: str, description: str) -> str:
        """Return the id of the pipeline; create one if there is none of this name."""
        pipeline = self._models.V2beta1Pipeline(
            name=name, display_name=name, description=description, namespace=self._namespace
        )
        create = functools.partial(self._client.pipelines.pipeline_service_create_pipeline, pipeline=pipeline)
        return str(self._find_or_create(lambda: self._find_pipeline(name), create)[0].pipeline_id)

    def ensure_version(self, pipeline_id: str, name: str, text: str) -> tuple[str, bool]:
        """Return a version's id, and whether it was uploaded now; one that is there already has the same content."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(text)
            upload = functools.partial(
                self._client.pipeline_uploads.upload_pipeline_version, str(path), name=name, pipelineid=pipeline_id
            )
            version, created = self._find_or_create(lambda: self._find_version(pipeline_id, name), upload)
        return str(version.pipeline_version_id), created

    def ensure_experiment(self, name: str) -> str:
        """Return the id of the experiment; create one if there is none of this name."""
        experiment = self._models.V2beta1Experiment(display_name=name, namespace=self._namespace)
        create = functools.partial(self._client.experiments.experiment_service_create_experiment, experiment=experiment)
        return str(self._find_or_create(lambda: self._find_experiment(name), create)[0].experiment_id)

    def start_run(self, submission: Submission, pipeline_id: str, version_id: str, experiment_id: str) -> str:
        """Start a run of a version; return its id. A lost answer is a LaunchError that names the run to look for."""
        run = self._models.V2beta1Run(
            display_name=submission.run_name,
            experiment_id=experiment_id,
            pipeline_version_reference=self._models.V2beta1PipelineVersionReference(
                pipeline_id=pipeline_id, pipeline_version_id=version_id
            ),
            runtime_config=self._models.V2beta1RuntimeConfig(parameters=submission.parameters),
        )
        try:
            with translate_errors(self.host):
                started = self._client.runs.run_service_create_run(run=run, _request_timeout=WRITE_TIMEOUT_SECONDS)
        except UnavailableError as error:
            fix = f"look for {submission.run_name} in the UI before you submit again"
            raise LaunchError(
                f"the run may have been started or not: {error.what}", where=self.host, fix=fix
            ) from error
        return str(started.run_id)

    def read_run(self, run_id: str, steps: frozenset[str]) -> RunState:
        """Read a run as it is now. Raises UnavailableError where another try may succeed."""
        with translate_errors(self.host, "the run was deleted"):
            run = self._client.runs.run_service_get_run(run_id=run_id, _request_timeout=READ_TIMEOUT_SECONDS)
        details = run.run_details.task_details if run.run_details else None
        history = [entry.state for entry in run.state_history or []]
        rows = [(row.display_name or "", row.state) for row in details or []]
        return compute_run_state(run.state or "PENDING", history, rows, steps)

    def build_run_url(self, run_id: str) -> str:
        """Return the address at which the UI shows a run."""
        return f"{build_ui_url(self.host)}/#/runs/details/{run_id}"

    def build_terminate_url(self, run_id: str) -> str:
        """Return the address to which a POST ends a run."""
        return f"{self.host}/apis/v2beta1/runs/{run_id}:terminate"

    def list_recurring(self, name: str = "") -> list[Recurring]:
        """List the recurring runs of a name; without one, all of them."""
        service, filters = self._client.recurring_runs, {"filter": _filter_by_name(name)} if name else {}

        def page(token: str) -> tuple[list[Any], str | None]:
            answer = service.recurring_run_service_list_recurring_runs(
                page_token=token,
                page_size=PAGE_SIZE,
                **filters,
                **self._scope(),
                _request_timeout=READ_TIMEOUT_SECONDS,
            )
            return answer.recurring_runs or [], answer.next_page_token or None

        return [_convert_recurring(listed) for listed in self._iterate_pages(page)]

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
        with translate_errors(self.host):
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

    def list_live_runs(self, recurring_id: str) -> list[str]:
        """List the names of its runs that have not ended."""
        predicate = {"operation": EQUALS, "key": "recurring_run_id", "stringValue": recurring_id}
        filters = {"filter": json.dumps({"predicates": [predicate]}), **self._scope()}

        def page(token: str) -> tuple[list[Any], str | None]:
            answer = self._client.runs.run_service_list_runs(
                page_token=token, page_size=PAGE_SIZE, **filters, _request_timeout=READ_TIMEOUT_SECONDS
            )
            return answer.runs or [], answer.next_page_token or None

        return [str(run.display_name) for run in self._iterate_pages(page) if run.state not in ENDED]

    def find_ids(self, pipeline: str, experiment: str) -> tuple[str, str]:
        """Find the ids of a pipeline and of an experiment; empty where there is none of this name. Creates nothing."""
        with translate_errors(self.host):
            owner, group = self._find_pipeline(pipeline), self._find_experiment(experiment)
        return str(owner.pipeline_id) if owner else "", str(group.experiment_id) if group else ""

    def read_latest_version(self, pipeline_id: str) -> str:
        """Read the name of the version that a run without one would have; empty where the pipeline has none."""
        with translate_errors(self.host):
            answer = self._client.pipelines.pipeline_service_list_pipeline_versions(
                pipeline_id, sort_by="created_at desc", page_size=1, _request_timeout=READ_TIMEOUT_SECONDS
            )
        newest = next(iter(answer.pipeline_versions or []), None)
        return str(newest.display_name) if newest is not None else ""

    def _choose_namespace(self, given: str, multi_user: bool) -> str | None:
        """Choose the namespace to name in requests; None where there is only one, because there it is refused."""
        if not multi_user and given:
            raise ConfigError(
                "this installation is not multi-user", where="--namespace", value=given, fix="leave it out"
            )
        namespace = (given or self._client.get_user_namespace()) if multi_user else None
        if multi_user and not namespace:
            raise ConfigError("this installation is multi-user", where="--namespace", fix="name yours")
        return namespace and str(namespace)

    def _find_or_create(self, find: Callable[[], Any], create: Callable[..., Any]) -> tuple[Any, bool]:
        """Find a thing or create it; return it, and whether it was created. Whoever creates it first is as good."""
        with translate_errors(self.host):
            existing = find()
            if existing is not None:
                return existing, False
            try:
                return create(_request_timeout=WRITE_TIMEOUT_SECONDS), True
            except _import_api_exception() as error:
                # Somebody created it between our look and our request.
                existing = find() if error.status == CONFLICT else None
                if existing is None:
                    raise
                return existing, False

    def _find_pipeline(self, name: str) -> Any:
        try:
            return self._client.pipelines.pipeline_service_get_pipeline_by_name(
                name, **self._scope(), _request_timeout=READ_TIMEOUT_SECONDS
            )
        except _import_api_exception() as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _find_version(self, pipeline_id: str, name: str) -> Any:
        answer = self._client.pipelines.pipeline_service_list_pipeline_versions(
            pipeline_id, filter=_filter_by_name(name), _request_timeout=READ_TIMEOUT_SECONDS
        )
        return next(iter(answer.pipeline_versions or []), None)

    def _find_experiment(self, name: str) -> Any:
        answer = self._client.experiments.experiment_service_list_experiments(
            filter=_filter_by_name(name), **self._scope(), _request_timeout=READ_TIMEOUT_SECONDS
        )
        return next(iter(answer.experiments or []), None)

    def _scope(self) -> dict[str, str]:
        return {"namespace": self._namespace} if self._namespace else {}

    def _iterate_pages(self, page: Callable[[str], tuple[list[Any], str | None]]) -> Iterator[Any]:
        """Yield the items of all pages; `page` returns those of one, and the next page's token or None."""
        token: str | None = ""
        while token is not None:
            with translate_errors(self.host):
                items, token = page(token)
            yield from items

    def _call_for_one(self, method: Callable[..., Any], recurring_id: str) -> None:
        """Call a method of one recurring run; one that is gone is left alone: the next listing shows it."""
        with translate_errors(self.host):
            try:
                method(recurring_id, _request_timeout=WRITE_TIMEOUT_SECONDS)
            except _import_api_exception() as error:
                if error.status != NOT_FOUND:
                    raise


def find_in_cluster_host() -> str:
    """Return the API server of the cluster in which this process is a pod. Raises ConfigError where it is none."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError("which Kubeflow Pipelines?", where="host", fix=f"name its URL, or set {ENDPOINT_ENV}")
    return IN_CLUSTER_HOST


def build_ui_url(host: str) -> str:
    """Return the address at which people open the UI of the installation at `host`."""
    return os.environ.get(UI_ENDPOINT_ENV, host).rstrip("/")


def _require_url(host: str) -> None:
    with contextlib.suppress(ValueError):
        parts = urlsplit(host)
        if parts.scheme in ("http", "https") and parts.hostname:
            return
    raise ConfigError("not the URL of Kubeflow Pipelines", where="--host", value=host, fix="e.g. https://host/pipeline")


def _connect(connection: Connection) -> Any:
    """Build kfp's client. It asks the API server for its health on the way, so this can fail like a request."""
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        """Asks for health once and soon; the original does it five times and logs five tracebacks."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            answer = self.healthzs.healthz_service_get_healthz(
                _preload_content=False, _request_timeout=READ_TIMEOUT_SECONDS
            )
            return self.api_models.V2beta1GetHealthzResponse(multi_user=_is_multi_user(answer.data, connection.host))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "only works with Kubeflow Pipelines v2"
        return Client(
            host=connection.host,
            namespace=connection.namespace or NO_NAMESPACE,
            existing_token=_read_token(connection.existing_token_env),
            credentials=_find_volume_credentials(),
            ssl_ca_cert=connection.ca_file,
        )


def _read_token(variable: str) -> str | None:
    """Read the bearer token in a variable. Raises ConfigError where one was named that is not set."""
    token = os.environ.get(variable)
    if not token and variable != TOKEN_ENV:
        raise ConfigError("this environment variable is not set", where="--existing-token-env", value=variable)
    return token


def _find_volume_credentials() -> Any:
    """Find the token that Kubernetes mounts into a pod for Kubeflow Pipelines and renews; None where there is none."""
    from kfp import client

    path = os.environ.get(client.KF_PIPELINES_SA_TOKEN_ENV, client.KF_PIPELINES_SA_TOKEN_PATH)
    return client.ServiceAccountTokenVolumeCredentials(path) if os.path.exists(path) else None


def _is_multi_user(answer: bytes, host: str) -> bool:
    """Parse the API server's health for whether it is multi-user. Raises LaunchError where a login page answers."""
    try:
        return bool(json.loads(answer).get("multi_user"))
    except (ValueError, AttributeError) as error:
        raise LaunchError(
            "something answers there, but not Kubeflow Pipelines: a login page?",
            where=host,
            fix="check --host; a bearer token is taken from the variable that --existing-token-env names",
        ) from error


@contextlib.contextmanager
def translate_errors(host: str, deleted: str = "") -> Iterator[None]:
    """Run a block of requests; an error of the API server or the network becomes a LaunchError.

    `deleted`: message for a 404, where that means that the thing is gone. What another try may mend is an
    UnavailableError.
    """
    from urllib3.exceptions import HTTPError

    try:
        yield
    except _import_api_exception() as error:
        if deleted and error.status == NOT_FOUND:
            raise LaunchError(deleted, where=host, fix="submit it again, or go on with it: --resume RUN") from error
        raise _build_refusal(host, error) from error
    except HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(
            f"Kubeflow Pipelines cannot be reached: {reason}", where=host, fix="check --host and the network"
        ) from error


def _import_api_exception() -> Any:
    """Import the exception that kfp's client raises for an answer that is an error."""
    import kfp_server_api  # type: ignore[import-untyped]

    return kfp_server_api.ApiException


def _build_refusal(host: str, error: Any) -> LaunchError:
    what = f"Kubeflow Pipelines answered {error.status} {error.reason}: {_parse_message(error.body)}".rstrip(": ")
    if error.status >= FIRST_SERVER_ERROR or error.status == TOO_MANY_REQUESTS:
        return UnavailableError(what, where=host, fix="try again, or look at the log of ml-pipeline")
    fixes = {
        401: "log in: a bearer token is taken from the variable that --existing-token-env names",
        403: "check your rights and --namespace",
        NOT_FOUND: "check --host",
    }
    return LaunchError(what, where=host, fix=fixes.get(error.status, ""))


def _parse_message(body: str | bytes | None) -> str:
    """Read the API server's own words from an error's body; empty for a page of HTML."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        document = json.loads(text)
    except ValueError:
        return "" if "<html" in text.lower() else text[:300]
    if not isinstance(document, dict):
        return text[:300]
    return str(document.get("message") or document.get("error_message") or document.get("error") or "")[:300]


def _filter_by_name(name: str) -> str:
    """Build the filter for things of this name, as the API takes it."""
    return json.dumps({"predicates": [{"operation": EQUALS, "key": "display_name", "stringValue": name}]})


def _convert_recurring(listed: Any) -> Recurring:
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
    try:
        pipelines = Pipelines(Connection(host, "", TOKEN_ENV, None))
    except ConfigError:  # a multi-user installation wants to know whose
        pipelines = Pipelines(Connection(host, namespace, TOKEN_ENV, None))
    enabled = [run for name in names for run in pipelines.list_recurring(name) if run.enabled]
    for run in () if dry_run else enabled:
        pipelines.disable(run.id)
    return [
        f"{'would disable' if dry_run else 'disabled'} {run.content.name} in Kubeflow: it is paused" for run in enabled
    ]
