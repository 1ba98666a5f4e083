"""A scripted Kubeflow Pipelines API server: the few REST calls that submitting a run takes, with their rules.

It answers as the real one does (404 for an unknown name, 409 for a second one of a name, 400 for a namespace in
single-user mode), remembers every request, and plays a script for the runs that are read.
"""

import contextlib
import email
import email.policy
import http.server
import json
import re
import ssl
import threading
import urllib.parse
from dataclasses import dataclass

RUN_ID = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0"
DROPPED = "dropped"
"""In a script: the connection is closed without an answer."""


RIGHTS = {
    "_list_recurring": ("jobs", "list"),
    "_create_recurring": ("jobs", "create"),
    "_switch": ("jobs", ""),
    "_delete_recurring": ("jobs", "delete"),
    "_list_runs": ("runs", "list"),
}
"""What the API server asks Kubernetes for, as rights on resources of pipelines.kubeflow.org; empty: the call's verb."""


@dataclass
class Request:
    """What somebody has asked for."""

    method: str
    path: str
    query: dict
    headers: dict
    body: object
    """Of a POST: the JSON, or the text of the file that was uploaded."""


def run(state, steps=None, history=(), **rows):
    """A run as the server shows it: for each step the rows that the backend makes of its pods."""
    details = [{"display_name": "root", "state": "RUNNING"}, {"display_name": "executor", "state": "SUCCEEDED"}]
    for name, step_state in (steps or {}).items():
        details.append({"display_name": f"{name}-driver", "state": "SUCCEEDED"})
        details.append({"display_name": name, **({"state": step_state} if step_state else {})})
    details += [{"display_name": name.replace("_", "-"), "state": row} for name, row in rows.items()]
    return {
        "run_id": RUN_ID,
        "state": state,
        "state_history": [{"state": past} for past in history],
        "run_details": {"task_details": details},
    }


class Server:
    """The server and what it knows. Use as a context manager; `script` is what reading the run gives, one by one."""

    def __init__(self, multi_user=False, certificate=None, rights=None):
        self.multi_user = multi_user
        self.rights = rights
        """(resource, verb) that whoever asks may do; None: everything."""
        self._certificate = certificate
        self.pipelines = []
        self.versions = []
        self.experiments = []
        self.runs = []
        self.recurring = []
        """Recurring runs; each may have "fired", a list of runs."""
        self.killed = []
        """Runs that lived when their recurring run was deleted."""
        self.requests = []
        self.script = []
        self._created = 0
        self.races = set()
        """Kinds of things that somebody else creates between our asking and our creating."""
        self.answers = {}
        """(method, path) -> what to answer instead: (status, body)."""
        self.run_was_read = threading.Event()

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        scheme = "http"
        if self._certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def asked(self, method, pattern):
        """The requests of a method whose path is that of the pattern."""
        return [r for r in self.requests if r.method == method and re.fullmatch(f"/apis/v2beta1/{pattern}", r.path)]

    def answer(self, request):
        """(status, body) of a request."""
        self.requests.append(request)
        path = request.path.removeprefix("/apis/v2beta1")
        if (request.method, path) in self.answers:
            return self.answers[request.method, path]
        if path == "/healthz":
            return 200, {"multi_user": self.multi_user, "pipeline_store": "database"}
        for method, pattern, respond in self._routes():
            match = re.fullmatch(pattern, path)
            if match and method == request.method:
                right = RIGHTS.get(respond.__name__, ())
                right = right and (right[0], right[1] or match.groups()[-1])
                if self.rights is not None and right and right not in self.rights:
                    return _refused(403, f"not authorized: {right[1]} of {right[0]}")
                return respond(request, *match.groups())
        return _refused(404, "Not Found")

    def _routes(self):
        return [
            ("GET", r"/pipelines/names/([^/]+)", self._get_pipeline),
            ("POST", r"/pipelines", self._create_pipeline),
            ("GET", r"/pipelines/([^/]+)/versions", self._list_versions),
            ("POST", r"/pipelines/upload_version", self._upload_version),
            ("GET", r"/experiments", self._list_experiments),
            ("POST", r"/experiments", self._create_experiment),
            ("GET", r"/recurringruns", self._list_recurring),
            ("POST", r"/recurringruns", self._create_recurring),
            ("POST", r"/recurringruns/([^/:]+):(enable|disable)", self._switch),
            ("DELETE", r"/recurringruns/([^/]+)", self._delete_recurring),
            ("GET", r"/runs", self._list_runs),
            ("POST", r"/runs", self._create_run),
            ("GET", r"/runs/([^/]+)", self._get_run),
        ]

    def _get_pipeline(self, request, name):
        found = [
            p for p in self.pipelines if p["name"] == name and p.get("namespace") == request.query.get("namespace")
        ]
        return (200, found[0]) if found else _refused(404, f"pipeline {name} not found")

    def _create_pipeline(self, request):
        return self._create("pipelines", self.pipelines, {**request.body, "pipeline_id": f"p-{len(self.pipelines)}"})

    def _list_versions(self, request, pipeline_id):
        found = [v for v in self.versions if v["pipeline_id"] == pipeline_id]
        if "filter" in request.query:
            found = [v for v in found if _matches(v, request)]
        if request.query.get("sort_by") == "created_at desc":
            found.reverse()
        return 200, {"pipeline_versions": found} if found else {}

    def _upload_version(self, request):
        name, pipeline_id = request.query["name"], request.query["pipelineid"]
        version = {"name": name, "display_name": name, "pipeline_id": pipeline_id, "text": request.body}
        return self._create("versions", self.versions, {**version, "pipeline_version_id": f"v-{len(self.versions)}"})

    def _list_experiments(self, request):
        if bool(request.query.get("namespace")) != self.multi_user:
            return _refused(400, "In single-user mode, ListExperiment cannot filter by namespace.")
        found = [e for e in self.experiments if _matches(e, request)]
        return 200, {"experiments": found} if found else {}

    def _create_experiment(self, request):
        experiment = {
            **request.body,
            "name": request.body["display_name"],
            "experiment_id": f"e-{len(self.experiments)}",
        }
        return self._create("experiments", self.experiments, experiment)

    def _list_recurring(self, request):
        if bool(request.query.get("namespace")) != self.multi_user:
            return _refused(400, "In single-user mode, ListRecurringRuns cannot filter by namespace.")
        found = [r for r in self.recurring if "filter" not in request.query or _matches(r, request)]
        first, size = int(request.query.get("page_token") or 0), int(request.query["page_size"])
        page = {"recurringRuns": found[first : first + size]} if found else {}
        return 200, {**page, **({"next_page_token": str(first + size)} if first + size < len(found) else {})}

    def _create_recurring(self, request):
        """Names are not unique, and nothing says that there is one already."""
        body = request.body
        if not 1 <= int(body.get("max_concurrency") or 1) <= 10 or not body["trigger"]["cron_schedule"]["cron"]:
            return _refused(400, "Invalid input error")
        assert body["mode"] in ("ENABLE", "DISABLE")
        self._created += 1
        created = f"2026-11-01T00:{self._created // 60:02}:{self._created % 60:02}Z"
        thing = {**body, "recurring_run_id": f"r-{self._created}", "created_at": created}
        thing.setdefault("service_account", "pipeline-runner")
        self.recurring.append({**thing, "fired": []})
        return 200, thing

    def _switch(self, request, identity, verb):
        found = self._find_recurring(identity)
        if found is None:
            return _refused(404, f"recurring run {identity} not found")
        found["mode"] = verb.upper()
        return 200, {}

    def _delete_recurring(self, request, identity):
        """Kubernetes takes the Workflows along that belong to it."""
        found = self._find_recurring(identity)
        if found is None:
            return _refused(404, f"recurring run {identity} not found")
        self.killed += [run for run in found["fired"] if run["state"] in ("PENDING", "RUNNING")]
        self.recurring.remove(found)
        return 200, {}

    def _find_recurring(self, identity):
        return next((r for r in self.recurring if r["recurring_run_id"] == identity), None)

    def fire(self, identity):
        """What the controller does when a recurring run is due."""
        found = self._find_recurring(identity)
        name = f"{found['display_name']}-{len(found['fired']) + 1}"
        found["fired"].append({"display_name": name, "recurring_run_id": identity, "state": "RUNNING"})
        return found["fired"][-1]

    def _list_runs(self, request):
        found = [run for r in self.recurring for run in r["fired"] if _matches(run, request)]
        return 200, {"runs": found} if found else {}

    def _create(self, kind, things, thing):
        taken = any(other["name"] == thing["name"] for other in things)
        if not taken:
            things.append(thing)
        if taken or kind in self.races:
            return _refused(409, f"{thing['name']} already exists")
        return 200, thing

    def _create_run(self, request):
        known = {v["pipeline_version_id"] for v in self.versions}
        assert request.body["pipeline_version_reference"]["pipeline_version_id"] in known
        self.runs.append(request.body)
        return 200, {**request.body, "run_id": RUN_ID, "state": "PENDING"}

    def _get_run(self, request, run_id):
        self.run_was_read.set()
        if run_id != RUN_ID:
            return _refused(404, f"run {run_id} not found")
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return _refused(step, "upstream connect error") if isinstance(step, int) else (200, step)


def _matches(thing, request):
    (predicate,) = json.loads(request.query["filter"])["predicates"]
    assert predicate["operation"] == 1, "EQUALS"
    return thing[predicate["key"]] == predicate["stringValue"]


def _refused(status, message):
    return status, {"error": message, "code": 13, "message": message, "details": []}


def _handler(server):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._respond(None)

        def do_DELETE(self):
            self._respond(None)

        def do_POST(self):
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._respond(_body(self.headers["Content-Type"], data) if data else None)

        def log_message(self, *arguments):
            pass

        def _respond(self, body):
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            request = Request(self.command, url.path, query, {k.title(): v for k, v in self.headers.items()}, body)
            status, answer = server.answer(request)
            if answer == DROPPED:
                return
            text = answer if isinstance(answer, str) else json.dumps(answer)
            with contextlib.suppress(BrokenPipeError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/html")
                self.end_headers()
                self.wfile.write(text.encode())

    return Handler


def _body(content_type, data):
    if not content_type.startswith("multipart/form-data"):
        return json.loads(data)
    message = email.message_from_bytes(
        f"Content-Type: {content_type}\r\n\r\n".encode() + data, policy=email.policy.HTTP
    )
    (part,) = [p for p in message.iter_parts() if p.get_param("name", header="content-disposition") == "uploadfile"]
    assert part.get_filename() == "pipeline.yaml"
    return part.get_payload(decode=True).decode()
