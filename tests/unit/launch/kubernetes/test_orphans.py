"""At most one live job of a run and task, and none left behind, whatever happens in whatever order.

The real launcher and the real client run against a namespace in memory; only the connection is replaced, threads do
not run, and sleeping moves a clock. Before every request and within every sleep something may happen: to the request,
to the launcher, to the job; or another launcher starts. What happens is drawn by Hypothesis.
"""

import contextlib
import io
import json
import threading
import time
import types
import urllib.parse

import kubernetes.client.rest
import pytest
import urllib3
from helpers.fakes.api_server import WEBHOOK, kubeconfig
from helpers.fakes.kube_namespace import Namespace, Refused, is_over
from helpers.launching import JOB, WORKERS
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kftrain.errors import FencedError, LaunchError
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import client, launcher, lease, logs, retry, watcher
from kftrain.launch.kubernetes.lease import read_mark
from kftrain.launch.kubernetes.watcher import Watcher
from kftrain.run.paths import RunPaths

FAULTS = ("503", "reset", "lost")
MOVES = ("pods", "fail", "permanent", "succeed", "suspend", "resume", "delete", "release")
EVENTS = ("", "", "", *MOVES, *FAULTS, "kill", "terminate")
"""What may happen at a request or in a sleep of a launcher; empty: nothing."""


class Killed(BaseException):
    """The launcher's process is gone: it asks for nothing any more."""


class Process:
    """A launcher, and what happens while it runs: one event at each request and each sleep."""

    def __init__(self, script, launcher=None):
        self.script = list(script)
        self.launcher = launcher
        self.dead = False
        self.fault = ""
        self.followed = []
        """Holds of the jobs that it created or adopted."""


class World:
    """The cluster, and the launchers that run: the last one runs within a request of the one before."""

    def __init__(self, resolved, training):
        self.resolved = resolved
        self.training = training
        self.namespace = Namespace()
        self.seconds = 0.0
        self.processes = []
        self.namespace.holds_pods = True
        self.succeeded = set()
        """Uids of the jobs that have Succeeded."""

    # -- what a launcher sees -----------------------------------------------------------------------------------------

    def sleep(self, seconds):
        """Time passes, and something may happen."""
        self.seconds += max(seconds, 0.01)
        self.happen()

    def request(self, method, url, body=None, fields=None, preload_content=True, **_):
        """Stands for `urllib3.PoolManager.request`."""
        self.happen()
        fault, self.processes[-1].fault = self.processes[-1].fault, ""
        if fault == "reset":
            raise urllib3.exceptions.ProtocolError(fault)
        if fault == "503":
            return _answer(503, {"message": WEBHOOK}, preload_content)
        if method == "POST" and not self.namespace.jobs():
            at_work = [name for name, pod in self.namespace.objects["pods"].items() if not is_over(pod)]
            assert not at_work, "the new job meets pods of an older one at work"
        parts = urllib.parse.urlsplit(url)
        query = dict(fields or urllib.parse.parse_qsl(parts.query))
        status, document = self.namespace.answer(method, parts.path, query, json.loads(body) if body else None)
        if (method, status) == ("DELETE", 200) and "/pytorchjobs/" in parts.path and self.processes[-1].followed:
            held = self.processes[-1].followed[-1]
            assert not held.is_lost(document), "it has deleted the job of another launcher"
        if fault == "lost":
            raise urllib3.exceptions.ProtocolError(fault)
        return _answer(status, document, preload_content)

    # -- what happens -------------------------------------------------------------------------------------------------

    def happen(self):
        """The next event of the running launcher; when there are none left, everything goes well."""
        process = self.processes[-1]
        event = process.script.pop(0) if process.script else "well"
        process.dead = process.dead or event == "kill"
        if process.dead:
            raise Killed
        if isinstance(event, tuple):
            self.launch(event)
        elif event == "terminate" and process.launcher:
            process.launcher.interrupted = True
        elif event in FAULTS:
            process.fault = event
        elif event:
            self.move(event)

    def move(self, event):
        """What operator, kubelet or a person do, where it is possible."""
        job = self.namespace.objects["pytorchjobs"].get(JOB)
        if event in ("release", "well") and any(map(_is_going, self.namespace.objects["pods"].values())):
            self.namespace.release_pods()
        elif job is not None and (event == "delete" or not _has_ended(job)):
            with contextlib.suppress(Refused):  # no such pod
                getattr(self, event)(job)

    def pods(self, job):
        """The operator makes what is missing."""
        if not job["spec"]["runPolicy"].get("suspend"):
            self.namespace.run_pods(JOB)

    def fail(self, job):
        """A pod ends with a code that the operator retries."""
        pod = self.namespace.get("pods", WORKERS[1])
        if not is_over(pod):
            self.namespace.end_pod(WORKERS[1], 139)
            if not _is_going(pod):
                self.namespace.recreate(WORKERS[1])

    def permanent(self, job):
        """A pod ends with a code that it does not."""
        if not is_over(self.namespace.get("pods", WORKERS[1])):
            self.namespace.end_pod(WORKERS[1], 10)
            self.namespace.condition(JOB, "Failed")

    def succeed(self, job):
        """All pods end with 0."""
        if not job["spec"]["runPolicy"].get("suspend"):
            self.namespace.finish(JOB)
            self.succeeded.add(job["metadata"]["uid"])

    def suspend(self, job):
        """Kueue takes the pods away."""
        self.namespace.suspend(JOB)

    def resume(self, job):
        """Kueue admits the job again."""
        self.namespace.suspend(JOB, False)

    def delete(self, job):
        """Somebody deletes the job."""
        self.namespace.delete("pytorchjobs", JOB)

    def release(self, job):
        """Nothing is going."""

    def well(self, job):
        """The next thing on the way to success."""
        if job["spec"]["runPolicy"].get("suspend"):
            self.resume(job)
        elif not self.namespace.pods():
            self.pods(job)
        else:
            self.succeed(job)

    # -- who acts -----------------------------------------------------------------------------------------------------

    def launch(self, script):
        """A launcher from its start to its end: it tells the truth, and leaves its job only if it was killed.

        Or if another launcher has adopted it. Returns its exit code; None: it was killed or has raised.
        """
        process = Process(script, build_launcher(self.resolved))
        process.launcher._wake = types.SimpleNamespace(wait=self.sleep, clear=lambda: None)
        self.processes.append(process)
        try:
            code = process.launcher.run(self.training)
        except (Killed, LaunchError, FencedError):
            code = None
        self.processes.pop()
        if code == 0:
            assert process.followed[-1].uid in self.succeeded, "it has seen no success of its job"
        left = {read_mark(job) for job in self.namespace.objects["pytorchjobs"].values()}
        assert process.dead or not left & {lease.mark for lease in process.followed}, "it has left its job behind"
        return code

    def finish(self):
        """The exit handler of the pipeline run, and what remains of it after the grace of its pods."""
        self.processes.append(Process([""] * 5))
        build_launcher(self.resolved).clean(RunPaths(self.training.run_uri), "")
        self.processes.pop()
        self.namespace.release_pods()
        assert (self.namespace.jobs(), self.namespace.pods()) == ([], []), "something is left"


def _answer(status, document, preload_content):
    body = io.BytesIO(json.dumps(document).encode())
    return urllib3.HTTPResponse(body, {}, status, preload_content=preload_content)


def _is_going(pod):
    return "deletionTimestamp" in pod["metadata"]


def _has_ended(job):
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] in ("Succeeded", "Failed") for c in conditions)


class NoWait(threading.Condition):
    """Nobody is there to wait for."""

    def wait_for(self, predicate, timeout=None):
        return predicate()


class NoThread:
    """A thread that never runs: watch and logs only explain."""

    def __init__(self, **_):
        pass

    def start(self):
        pass

    def join(self, timeout=None):
        pass

    def is_alive(self):
        return False


@pytest.fixture
def worlds(tmp_path, monkeypatch, make_job):
    """A function that makes a new world, which the launchers are in from then on."""
    worlds = []

    class KnownWatcher(Watcher):
        def __init__(self, *arguments):
            worlds[-1].processes[-1].followed.append(arguments[3])
            super().__init__(*arguments)

    def connect(client, *_):
        client.pool_manager = types.SimpleNamespace(request=lambda *a, **options: worlds[-1].request(*a, **options))

    def make():
        worlds.append(World(*make_job()))
        return worlds[-1]

    (tmp_path / "kubeconfig").write_text(kubeconfig("http://nowhere"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path / "none")
    monkeypatch.setattr(kubernetes.client.rest.RESTClientObject, "__init__", connect)
    clock = {"sleep": lambda seconds: worlds[-1].sleep(seconds), "monotonic": lambda: worlds[-1].seconds}
    for module in (lease, launcher, watcher, retry):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(time=time.time, **clock))
    for module in (watcher, logs):
        threads = {"Thread": NoThread, "Event": threading.Event, "Lock": threading.Lock, "Condition": NoWait}
        monkeypatch.setattr(module, "threading", types.SimpleNamespace(**threads))
    monkeypatch.setattr(launcher, "Watcher", KnownWatcher)
    monkeypatch.setattr(launcher, "Heartbeat", contextlib.nullcontext)
    return make


scripts = st.lists(st.sampled_from(EVENTS), max_size=12)
others = st.lists(st.sampled_from(["", "delete", "terminate", "503", "lost"]), max_size=8)
at = st.integers(0, 12)


class Orphans(RuleBasedStateMachine):
    """Launchers come and go, one after the other and into each other."""

    def __init__(self, make_world):
        super().__init__()
        self.world = make_world()

    @rule(script=scripts)
    def launch(self, script):
        """A first launcher, or the retry of one that is gone."""
        self.world.launch(script)

    @rule(before=st.sampled_from(MOVES), at=at)
    def launch_and_kill(self, before, at):
        """It is killed at any request."""
        self.world.launch(["", "", "", before, *[""] * at, "kill"])

    @rule(script=scripts, other=others, at=at)
    def launch_into_a_race(self, script, other, at):
        """Between two requests of it another one starts, gets somewhere, and is killed."""
        self.world.launch([*script[:at], (*other, "kill"), *script[at:]])

    @rule(event=st.sampled_from(MOVES))
    def meanwhile(self, event):
        """No launcher runs."""
        self.world.move(event)

    @rule()
    def terminate(self):
        """Somebody has terminated the pipeline run."""
        self.world.finish()

    @invariant()
    def one_live_job(self):
        """The name follows from run and task."""
        assert self.world.namespace.jobs() in ([], [JOB])

    def teardown(self):
        """Whatever has happened."""
        self.world.finish()


def test_d10_d11_d12_no_launch_is_doubled_and_nothing_is_left(worlds):
    """Success is honest, and after the exit handler no job and no pod is there."""
    without_shrinking = (Phase.generate,)  # that would take minutes; what is found is short
    run_state_machine_as_test(
        lambda: Orphans(worlds),
        settings=settings(
            derandomize=True, max_examples=400, stateful_step_count=10, deadline=None, phases=without_shrinking
        ),
    )


@pytest.mark.parametrize("event", [*MOVES, *FAULTS, "kill", "terminate"])
def test_d12_every_event_at_every_request_of_a_launch(event, worlds):
    """One event, at each of the requests and sleeps of a launch that otherwise goes well."""
    for number in range(30):
        world = worlds()
        code = world.launch([""] * number + [event])
        if event not in ("kill", "terminate", "delete", "permanent"):
            assert code == 0
        assert world.launch([]) == 0, "the next launch goes well"
        world.finish()
