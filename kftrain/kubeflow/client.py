"""Requests to Kubeflow Pipelines through kfp's own client. Only this module and `recurring` talk to its API server.

Of the client we take how it connects (tokens, cookies, Google's proxies, namespaces) and the API that it carries;
its convenience methods have no timeouts, print to stdout, and wait for ever on a run that was canceled.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kftrain.errors import ConfigError, LaunchError, UnavailableError
from kftrain.kubeflow.submission import RunState, Submission, run_state

READ_TIMEOUT_SECONDS = (10, 30)
WRITE_TIMEOUT_SECONDS = (10, 120)
"""Seconds to connect, and seconds to wait for the answer."""

NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS, FIRST_SERVER_ERROR = 404, 409, 429, 500
EQUALS = 1

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
        self._host = connection.host.rstrip("/")
        with asked(self._host):
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
            with asked(self._host):
                started = self._client.runs.run_service_create_run(run=run, _request_timeout=WRITE_TIMEOUT_SECONDS)
        except UnavailableError as error:
            fix = f"look for {submission.run_name} in the UI before you submit again"
            raise LaunchError(
                f"the run may have been started or not: {error.what}", where=self._host, fix=fix
            ) from error
        return str(started.run_id)

    def read_run(self, run_id: str, steps: frozenset[str]) -> RunState:
        """Read a run as it is now. Raises UnavailableError where another try may succeed."""
        with asked(self._host, "the run was deleted"):
            run = self._client.runs.run_service_get_run(run_id=run_id, _request_timeout=READ_TIMEOUT_SECONDS)
        details = run.run_details.task_details if run.run_details else None
        history = [entry.state for entry in run.state_history or []]
        rows = [(row.display_name or "", row.state) for row in details or []]
        return run_state(run.state or "PENDING", history, rows, steps)

    def run_url(self, run_id: str) -> str:
        """Return the address at which the UI shows a run."""
        return f"{ui_url(self._host)}/#/runs/details/{run_id}"

    def terminate_url(self, run_id: str) -> str:
        """Return the address to which a POST ends a run."""
        return f"{self._host}/apis/v2beta1/runs/{run_id}:terminate"

    def _choose_namespace(self, asked: str, multi_user: bool) -> str | None:
        """Choose the namespace to name in requests; None where there is only one, because there it is refused."""
        if not multi_user and asked:
            raise ConfigError(
                "this installation is not multi-user", where="--namespace", value=asked, fix="leave it out"
            )
        if multi_user and not (asked or self._client.get_user_namespace()):
            raise ConfigError("this installation is multi-user", where="--namespace", fix="name yours")
        return (asked or str(self._client.get_user_namespace())) if multi_user else None

    def _find_or_create(self, find: Callable[[], Any], create: Callable[..., Any]) -> tuple[Any, bool]:
        """Find a thing or create it; return it, and whether it was created. Whoever creates it first is as good."""
        with asked(self._host):
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
            pipeline_id, filter=named(name), _request_timeout=READ_TIMEOUT_SECONDS
        )
        return next(iter(answer.pipeline_versions or []), None)

    def _find_experiment(self, name: str) -> Any:
        answer = self._client.experiments.experiment_service_list_experiments(
            filter=named(name), **self._scope(), _request_timeout=READ_TIMEOUT_SECONDS
        )
        return next(iter(answer.experiments or []), None)

    def _scope(self) -> dict[str, str]:
        return {"namespace": self._namespace} if self._namespace else {}


def in_cluster_host() -> str:
    """Return the API server of the cluster in which this process is a pod. Raises ConfigError where it is none."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError("which Kubeflow Pipelines?", where="host", fix=f"name its URL, or set {ENDPOINT_ENV}")
    return IN_CLUSTER_HOST


def ui_url(host: str) -> str:
    """Return the address at which people open the UI of the installation at `host`."""
    return os.environ.get(UI_ENDPOINT_ENV, host).rstrip("/")


def _require_url(host: str) -> None:
    try:
        parts = urlsplit(host)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            "not the URL of Kubeflow Pipelines", where="--host", value=host, fix="e.g. https://host/pipeline"
        )


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
def asked(host: str, deleted: str = "") -> Iterator[None]:
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


def named(name: str) -> str:
    """Build the filter for things of this name, as the API takes it."""
    return json.dumps({"predicates": [{"operation": EQUALS, "key": "display_name", "stringValue": name}]})
