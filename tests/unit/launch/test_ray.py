"""Requests to Ray and what Ray answers, as data; a dashboard of ours answers by HTTP. No Ray is imported."""

import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from kftrain import config
from kftrain.errors import ConfigError, FencedError, LaunchError, OtherJobError
from kftrain.launch import ray_driver, scheduler
from kftrain.launch.base import build_launcher
from kftrain.launch.ray_jobs import STOP_FILE_ENV, WORKER_FILE_ENV, assess_output, parse_job
from kftrain.launch.spec import JobSpec, Role

GOLDEN = Path(__file__).parents[2] / "golden" / "ray.json"
SETTINGS = ["launch.backend=ray", "launch.ray.gpus_per_node=8", "launch.ray.resources={accelerator_type:A100: 0.001}"]


def make_spec(run_uri="s3://bucket/runs/r", environment=None, roles=()):
    arguments = ("worker", "--task", "train", "--run-uri", run_uri)
    return JobSpec("train", run_uri, "d" * 64, (Role("worker", 2, 8, arguments), *roles), environment or {})


def build(spec, *overrides):
    return build_launcher(config.parse("", ["run.storage_root=/r", *SETTINGS, *overrides])).build(spec)


def test_the_request_is_the_one_that_was_reviewed():
    request = build(make_spec(environment={"NOTE": 'it\'s "here"; $(reboot)'}))
    assert request.content == json.loads(GOLDEN.read_text())
    command = shlex.split(request.text)
    assert command[0] == "curl" and json.loads(command[-1]) == request.content


def test_hostile_text_reaches_the_driver_as_it_is():
    hostile = "'; touch PWNED; $(touch PWNED) `x`\n\\"
    entrypoint = build(make_spec(environment={"NOTE": hostile})).content["entrypoint"]
    shown = entrypoint.replace("exec python -m kftrain.launch.ray_driver", "printf %s")
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["environment"] == {"NOTE": hostile}


def test_servers_are_refused_and_so_is_an_address_of_another_protocol():
    with pytest.raises(LaunchError, match="the ray backend has workers alone"):
        build(make_spec(roles=(Role("server", 1, 1, ("server",)),)))
    with pytest.raises(ConfigError, match="ray:// is another protocol"):
        build(make_spec(), "launch.ray.address=ray://head:10001")


def make_job(number=1, status="RUNNING", **values):
    content = build(make_spec()).content
    known = {"status": status, "message": "words\n of Ray", "start_time": number * 1000, "driver_exit_code": None}
    name = content["submission_id"].rpartition("-")[0]
    return {**known, "submission_id": f"{name}-{number}", "metadata": content["metadata"], **values}


def test_jobs_of_others_are_none_of_ours():
    job = parse_job(make_job(3))
    assert (job.number, job.reason, job.submitted_at, job.num_nodes) == (3, "words of Ray", 3.0, 2)
    assert job.belongs_to("r") and job.belongs_to("s3://bucket/runs/r") and not job.belongs_to("s3://other/runs/r")
    ours = make_job()["metadata"]
    for metadata in (None, {}, {**ours, "kftrain": "2"}, {**ours, "task": "x"}, {**ours, "run": "/a\x1b"}):
        assert parse_job(make_job(metadata=metadata)) is None
    assert parse_job(make_job(submission_id=None, metadata={})) is None


def test_the_output_says_how_far_a_job_has_come():
    waits = "noise\nkftrain| Ray waits: NO_RESOURCES: two\n"
    job = parse_job(make_job(3))
    assert assess_output(job, "") == ("Queued", "words of Ray", "", False)
    assert assess_output(job, waits) == ("Queued", "NO_RESOURCES: two", "", False)
    works = f"{waits}kftrain| Ray runs the job on a, b\n[rank 0] kftrain| step 3/40: loss 1\nend"
    assert assess_output(job, works) == ("Training", "", "step 3/40", True)


class Dashboard(http.server.ThreadingHTTPServer):
    """Ray's dashboard: a list of jobs. Answers 500 as many times as `num_failures` says."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs = []
        self.output = ""
        self.outputs = {}
        """Number of a job -> its output, where it is another one."""
        self.requests = []
        self.num_failures = 0
        self.on_submit = lambda content: None


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.num_failures:
            self.server.num_failures -= 1
            return self._answer(500, b"Traceback\nRuntimeError: not well")
        if not self.path.endswith("/logs"):
            return self._answer(200, self.server.jobs)
        number = int(self.path.split("/")[-2].rpartition("-")[2])
        return self._answer(200, {"logs": self.server.outputs.get(number, self.server.output)})

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(self.path)
        if self.path == "/api/jobs/":
            self.server.on_submit(json.loads(content))
        self._answer(200, {})

    def _answer(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def dashboard(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "NEXT_SECONDS", 0.05)
    with Dashboard() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def make_launcher(dashboard):
    def make():
        address = f"launch.ray.address=http://127.0.0.1:{dashboard.server_port}"
        return build_launcher(config.parse("", ["run.storage_root=/r", *SETTINGS, address]))

    return make


@pytest.fixture
def spec(tmp_path):
    return make_spec(run_uri=str(tmp_path / "runs" / "r"))


def end_on_submit(dashboard, spec, **values):
    """Lets every job that is submitted end at once, with these values."""

    def submit(content):
        job = make_job(submission_id=content["submission_id"], metadata=content["metadata"], **values)
        dashboard.jobs.append({**job, "start_time": len(dashboard.jobs) * 1000})

    dashboard.on_submit = submit


def test_attempts_are_numbered_and_failures_of_the_dashboard_are_ridden_out(dashboard, make_launcher, spec, capsys):
    dashboard.num_failures, dashboard.output = 2, "one\ntwo\npart"
    end_on_submit(dashboard, spec, status="FAILED", driver_exit_code=138)
    launcher = make_launcher()
    assert launcher.run(spec) == 138 and launcher.run(spec) == 138
    assert [job["submission_id"][-2:] for job in dashboard.jobs] == ["-1", "-2"]
    output = capsys.readouterr().out
    assert "not well" in output and "one\ntwo\n" in output and "part" not in output
    end_on_submit(dashboard, spec, status="SUCCEEDED", driver_exit_code=0)
    assert launcher.run(spec) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"status": "STOPPED"}, "somebody cancelled the job"),
        ({"status": "FAILED", "driver_exit_code": 1, "message": "No module named kftrain"}, "No module named kftrain"),
    ],
)
def test_an_end_that_no_attempt_mends_is_an_error(dashboard, make_launcher, spec, values, words):
    end_on_submit(dashboard, spec, **values)
    with pytest.raises(LaunchError, match=words):
        make_launcher().run(spec)


def test_a_driver_that_was_killed_is_another_attempt(dashboard, make_launcher, spec):
    end_on_submit(dashboard, spec, status="FAILED", driver_exit_code=-9)
    assert make_launcher().run(spec) == 137


def test_a_job_that_ray_forgot_is_another_attempt(dashboard, make_launcher, spec):
    lists = iter([[], [make_running(spec)], [], []])
    type(dashboard).jobs = property(lambda self: next(lists), lambda self, value: None)
    try:
        assert make_launcher().run(spec) == 138
    finally:
        del type(dashboard).jobs


def make_running(spec, **values):
    return make_job(metadata={**make_job()["metadata"], "run": spec.run_uri}, **values)


def test_another_configuration_is_refused_and_the_older_launcher_gives_way(dashboard, make_launcher, spec):
    running = make_running(spec)
    dashboard.jobs = [{**running, "metadata": {**running["metadata"], "digest": "other"}}]
    with pytest.raises(OtherJobError):
        make_launcher().run(spec)
    lead = Path(spec.run_uri, "ray", "train.json")
    assert not lead.exists(), "one that is refused takes no job from another launcher"
    dashboard.jobs = [running]

    def come_later(self):
        lead.parent.mkdir(parents=True, exist_ok=True)
        lead.write_text('{"launcher": "a later one"}')
        return [running]

    type(dashboard).jobs = property(come_later, lambda self, value: None)
    try:
        with pytest.raises(FencedError, match=FencedError.BY_LAUNCHER):
            make_launcher().run(spec)
    finally:
        del type(dashboard).jobs
    assert dashboard.requests == [], "neither submits or stops anything"


def test_logs_go_on_with_the_successor_and_end_with_it(dashboard, make_launcher, spec):
    lines = []
    with pytest.raises(LaunchError, match="no such job"):
        make_launcher().logs(spec.run_uri, "train", True, lines.append)
    dashboard.jobs, dashboard.output = [make_running(spec, status="FAILED")], "first\n"

    def write(line):
        lines.append(line)
        dashboard.jobs = [*dashboard.jobs[:1], make_running(spec, number=2, status="SUCCEEDED")]
        dashboard.outputs = {2: "second\n"}

    make_launcher().logs(spec.run_uri, "train", True, write)
    assert lines == ["first", "second"]


def test_cancel_waits_for_the_end_and_suspend_is_refused(dashboard, make_launcher, spec):
    dashboard.jobs = [make_running(spec)]

    class Stops(list):
        def append(self, path):
            super().append(path)
            if len(self) == 2:  # it was about to begin when it was told first
                dashboard.jobs[0]["status"] = "STOPPED"

    dashboard.requests = Stops()
    (name,) = make_launcher().cancel(spec.run_uri)
    assert dashboard.requests == [f"/api/jobs/{name}/stop"] * 2
    with pytest.raises(LaunchError, match="no job in Ray"):
        make_launcher().cancel(spec.run_uri)
    with pytest.raises(LaunchError, match="cannot be suspended"):
        make_launcher().suspend(spec.run_uri)


def test_a_launcher_that_is_told_to_stop_while_it_submits_leaves_no_job(dashboard, make_launcher, spec):
    launcher = make_launcher()

    def submit(content):
        dashboard.jobs = [make_running(spec, submission_id=content["submission_id"])]
        launcher.interrupted = True

    class Stops(list):
        def append(self, path):
            super().append(path)
            dashboard.jobs[0:] = [{**job, "status": "STOPPED"} for job in dashboard.jobs]

    dashboard.on_submit, dashboard.requests = submit, Stops()
    assert launcher.run(spec) == 143
    assert dashboard.requests[-1].endswith("-1/stop") and dashboard.jobs[0]["status"] == "STOPPED"


def test_a_driver_without_ray_says_what_is_missing():
    run = "runpy.run_module('kftrain.launch.ray_driver', None, '__main__')"
    hidden = f"import runpy, sys; sys.modules['ray'] = None; {run}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 13 and "install kftrain[train,ray]" in done.stdout, done.stderr


PATIENT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print(1); time.sleep(60)"


@pytest.mark.parametrize("is_early", [False, True])
def test_a_node_ends_its_worker_as_soon_as_its_pod_is_told_to_go(tmp_path, is_early):
    """By a file, because nobody calls an actor whose pod is taken away; a worker that would begin then does not."""
    stop_file, worker_file = tmp_path / "stop", tmp_path / "worker"
    environment = {**os.environ, STOP_FILE_ENV: str(stop_file), WORKER_FILE_ENV: str(worker_file)}
    if is_early:
        stop_file.touch()
    node = ray_driver.Node()
    output = node.work([sys.executable, "-c", PATIENT], {**environment, "PYTHONUNBUFFERED": "1"})
    if is_early:
        assert list(output) == [143] and not worker_file.exists()
        return
    assert next(output) == "1\n"
    assert psutil.Process(int(worker_file.read_text())).is_running()
    stop_file.touch()
    assert list(output) == [143]
    node._process.stdout.close()
