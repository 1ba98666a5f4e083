"""Presets of networks on a real cluster, whose nodes have no such devices."""

import pytest
from e2e.namespace import JOBS, Namespace, connect
from kubernetes.client.exceptions import ApiException
from kubernetes.utils.quantity import parse_quantity

from kftrain import config
from kftrain.errors import LaunchError
from kftrain.launch import spec
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import fabric
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.settings import FabricConfig
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(120, func_only=True)

KINDS = ("ethernet", "infiniband", "roce", "efa", "nvlink")
AS_ROOT = "launch.kubernetes.fabric.runs_as_root=true"
TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, processes_per_node: 1}
"""


@pytest.fixture(scope="module")
def restricted(kubeconfig):
    with Namespace.create(labels={"pod-security.kubernetes.io/enforce": "restricted"}) as found:
        yield found


@pytest.fixture(scope="module")
def privileged(kubeconfig):
    with Namespace.create(labels={"pod-security.kubernetes.io/enforce": "privileged"}) as found:
        yield found


def resolve(namespace, kind, *overrides):
    nodes = 1 if kind == "nvlink" else 2
    own = [f"launch.kubernetes.fabric.kind={kind}", f"launch.nodes={nodes}"]
    return config.parse(TEXT, [*own, f"launch.kubernetes.namespace={namespace.name}", *overrides])


def dry_run(namespace, kind, *overrides):
    """Lets the API server validate the job of a preset and its pod, unknown fields included; keeps neither."""
    resolved = resolve(namespace, kind, *overrides)
    job = KIND.build(spec.make_job(TRAINING, RunPaths.of("s3://bucket/root", "r"), resolved), resolved)
    strictly = {"dry_run": "All", "field_validation": "Strict"}
    namespace.custom.create_namespaced_custom_object(*JOBS[:2], namespace.name, "pytorchjobs", job, **strictly)
    (template,) = KIND.list_pod_templates(job)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r"}, "spec": template["spec"]}
    created = namespace.core.create_namespaced_pod(namespace.name, pod, **strictly)
    return created.spec.containers[0]


@pytest.mark.parametrize("kind", ["infiniband", "roce", "efa"])
def test_a_fabric_that_the_nodes_do_not_have_is_refused(restricted, kind):
    names = [node.metadata.name for node in connect().list_node().items]
    with pytest.raises(LaunchError) as caught:
        build_launcher(resolve(restricted, kind)).check()
    assert f"looked at {', '.join(names)}, " in caught.value.line and caught.value.exit_code == 13
    assert restricted.jobs() == {}


@pytest.mark.parametrize("kind", ["ethernet", "nvlink"])
def test_one_without_devices_is_not(restricted, kind):
    build_launcher(resolve(restricted, kind)).check()


@pytest.mark.parametrize("kind", KINDS)
def test_the_api_server_takes_the_pods_of_each_preset(restricted, kind):
    container = dry_run(restricted, kind)
    wanted = fabric.build_resources(resolve(restricted, kind).launch.kubernetes.fabric)
    limits = {name: parse_quantity(amount) for name, amount in container.resources.limits.items()}  # 5120Mi is now 5Gi
    assert {name: parse_quantity(amount) for name, amount in wanted.items()}.items() <= limits.items()
    assert fabric.build_environment(FabricConfig(kind=kind)).items() <= {(e.name, e.value) for e in container.env}
    assert restricted.jobs() == {} and restricted.pods() == {}


def test_root_that_locks_memory_needs_a_namespace_that_lets_it(restricted, privileged):
    container = dry_run(privileged, "infiniband", AS_ROOT)
    assert container.security_context.capabilities.add == ["IPC_LOCK"]
    with pytest.raises(ApiException, match="IPC_LOCK") as caught:
        dry_run(restricted, "infiniband", AS_ROOT)
    assert caught.value.status == 403
