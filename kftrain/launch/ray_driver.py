"""The driver of a job on a Ray cluster: `python -m kftrain.launch.ray_driver DOCUMENT`, started by Ray's job API.

It runs one worker a node, each below an actor in a placement group, and prints their lines. Ray places and ends them;
it has no part in what they compute: they meet at node 0, as on every backend.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kftrain.core.progress import to_log
from kftrain.errors import LaunchError, Preempted, RetryableError
from kftrain.launch.ray_jobs import STOP_FILE_ENV, WAITS, WORKER_FILE_ENV, WORKS
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV, PORT_ENV

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:
    ray = None

POLL_SECONDS = 1.0

STOPPED_CODE = Preempted.exit_code
STOP_FILE, WORKER_FILE = STOP_FILE_ENV, WORKER_FILE_ENV
"""Plain values, because the class `Node` goes to its nodes by value, and kftrain may be in another Python there."""


class Node:
    """The actor of one node. `work` runs in one of its threads, and `stop` in another one meanwhile."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._has_ended = False
        self._lock = threading.Lock()

    def find_address(self) -> tuple[str, int]:
        """Return this node's address, and a port of it that is free."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def work(self, command: list[str], environment: dict[str, str]) -> Iterator[str | int]:
        """Run a worker; yield the lines that it prints, and its exit code at last. It dies with this actor."""
        # Whatever Ray tells its own processes is not meant for the worker's.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        variables = {**inherited, **environment}
        program = shutil.which(command[0], path=variables.get("PATH")) or command[0]
        # Bound from its first instruction: an actor that is killed while Python starts leaves nothing either.
        bound = [program, "-m", "kftrain.process.parent_death", str(os.getpid()), program, *command[1:]]
        stop_file = variables.get(STOP_FILE)
        if stop_file:
            threading.Thread(target=self._stop_at, args=(stop_file,), daemon=True).start()
        with self._lock:
            if self._is_stopped or (stop_file and os.path.exists(stop_file)):
                yield STOPPED_CODE
                return
            pipes: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
            }
            self._process = subprocess.Popen(bound, env=variables, text=True, errors="replace", **pipes)
        if WORKER_FILE in variables:
            with open(variables[WORKER_FILE], "w") as file:
                file.write(str(self._process.pid))
        assert self._process.stdout is not None
        for line in self._process.stdout:  # one by one: Ray drives a generator by `send`
            yield str(line)
        code = self._process.wait()
        self._has_ended = True
        yield 128 - code if code < 0 else code

    def stop(self) -> None:
        """Tell the worker to commit and to end."""
        with self._lock:
            if self._process is not None and not self._is_stopped:
                self._process.terminate()
            self._is_stopped = True

    def _stop_at(self, stop_file: str) -> None:
        """Tell the worker to end as soon as a file is there: a pod that is taken away has no other way to say so."""
        while not (self._is_stopped or self._has_ended):
            if os.path.exists(stop_file):
                self.stop()
            time.sleep(0.2)


class Driver:
    """Runs a job's nodes. `document` has their `command`, `environment`, number (`nodes`) and resources (`bundle`)."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._stop = threading.Event()
        self._codes: list[int] = []
        """Exit codes of nodes, in the order of their ends."""

    def run(self) -> int:
        """Run the job; return the exit code of the node that failed first, 0 where none did."""
        ray.init(log_to_driver=False, logging_level="WARNING")
        signal.signal(signal.SIGTERM, self._on_signal)  # after Ray, which sets its own
        num_nodes, bundle = self._document["nodes"], self._document["bundle"]
        group = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
        if not self._wait_for(group):
            return STOPPED_CODE
        actors = [start_actor(group, bundle, rank) for rank in range(num_nodes)]
        addresses = ray.get([actor.find_address.remote() for actor in actors])
        to_log(f"{WORKS}{', '.join(host for host, _ in addresses)}")
        host, port = addresses[0]
        threads = []
        for rank, actor in enumerate(actors):
            place = {NODE_RANK_ENV: str(rank), ADDRESS_ENV: host, PORT_ENV: str(port)}
            lines = actor.work.remote(self._document["command"], {**self._document["environment"], **place})
            threads.append(threading.Thread(target=self._follow, args=(rank, lines), daemon=True))
            threads[-1].start()
        self._wait_for_end(threads, actors)
        return next((code for code in self._codes if code), 0)

    def _wait_for(self, group: PlacementGroup) -> bool:
        """Wait until all nodes are there, and say what for; False if the job was told to stop before."""
        before = ""
        while not group.wait(POLL_SECONDS):
            if self._stop.is_set():
                return False
            reason = explain_waiting(group, self._document["bundle"], self._document["nodes"])
            if reason != before:
                to_log(f"{WAITS}{reason}")
            before = reason
        return not self._stop.is_set()

    def _wait_for_end(self, threads: list[threading.Thread], actors: list[Any]) -> None:
        """Return when all nodes have ended; hand a request to stop on to them once: a second one would kill them."""
        is_told = False
        for thread in threads:
            while thread.is_alive():
                if self._stop.is_set() and not is_told:
                    is_told = True
                    for actor in actors:
                        actor.stop.remote()
                thread.join(POLL_SECONDS / 4)

    def _follow(self, rank: int, lines: Any) -> None:
        """Print the lines of a node's worker until it ends, and keep its exit code."""
        code = RetryableError.exit_code
        try:
            for reference in lines:
                line = ray.get(reference)
                if isinstance(line, int):
                    code = line
                else:
                    sys.stdout.write(line)
                    sys.stdout.flush()
        except ray.exceptions.RayError as error:
            to_log(f"node {rank} is lost: {' '.join(str(error).split())[:300]}")
        self._codes.append(code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()


def start_actor(group: PlacementGroup, bundle: dict[str, float], rank: int) -> Any:
    """Start the actor of a node in its bundle of the group."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    options = ray.remote(Node).options(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0),
        resources=others,
        max_concurrency=3,
        runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},  # else 15: whatever else runs would starve a training
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    )
    return options.remote()


def explain_waiting(group: PlacementGroup, bundle: dict[str, float], num_nodes: int) -> str:
    """Say what a placement group waits for: Ray's word for it, what is wanted, and what there is."""
    word = placement_group_table(group).get("stats", {}).get("scheduling_state", "PENDING")
    totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_large = sum(all(total.get(name, 0) >= amount for name, amount in bundle.items()) for total in totals)
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    free, total = ray.available_resources(), ray.cluster_resources()
    left = ", ".join(f"{name} {free.get(name, 0):g} of {total.get(name, 0):g}" for name in bundle)
    return (
        f"{word}: the job wants {num_nodes} nodes with {wanted}; {num_large} of the cluster's {len(totals)} have that "
        f"when they are idle; free on all together: {left}"
    )


def main() -> int:
    """Run the job of the document in the command line; return its exit code."""
    if ray is None:
        error = LaunchError(
            "the Python of the job's driver has no Ray",
            where="launch.ray.python",
            value=sys.executable,
            fix="install kftrain[train,ray] on the cluster's nodes, with the Ray version of the cluster",
        )
        to_log(error.line)
        return error.exit_code
    try:
        return Driver(json.loads(sys.argv[1])).run()
    except ray.exceptions.RayError as lost:
        to_log(f"Ray gave up: {' '.join(str(lost).split())[:300]}")
        return RetryableError.exit_code


if __name__ == "__main__":
    sys.exit(main())
