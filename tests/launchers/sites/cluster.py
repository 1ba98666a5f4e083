"""What the backends with pods have in common: a namespace, an object store, images of the present code."""

import contextlib
import dataclasses
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from types import MappingProxyType

import pytest
import yaml
from e2e.namespace import Namespace, held_images
from e2e.operator_control import Operator, move_operators
from helpers.fakes.object_store import BUCKET
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from launchers.at_once import find_shared_folder, hold_lock, make_once
from launchers.site import Site

from kftrain.launch.kubernetes.labels import SEEN_ANNOTATION
from kftrain.run.paths import RunPaths

VOLUME = {
    "launch.kubernetes.volumes": "[{name: v, persistentVolumeClaim: {claimName: nope}}]",
    "launch.kubernetes.volume_mounts": "[{name: v, mountPath: /v}]",
}

WAITING = {
    "image": ({"launch.kubernetes.trainer_image": "localhost/none:1"}, "ImagePull", 25),
    "node": ({"launch.kubernetes.cpu": 999}, "Insufficient cpu", 15),
    "claim": (VOLUME, 'persistentvolumeclaim "nope" not found', 15),
    "namespace": (
        {"launch.kubernetes.volumes": "[{name: v, hostPath: {path: /tmp}}]"},
        "violates PodSecurity",
        20,
    ),
}
"""Case -> settings, what the reason contains, seconds until somebody knows it."""


GRACE = {"launch.kubernetes.termination_grace_seconds": 20}
"""A pod on a dead node is waited for until its grace is over."""

SMALL = MappingProxyType({"launch.kubernetes.cpu": "140m", **GRACE})


class ClusterSite(Site):
    """A namespace of a real cluster.

    `resource` is where the backend's jobs are: group, version, plural; `controller` is the deployment that works on
    them.
    """

    def __init__(self, namespace, resource, controller, **values):
        super().__init__(where=("-n", namespace.name), waiting=WAITING, **values)
        self.namespace = namespace
        self._resource = resource
        self._controller = controller

    def mend(self):
        """Takes away the jobs of a failed test, whose launcher is dead: they would keep their CPUs from all others."""
        group, version, plural = self._resource
        self.namespace.custom.delete_collection_namespaced_custom_object(group, version, self.namespace.name, plural)

    def list_alive(self, run_uri):
        """Pods whose container has not ended."""
        return [name for name, pod in self._pods(run_uri).items() if pod.status.phase not in ("Succeeded", "Failed")]

    def list_left(self, run_uri):
        """Jobs and pods."""
        return [*self._jobs(run_uri), *self._pods(run_uri)]

    def kill_worker(self, run_uri, rank=0):
        """Takes the pod away at once: its container gets SIGKILL."""
        self.namespace.delete_pod(self._find_pod(run_uri, rank), grace_seconds=0)

    def stop_worker(self, run_uri, rank=0):
        """Evicts the pod, as a drained node does: SIGTERM, then its grace."""
        name = self._find_pod(run_uri, rank)
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=self.namespace.name))
        self.namespace.core.create_namespaced_pod_eviction(name, self.namespace.name, body)

    def age_last_look(self, run_uri, days):
        seen = (datetime.now(timezone.utc) - timedelta(days=days)).isoformat(timespec="seconds")
        group, version, plural = self._resource
        for name in self._jobs(run_uri):
            patch = {"metadata": {"annotations": {SEEN_ANNOTATION: seen}}}
            self.namespace.custom.patch_namespaced_custom_object(
                group, version, self.namespace.name, plural, name, patch
            )

    @contextlib.contextmanager
    def disturb_controller(self):
        operator = Operator(self._controller)
        with operator.away():
            yield

    def lose_node(self, run_uri, rank, disturb):
        """Lets a worker's node die, but no controller's: that one is away is another promise."""
        nodes = {pod.spec.node_name for pod in self._pods(run_uri).values() if pod.status.phase == "Running"}
        node = max(nodes)  # the same for all backends, whose jobs have a pod on each
        disturb("stop-node", node, prepare=lambda: move_operators(node))

    def check_request(self, text):
        kubectl = shutil.which("kubectl") or pytest.skip("no kubectl")
        documents = [document for document in yaml.safe_load_all(text) if document]
        command = [kubectl, "apply", "-n", self.namespace.name, "--dry-run=server", "--validate=strict", "-f", "-"]
        for document in documents:
            shown = yaml.safe_dump(document)
            done = subprocess.run(command, input=shown, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "created (server dry run)" in done.stdout, done.stderr

    def _find_pod(self, run_uri, rank):
        """The pod of a rank that runs: pods of one run are told apart by the end of their names, or of their host."""
        for name, pod in self._pods(run_uri).items():
            host = pod.spec.hostname or name
            if host.rsplit("-", 1)[-1] == str(rank) and pod.status.phase == "Running":
                return name
        raise AssertionError(f"no pod of rank {rank}")

    def _pods(self, run_uri):
        return self.namespace.pods(f"kftrain.io/run={RunPaths(run_uri).run_id}")

    def _jobs(self, run_uri):
        listed = self.namespace.custom.list_namespaced_custom_object(
            self._resource[0],
            self._resource[1],
            self.namespace.name,
            self._resource[2],
            label_selector=f"kftrain.io/run={RunPaths(run_uri).run_id}",
        )
        return [item["metadata"]["name"] for item in listed["items"]]


@contextlib.contextmanager
def open_cluster(
    request,
    backend,
    resource,
    controller,
    prepare=lambda namespace: None,
    make_site=ClusterSite,
    build_flags="",
    changes=None,
    small=SMALL,
    **values,
):
    """Opens the site of a backend with pods, in a namespace of its own that enforces `restricted`.

    `build_flags` are arguments of the engine for its trainer image, `changes` are settings that differ there; `small`
    are those of a job that finds room on one node, beside the operators and the other backends that lose theirs.
    """
    request.getfixturevalue("kubeconfig")
    store, mlflow_uri = request.getfixturevalue("store"), request.getfixturevalue("mlflow_uri")
    with Namespace.create(labels={"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        try:
            namespace.custom.list_namespaced_custom_object(resource[0], resource[1], namespace.name, resource[2])
        except ApiException as error:
            assert error.status == 404, error
            pytest.skip(f"this cluster has no {resource[2]}.{resource[0]}")
        namespace.create_secret("kftrain-storage", store.environment)
        prepare(namespace)
        settings = {
            "run.storage_root": f"s3://{BUCKET}/{backend}",
            "tracking.uri": mlflow_uri,
            "launch.backend": backend,
            "launch.processes_per_node": 1,
            "launch.kubernetes.namespace": namespace.name,
            "launch.kubernetes.trainer_image": _find_image(request, build_flags),
            "launch.kubernetes.cpu": "250m",  # of four CPUs, beside the operators', for four jobs of two pods
            "launch.kubernetes.memory": "2Gi",
            "launch.kubernetes.shared_memory": "256Mi",
            **(changes or {}),
        }
        yield make_site(
            namespace,
            resource,
            controller,
            name=backend,
            settings=settings,
            small=small,
            environment=store.environment,
            **values,
        )


def _find_image(request, build_flags):
    """An image of our code with the task that fails: the one that was named, or one that is built now."""
    named = request.config.getoption("--trainer-image", default="")
    if named:
        return named
    builder = request.getfixturevalue("builder")
    builder = dataclasses.replace(builder, flags=f"{builder.flags} {build_flags}")

    def build():
        held = held_images()
        trainer = builder.ensure("trainer", held)
        return builder.derive("faulty", "tests/e2e/faulty.Dockerfile", "tests/e2e", trainer, held)

    with hold_lock(find_shared_folder(request) / "engine.lock"):  # one folder for what it builds
        return make_once(request, f"image{build_flags.replace(' ', '')}", build)
