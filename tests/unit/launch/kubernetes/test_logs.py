"""Logs of pods: every line once, whatever breaks, and never more than a bounded amount of it."""

import threading
import time
import tracemalloc

import pytest
from helpers.launching import JOB, PATIENCE_SECONDS, WORKERS, job_client, threads, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import client, logs
from kftrain.launch.kubernetes import job_client as job_client_module
from kftrain.launch.kubernetes.logs import Logs, parse_moment
from kftrain.launch.kubernetes.observation import Pod

POD = Pod("p", "u", 0, running=True)


def stamp(nanoseconds):
    """As Go prints it, without zeros at the end."""
    return f"2026-11-21T10:00:{nanoseconds // 10**9:02d}.{nanoseconds % 10**9:09d}".rstrip("0").rstrip(".") + "Z"


class ScriptedSource:
    """A pod that runs until its last connection, and what each connection gives before it breaks."""

    def __init__(self, *connections):
        self.connections = list(connections)
        self.asked = []

    def read_pod(self, name):
        phase = "Running" if len(self.connections) > 1 else "Succeeded"
        return {"metadata": {"uid": "u"}, "status": {"phase": phase}}

    def read_log_lines(self, pod_name, since="", follow=True):
        self.asked.append(since)
        yield from self.connections.pop(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(logs, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(logs, "JOIN_SECONDS", PATIENCE_SECONDS)


def shown(source, num_pods=1):
    found = []
    one = Logs(source, num_pods, found.append)
    one.follow([POD])
    one.finish()
    return found


def raw(nanoseconds, text):
    return f"{stamp(nanoseconds)} {text}\n".encode()


@st.composite
def broken_connections(draw):
    """(lines with their times, connections): times repeat; a connection begins at the last time of the one before."""
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 10, 100, 10**8, 10**9]), min_size=1, max_size=30))
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    lines = [(at, f"line {index}") for index, at in enumerate(times)]
    ends = sorted(draw(st.lists(st.integers(0, len(lines)), max_size=5)))
    whole_seconds = draw(st.booleans())
    connections, done = [], 0
    for end in [*ends, len(lines)]:
        newest = max((at for at, _ in lines[:done]), default=-1)
        if whole_seconds:  # an API server that cuts `sinceTime`
            newest -= newest % 10**9
        connection = [raw(at, text) for at, text in lines[:end] if at >= newest]
        torn = draw(st.booleans()) and end < len(lines)
        connections.append([*connection, raw(*lines[end])[:-2]] if torn else connection)
        done = max(done, end)
    return lines, connections


@settings(derandomize=True, max_examples=200, deadline=None)
@given(broken_connections())
def test_every_line_is_shown_once_across_broken_connections(case):
    """Many lines may bear the same nanosecond, `sinceTime` is inclusive, and the last line may be torn."""
    lines, connections = case
    source = ScriptedSource(*connections)
    assert shown(source) == [text for _, text in lines]


def test_a_line_without_an_end_is_shown_when_the_container_has_ended():
    assert shown(ScriptedSource([raw(1, "a"), raw(2, "b")[:-1]])) == ["a", "b"]


def test_a_clock_that_is_set_back_hides_nothing():
    lines = [raw(5 * 10**9, "a"), raw(3 * 10**9, "b"), raw(4 * 10**9, "c")]
    assert shown(ScriptedSource(lines)) == ["a", "b", "c"]


def test_what_the_kubelet_says_itself_is_no_line_of_the_log():
    """It has status 200, no time, and would be taken for the time to go on from."""
    words = b"unable to retrieve container logs for containerd://0123\n"
    source = ScriptedSource([raw(1, "a"), words], [words], [raw(1, "a"), raw(2, "b")])
    assert shown(source) == ["a", "b"]
    assert source.asked == ["", stamp(1), stamp(1)]


def test_times_are_compared_as_times():
    stamps = ["2026-01-01T00:00:00.9Z", "2026-01-01T00:00:00.95Z", "2026-01-01T00:00:01Z", "2026-01-01T02:00:02+02:00"]
    assert sorted(stamps, key=parse_moment) == stamps
    assert parse_moment("2026-01-01T02:00:00.5+02:00") == parse_moment("2026-01-01T00:00:00.500000000Z")
    assert parse_moment("unable") is None and parse_moment("") is None


def test_a_flood_is_counted_instead_of_shown_but_steps_are_shown(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINES_PER_SECOND", 10)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    flood = [raw(index, f"line {index}") for index in range(100)]
    found = shown(ScriptedSource([*flood, raw(100, "kftrain| step 3/20 loss 1")]), num_pods=2)
    assert found[:10] == [f"worker-0: line {index}" for index in range(10)]
    assert found[10] == "worker-0: kftrain| step 3/20 loss 1"
    assert found[11] == "worker-0: … 91 lines left out; the complete log is in the run's folder"
    assert len(found) == 12


def test_who_asks_for_the_logs_gets_all_of_them(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINES_PER_SECOND", 10)
    found = []
    one = Logs(ScriptedSource([raw(index, f"line {index}") for index in range(100)]), 1, found.append, limited=False)
    one.follow([POD])
    one.drain()
    assert found == [f"line {index}" for index in range(100)]


class BreaksOff(ScriptedSource):
    """A pod that has ended, and connections that break after what they give; the last one holds."""

    def read_pod(self, name):
        return {"metadata": {"uid": "u"}, "status": {"phase": "Succeeded"}}

    def read_log_lines(self, pod_name, since="", follow=True):
        self.asked.append(since)
        yield from self.connections.pop(0)
        if self.connections:
            raise ConnectionError("reset")


@pytest.mark.parametrize("follow", [False, True])
def test_a_connection_that_breaks_costs_nothing_of_the_log_of_a_pod_that_has_ended(follow):
    source, found = BreaksOff([raw(1, "a")], [], [raw(1, "a"), raw(2, "b")], [raw(2, "b"), raw(3, "c")]), []
    one = Logs(source, 1, found.append, follow=follow, limited=False)
    one.follow([POD])
    one.drain()
    assert found == ["a", "b", "c"]
    assert source.asked == ["", stamp(1), stamp(1), stamp(2)]


def test_a_log_whose_connections_break_for_ever_says_so(capsys):
    source = BreaksOff([raw(1, "a")], *[[raw(1, "a")]] * 20)
    assert shown(source) == ["a"]
    assert len(source.asked) == logs.MAX_BROKEN + 1
    assert "warning: the log of p breaks off" in capsys.readouterr().out


def test_a_long_download_is_not_cut(monkeypatch):
    monkeypatch.setattr(logs, "JOIN_SECONDS", 0.01)

    def slow():
        for index in range(5):
            time.sleep(0.05)
            yield raw(index, f"line {index}")

    found = []
    one = Logs(ScriptedSource(slow()), 1, found.append, follow=False, limited=False)
    one.follow([POD])
    one.drain()
    assert found == [f"line {index}" for index in range(5)]


def test_draining_reads_what_a_pod_that_goes_on_has_printed_and_then_ends():
    """The connection that was followed has ended, and the pod has printed since."""

    follows, asked, found = [], threading.Event(), []

    class Running(ScriptedSource):
        def read_pod(self, name):
            return {"metadata": {"uid": "u"}, "status": {"phase": "Running"}}

        def read_log_lines(self, pod_name, since="", follow=True):
            follows.append(follow)
            asked.set()
            if follow:
                wait_until(lambda: not one._follow)
            yield from self.connections.pop(0)

    one = Logs(Running([raw(1, "a")], [raw(1, "a"), raw(2, "b")]), 1, found.append)
    one.follow([POD])
    assert asked.wait(PATIENCE_SECONDS)
    one.drain()
    assert found == ["a", "b"] and follows == [True, False]


def test_a_pod_that_prints_for_ever_is_not_drained_for_ever(monkeypatch):
    """The job has ended, and one of its pods has not; what it had printed by then is there."""
    monkeypatch.setattr(logs, "DRAIN_SECONDS", 0.1)
    found, numbers = [], iter(range(10**9))

    class Endless(ScriptedSource):
        def read_pod(self, name):
            return {"metadata": {"uid": "u"}, "status": {"phase": "Running"}}

        def read_log_lines(self, pod_name, since="", follow=True):
            while follow:
                time.sleep(0.01)
                yield raw(next(numbers), "line")
            yield raw(next(numbers), "last")

    one = Logs(Endless(), 1, found.append)
    one.follow([POD])
    wait_until(lambda: found)
    one.drain()
    assert found[-2:] == ["line", "last"]


def test_the_log_of_a_pod_that_takes_the_name_just_before_the_connection_is_not_shown():
    """Logs are asked for by name; the pod was read before, when it was still there."""
    connected = threading.Event()

    class Replaced(ScriptedSource):
        def read_pod(self, name):
            return {"metadata": {"uid": "u2" if connected.is_set() else "u"}, "status": {"phase": "Running"}}

        def read_log_lines(self, pod_name, since="", follow=True):
            connected.set()
            for index in range(10**9):
                yield raw(index, "of another pod")
                time.sleep(0.01)

    assert shown(Replaced()) == []


def test_the_log_of_a_pod_that_is_taken_away_while_it_is_read_is_shown():
    taken = threading.Event()

    class Deleted(ScriptedSource):
        def read_pod(self, name):
            return None if taken.is_set() else super().read_pod(name)

        def read_log_lines(self, pod_name, since="", follow=True):
            taken.set()
            yield from super().read_log_lines(pod_name, since, follow)

    assert shown(Deleted([raw(1, "a"), raw(2, "last words")], [])) == ["a", "last words"]


def test_logs_that_nobody_reads_end_with_the_error_of_the_pipe():
    def write(line):
        raise BrokenPipeError

    one = Logs(ScriptedSource([raw(1, "a")]), 1, write, limited=False)
    one.follow([POD])
    with pytest.raises(BrokenPipeError):
        one.drain()
    assert one.is_broken


def test_a_console_that_nobody_reads_holds_up_neither_the_launcher_nor_what_it_learns(monkeypatch):
    monkeypatch.setattr(logs, "MAX_WAITING_CHARACTERS", 20)
    monkeypatch.setattr(logs, "JOIN_SECONDS", 0.05)
    is_read, found = threading.Event(), []

    def write(line):
        assert is_read.wait(PATIENCE_SECONDS)
        found.append(line)

    lines = [raw(index, f"line {index}") for index in range(20)]
    one = Logs(ScriptedSource([*lines, raw(50, "kftrain| step 7/20 loss 1")], []), 1, write)
    one.follow([POD])
    wait_until(lambda: one.step == 7)
    one.follow([Pod("p", "u2", 1, running=True)])
    assert one.copy_tails()["worker-0"][-1] == "kftrain| step 7/20 loss 1" and not found
    one.finish()
    is_read.set()
    one._console.flush(PATIENCE_SECONDS)
    one._console.show(["later"])
    one._console.flush(PATIENCE_SECONDS)
    *told, last = found
    shown = [line for line in told if not line.startswith("…")]  # how many depends on when the console began to wait
    num_left_out = sum(int(line.split()[1]) for line in told if line.startswith("…"))
    everything = [*(f"line {index}" for index in range(20)), "kftrain| step 7/20 loss 1"]
    assert last == "later" and len(shown) + num_left_out == len(everything) and len(shown) <= 8
    assert shown == [line for line in everything if line in shown]


def test_the_next_second_tells_how_much_was_left_out(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINES_PER_SECOND", 1)
    now = iter([0.0, 0.1, 0.2, 1.5, 1.6])
    gauge = logs._Gauge()
    told = []
    for at in now:
        if not gauge.is_same_second(at):
            told.append(gauge.take_left_out())
        gauge.admits()
    assert told == [0, 2]


def test_step_and_progress_are_those_of_the_present_attempt():
    one = Logs(ScriptedSource([raw(1, "kftrain| step 7/20 loss 1"), raw(2, "step 9/20 of somebody else")]), 1, str)
    one.follow([POD])
    one.finish()
    assert (one.step, one.target_step, one.progress) == (7, 20, "step 7/20 loss 1")
    one._source.connections.append([])
    one.follow([Pod("p", "u2", 0, running=True)])
    assert one.step == 0


def test_a_log_that_cannot_be_followed_any_more_says_so(capsys):
    """The thread must not end in a traceback."""

    class Broken:
        def read_pod(self, name):
            raise LaunchError("the API server did not answer")

    assert shown(Broken()) == []
    assert "warning: the log of p is no longer shown: the API server did not answer" in capsys.readouterr().out


# -- over real connections --------------------------------------------------------------------------------------------


def test_connections_that_break_lose_and_repeat_nothing(training, server, namespace):
    """Cut again and again while lines come, many of them within the same nanosecond."""
    for number in range(10):
        namespace.write(WORKERS[1], *(f"line {number}.{part}." for part in range(20)), stamp=stamp(10**9 + number // 3))
        if number % 2:
            time.sleep(0.03)
        server.cut_streams()
    training.wait_for("line 9.19.")
    namespace.finish(JOB)
    assert training.finish() == 0
    said = [line for line in training.output.splitlines() if line.startswith("worker-1: line ")]
    assert said == [f"worker-1: line {number}.{part}." for number in range(10) for part in range(20)]


def test_logs_that_are_asked_for_survive_a_connection_that_breaks(server, namespace, fast):
    """`kftrain logs` of a pod that runs: the API server goes in the middle of the answer."""
    namespace.create("pods", {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Running"}})
    lines = [f"line {index} {'x' * 4000}" for index in range(10000)]
    namespace.write("p", *lines)
    pod, found = Pod("p", namespace.get("pods", "p")["metadata"]["uid"], 0, running=True), []

    def write(line):
        found.append(line)
        if len(found) in (10, 5000):  # far from each other and from the end: sockets buffer megabytes
            server.cut_streams()

    one = Logs(job_client(), 1, write, follow=False, limited=False)
    one.follow([pod])
    one.drain()
    assert found == lines
    assert sum(path.endswith("/p/log") for _, path in server.requests) == 3


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_log_that_is_refused_for_a_moment_is_asked_for_again(status, server, namespace, fast):
    namespace.create("pods", {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Running"}})
    namespace.write("p", "ValueError: the reason")
    namespace.end_pod("p", 1)
    pod, found = Pod("p", namespace.get("pods", "p")["metadata"]["uid"], 0, running=True), []
    server.fail("GET", "/p/log", status)
    one = Logs(job_client(), 1, found.append)
    one.follow([pod])
    one.drain()
    assert found == ["ValueError: the reason"]


def test_a_pod_that_takes_the_place_of_another_is_followed_anew(training, namespace):
    namespace.write(WORKERS[1], "of the first")
    training.wait_for("worker-1: of the first")
    namespace.end_pod(WORKERS[1], 143)
    namespace.recreate(WORKERS[1])
    namespace.write(WORKERS[1], "of the second")
    training.wait_for("worker-1: of the second")
    namespace.finish(JOB)
    assert training.finish() == 0
    assert training.output.count("of the first") == 1


def test_one_worker_needs_no_prefix(launch, namespace):
    one = launch("train", "launch.nodes=1")
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.write(WORKERS[0], "hello")
    one.wait_for("\nhello\n")
    namespace.finish(JOB)
    assert one.finish() == 0


def test_an_endless_line_costs_its_beginning(server, namespace, fast):
    namespace.create("pods", {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Running"}})
    namespace.write("p", "x" * 10_000_000, "after it")
    namespace.end_pod("p", 0)
    first, second = job_client().read_log_lines("p")
    assert len(first) == job_client_module.MAX_LINE_BYTES + 1 and first.endswith(b"x\n")
    assert second.endswith(b" after it\n")


class Endless:
    """An answer of 10 MB without a newline."""

    def stream(self):
        yield b"2026-11-21T10:00:00Z "
        for _ in range(160):
            yield b"x" * 65536
        yield b"\n"


def test_an_endless_line_is_not_kept_in_memory():
    tracemalloc.start()
    (line,) = client._split_lines(Endless(), job_client_module.MAX_LINE_BYTES)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(line) == job_client_module.MAX_LINE_BYTES + 1
    assert peak_bytes < 1_000_000


def test_the_threads_of_logs_end_with_the_launcher(training, namespace):
    namespace.finish(JOB)
    assert training.finish() == 0
    wait_until(lambda: not any(thread.name.startswith("log of") for thread in threads()))
