"""The presets of networks: what pods get, what the user has set himself, and which nodes are refused."""

import contextlib
import resource
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import spec
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import fabric
from kftrain.launch.kubernetes.kinds import load_kind
from kftrain.launch.kubernetes.settings import FabricConfig, FabricName, KubernetesConfig
from kftrain.process import machine
from kftrain.run.job_tasks import SHARDING, TRAINING
from kftrain.run.paths import RunPaths
from kftrain.stages.dry_run import describe_jobs_of_new_run

GOLDEN = Path(__file__).parents[3] / "golden"
KINDS = get_args(FabricName)

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
train: {global_batch_size: 64}
launch: {backend: pytorchjob, kubernetes: {trainer_image: trainer, gpus_per_node: 8}}
"""


def resolve(kind, *overrides):
    nodes = 1 if kind == "nvlink" else 2
    return config.parse(TEXT, [f"launch.kubernetes.fabric.kind={kind}", f"launch.nodes={nodes}", *overrides])


def build(resolved, task=TRAINING):
    job = spec.make_job(task, RunPaths.of(resolved.run.storage_root, "r"), resolved)
    (template,) = load_kind("pytorchjob", task).list_pod_templates(load_kind("pytorchjob", task).build(job, resolved))
    return template["spec"]


def variables(pod):
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def render(kind):
    """A pod as it goes to the API server, without the command, whose digest changes with every new key."""
    pod = build(resolve(kind))
    del pod["containers"][0]["command"]
    return yaml.safe_dump(pod)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pod_of_a_preset_is_the_golden_one(kind):
    """After a wanted change: write `render(kind)` there and read the difference."""
    assert render(kind) == (GOLDEN / f"fabric_{kind}.yaml").read_text()


def test_every_name_has_a_preset_whose_values_have_reasons():
    assert set(fabric.PRESETS) == set(KINDS)
    for preset in fabric.PRESETS.values():
        assert all(setting.reason for setting in [*preset.environment.values(), *preset.resources.values()])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_dry_run_shows_each_value_with_its_reason(kind):
    text = describe_jobs_of_new_run(resolve(kind))
    preset = fabric.PRESETS[kind]
    for name, setting in preset.environment.items():
        assert f"# fabric {kind}: {name}={setting.value}: {setting.reason}\n" in text
    for name, setting in preset.resources.items():
        assert f"# fabric {kind}: {name}: {setting.value}: {setting.reason}\n" in text
    assert "# fabric" not in describe_jobs_of_new_run(resolve("none"))


def test_what_a_user_sets_wins_and_is_said():
    resolved = resolve(
        "infiniband",
        "launch.environment={NCCL_IB_HCA: 'mlx5_0,mlx5_1', NCCL_DEBUG: INFO}",
        "launch.kubernetes.fabric.resources={rdma/ib: 2}",
        "launch.kubernetes.shared_memory=3Gi",
    )
    pod, text = build(resolved), describe_jobs_of_new_run(resolved)
    assert variables(pod)["NCCL_IB_HCA"] == "mlx5_0,mlx5_1" and variables(pod)["NCCL_NET"] == "IB"
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["rdma/ib"] == "2" and "rdma/rdma_shared_device_a" not in limits
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "3Gi"
    assert "NCCL_IB_HCA=mlx5_0,mlx5_1: yours; the preset has mlx5: " in text
    assert "rdma/ib: 2: yours" in text and "/dev/shm: 3Gi: yours" in text


def test_an_older_run_keeps_the_size_of_its_shared_memory():
    """A kept configuration holds all keys: this one is then as if the user had set it."""
    kept = yaml.safe_dump({"launch": {"kubernetes": {"shared_memory": "1Gi"}}})
    assert fabric.choose_shared_memory(config.parse_kept(kept, "kept").launch.kubernetes) == "1Gi"
    assert fabric.choose_shared_memory(resolve("efa").launch.kubernetes) == "8Gi"
    assert fabric.choose_shared_memory(resolve("ethernet").launch.kubernetes) == "1Gi"


def test_pods_that_do_not_meet_have_no_fabric():
    pod = build(resolve("infiniband"), SHARDING)
    assert "NCCL_NET" not in variables(pod)
    assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}


def test_only_root_is_given_the_capability_to_lock_memory():
    (container,) = build(resolve("roce"))["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (container,) = build(resolve("roce", "launch.kubernetes.fabric.runs_as_root=true"))["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["securityContext"]["runAsUser"] == 0 and not container["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("ethernet", "launch.kubernetes.fabric.runs_as_root=true", "runs_as_root must be false: ethernet locks no"),
        ("nvlink", "launch.nodes=2", "nvlink joins the GPUs of one machine: set nodes to 1"),
    ],
)
def test_settings_without_a_use_are_refused(kind, override, message):
    with pytest.raises(ConfigError, match=message):
        resolve(kind, override)


def test_the_fabric_is_no_part_of_the_training():
    assert resolve("efa").training_identity("d") == resolve("none").training_identity("d")


# -- locked memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch):
    """Sets the limit of locked memory that the process has; lists the limits that it sets itself."""
    changes = []
    monkeypatch.setenv(machine.LOCKS_MEMORY_ENV, "1")
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: changes.append((kind, limit)))

    def set_limit(limit_bytes):
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (65536, limit_bytes))
        return changes

    return set_limit


def write_status(folder, capabilities):
    path = folder / "status"
    path.write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    return str(path)


def test_a_machine_that_limits_locked_memory_is_refused(limits, tmp_path):
    assert limits(8 * 2**20) == []
    every_other_one = ~(1 << machine.IPC_LOCK_BIT) & 2**40 - 1
    with pytest.raises(LaunchError, match=r"LimitMEMLOCK=infinity.*runs_as_root") as caught:
        machine.require_lockable_memory(write_status(tmp_path, every_other_one))
    assert caught.value.exit_code == 13 and "8388608 bytes" in caught.value.line


def test_root_with_the_capability_may_lock_as_much_as_it_wants(limits, tmp_path):
    limits(8 * 2**20)
    machine.require_lockable_memory(write_status(tmp_path, 1 << machine.IPC_LOCK_BIT))


def test_a_machine_without_a_limit_will_do(limits, tmp_path):
    changes = limits(resource.RLIM_INFINITY)
    machine.require_lockable_memory(write_status(tmp_path, 0))
    assert changes == [(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)]


def test_other_pods_are_not_asked(limits, monkeypatch, tmp_path):
    limits(0)
    monkeypatch.delenv(machine.LOCKS_MEMORY_ENV)
    machine.require_lockable_memory(write_status(tmp_path, 0))


# -- nodes ------------------------------------------------------------------------------------------------------------


def node(name, labels=None, unschedulable=False, **allocatable):
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"unschedulable": unschedulable},
        "status": {
            "allocatable": {"cpu": "8", **{key.replace("__", "/"): value for key, value in allocatable.items()}}
        },
    }


def require(nodes, *overrides, kind="infiniband", num_pods=2):
    fabric.require_devices(resolve(kind, *overrides).launch.kubernetes, num_pods, nodes)


def test_nodes_without_the_device_are_refused_by_name():
    with pytest.raises(LaunchError) as caught:
        require([node("node0"), node("node1", nvidia__gpu="8")])
    assert caught.value.exit_code == 13 and caught.value.where == "launch.kubernetes.fabric.kind"
    line = caught.value.line
    assert "have not rdma/rdma_shared_device_a: 1 for each of 2 pods; looked at node0, node1" in line
    assert "whose devices are nvidia/gpu" in line and "launch.kubernetes.fabric.resources" in line


def test_nodes_that_take_no_pods_of_ours_do_not_count():
    has = {"rdma__rdma_shared_device_a": "1"}
    require([node("a", **has), node("b", **has)])
    with pytest.raises(LaunchError, match=r"looked at a, "):
        require([node("a", **has), node("b", unschedulable=True, **has)])
    selector = "launch.kubernetes.node_selector={pool: gpu}"
    with pytest.raises(LaunchError, match=r"looked at no node, as none fits, "):
        require([node("a", **has), node("b", **has)], selector)
    require([node("a", {"pool": "gpu"}, **has), node("b", {"pool": "gpu"}, **has)], selector)


def test_huge_pages_are_a_resource_as_devices_are():
    efa = {"vpc.amazonaws.com__efa": "32"}
    with pytest.raises(LaunchError, match="hugepages-2Mi: 5120Mi"):
        require([node("a", **efa), node("b", **efa)], kind="efa")
    nodes = [{**node(name, **efa)} for name in "ab"]
    for each in nodes:
        each["status"]["allocatable"]["hugepages-2Mi"] = "10256Mi"
    require(nodes, kind="efa")
    require(nodes[:1], kind="efa")  # one has room for two pods
    with pytest.raises(LaunchError):
        require(nodes[:1], kind="efa", num_pods=3)


def test_many_nodes_are_counted_not_listed():
    with pytest.raises(LaunchError, match=r"looked at n0, n1, n2, n3, n4 and 15 others, "):
        require([node(f"n{number}") for number in range(20)])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_a_job_is_refused_exactly_where_its_pods_cannot_be_placed(devices, need, num_pods):
    nodes = [node(f"n{i}", rdma__ib=str(number)) for i, number in enumerate(devices)]
    wanted = KubernetesConfig(fabric=FabricConfig(kind="infiniband", resources={"rdma/ib": need}))
    places, left = 0, list(devices)
    while any(number >= need for number in left):  # pod by pod, as a scheduler does it
        left[next(i for i, number in enumerate(left) if number >= need)] -= need
        places += 1
    with contextlib.nullcontext() if places >= num_pods else pytest.raises(LaunchError):
        fabric.require_devices(wanted, num_pods, nodes)


def test_the_launcher_refuses_before_there_is_a_job(server, make_job, namespace):
    resolved, _ = make_job("train", "launch.kubernetes.fabric.kind=infiniband")
    for name in ("node-1", "node-2"):
        namespace.create("nodes", {"kind": "Node", **node(name)})
    with pytest.raises(LaunchError, match=r"rdma_shared_device_a.*looked at node-1, node-2"):
        build_launcher(resolved).check()
    build_launcher(resolve_without_check(make_job)).check()
    assert namespace.jobs() == []


def resolve_without_check(make_job):
    overrides = ("launch.kubernetes.fabric.kind=infiniband", "launch.kubernetes.fabric.check_nodes=false")
    return make_job("train", *overrides)[0]


def test_an_account_that_may_not_list_nodes_is_told_and_goes_on(server, make_job, namespace, capsys):
    server.fail("GET", "/nodes", 403, times=float("inf"))
    resolved, _ = make_job("train", "launch.kubernetes.fabric.kind=infiniband")
    build_launcher(resolved).check()
    assert "may not list nodes" in capsys.readouterr().out
