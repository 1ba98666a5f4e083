"""Fabrics: what pods need for the network between their GPUs, as data with the reason of each value. Pure.

Names and values are those of NCCL's user guide (env.html), of AWS's guide to EFA on EKS (node-efa.html) and of the
shared device plugin of NVIDIA's Network Operator. What NCCL finds out by itself is left to it: the GID index of RoCE
(since 2.21), rings, numbers of channels and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.settings import FabricConfig, FabricName, KubernetesConfig

MAX_NODES_SHOWN = 5
NVLINK_GBPS = 2400.0
"""Rate of a GPU with 12 links of 25 GB/s, an A100; an H100 has 18."""


class Setting(NamedTuple):
    """A value of a preset, and why it is so."""

    value: str
    reason: str


@dataclass(frozen=True)
class Preset:
    """The needs of pods for one kind of network."""

    environment: Mapping[str, Setting]
    """Variable -> its value."""
    resources: Mapping[str, Setting] = field(default_factory=dict)
    """Resource of a pod -> its amount."""
    locks_memory: bool = False
    """True if the device reads and writes memory by itself, which must be locked for it without a limit."""
    shares_gpus: bool = False
    """True for machines with several GPUs, whose processes need room in /dev/shm."""
    between_nodes_gbps: float = 10.0
    """Gigabits per second of a node, in one direction, where the configuration does not say."""
    within_node_gbps: float = 250.0
    """The same of a process to others on its node: 16 lanes of PCIe 4."""


_POD_NETWORK = {
    "NCCL_SOCKET_IFNAME": Setting("=eth0", "a pod's own interface; NCCL would take an interface ib0 before it"),
    "GLOO_SOCKET_IFNAME": Setting("eth0", "the same for gloo, which knows exact names only"),
}
_VERBS = {
    **_POD_NETWORK,
    "NCCL_NET": Setting("IB", "an error where the device cannot be used, not a silent fall back to sockets"),
}
_RDMA_DEVICE = {
    "rdma/rdma_shared_device_a": Setting("1", "access to the devices; this name is that of NVIDIA's Network Operator"),
}
_DIRECT: dict[str, Any] = {"locks_memory": True, "shares_gpus": True, "within_node_gbps": NVLINK_GBPS}

PRESETS: Mapping[FabricName, Preset] = {
    "none": Preset({}),
    "ethernet": Preset(
        {**_POD_NETWORK, "NCCL_IB_DISABLE": Setting("1", "sockets alone: pods without the device cannot open it")},
        between_nodes_gbps=25.0,
    ),
    "infiniband": Preset(
        {**_VERBS, "NCCL_IB_HCA": Setting("mlx5", "NVIDIA's adapters, and no other RDMA device of the machine")},
        _RDMA_DEVICE,
        **_DIRECT,
        between_nodes_gbps=400.0,
    ),
    "roce": Preset(
        {**_VERBS, "NCCL_IB_TC": Setting("106", "DSCP 26, the class that NVIDIA's switches make lossless; else 0")},
        _RDMA_DEVICE,
        **_DIRECT,
        between_nodes_gbps=200.0,
    ),
    "efa": Preset(
        {**_POD_NETWORK, "FI_PROVIDER": Setting("efa", "libfabric must not fall back to its provider for TCP")},
        {
            "vpc.amazonaws.com/efa": Setting("1", "interfaces of a pod: p4d has 4, p5 has 32"),
            "hugepages-2Mi": Setting("5120Mi", "libfabric's buffers, as AWS's guide reserves them"),
        },
        **_DIRECT,
        between_nodes_gbps=400.0,
    ),
    "nvlink": Preset(
        {
            "NCCL_P2P_LEVEL": Setting("NVL", "GPUs reach each other by NVLink alone, other pairs by shared memory"),
            "NCCL_IB_DISABLE": Setting("1", "there is no other machine, so no adapter is opened"),
        },
        shares_gpus=True,
        within_node_gbps=NVLINK_GBPS,
    ),
}
"""Name of a fabric -> what pods need for it."""


def build_environment(fabric: FabricConfig) -> dict[str, str]:
    """Build the variables of the workers, over which those of `launch.environment` stand."""
    return {name: setting.value for name, setting in PRESETS[fabric.kind].environment.items()}


def build_resources(fabric: FabricConfig) -> dict[str, str]:
    """Build the resources of a pod; `fabric.resources` takes the place of all of the preset's."""
    preset = {name: setting.value for name, setting in PRESETS[fabric.kind].resources.items()}
    return dict(fabric.resources) or preset


def choose_rates(fabric: FabricConfig) -> tuple[float, float]:
    """Return the gigabits per second that a node can send to others, and a process to others on its node."""
    preset = PRESETS[fabric.kind]
    return fabric.between_nodes_gbps or preset.between_nodes_gbps, fabric.within_node_gbps or preset.within_node_gbps


def choose_shared_memory(settings: KubernetesConfig) -> str:
    """Return the size of /dev/shm: as NCCL's guide says, 1 GiB, and on machines of many GPUs as much for each."""
    if settings.shared_memory != "auto":
        return settings.shared_memory
    return f"{max(1, settings.gpus_per_node) if PRESETS[settings.fabric.kind].shares_gpus else 1}Gi"


def describe_fabric(settings: KubernetesConfig, environment: Mapping[str, str]) -> list[str]:
    """Return a line for each value of the preset, with its reason, or with what the user has set in its place.

    `environment`: `launch.environment`.
    """
    fabric, preset = settings.fabric, PRESETS[settings.fabric.kind]
    if fabric.kind == "none":
        return []
    lines = [f"{name}={_explain(s, environment.get(name))}" for name, s in preset.environment.items()]
    if fabric.resources:
        lines += [f"{name}: {amount}: yours, in place of the preset's" for name, amount in fabric.resources.items()]
    else:
        lines += [f"{name}: {_explain(setting)}" for name, setting in preset.resources.items()]
    size = choose_shared_memory(settings)
    lines += [f"/dev/shm: {size}: {'for the GPUs of a pod' if settings.shared_memory == 'auto' else 'yours'}"]
    if fabric.runs_as_root:
        lines += ["IPC_LOCK: root may lock memory beyond the limit of the machine"]
    elif preset.locks_memory:
        lines += ["locked memory: a worker ends at once on a machine that limits it"]
    return [f"fabric {fabric.kind}: {line}" for line in lines]


def _explain(setting: Setting, by_user: str | None = None) -> str:
    if by_user is None:
        return f"{setting.value}: {setting.reason}"
    return f"{by_user}: yours; the preset has {setting.value}: {setting.reason}"


def require_devices(settings: KubernetesConfig, num_pods: int, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raise LaunchError if nodes do not have the resources of the fabric for so many pods, even while they are idle.

    Nodes count if they take pods and have the labels of `node_selector`; taints and affinity are not looked at.
    """
    needs = build_resources(settings.fabric)
    eligible = [node for node in nodes if _is_eligible(node, settings.node_selector)]
    if not needs or sum(_count_pods(node, needs) for node in eligible) >= num_pods:
        return
    names = [node["metadata"]["name"] for node in eligible]
    shown = ", ".join(names[:MAX_NODES_SHOWN])
    shown += f" and {len(names) - MAX_NODES_SHOWN} others" if len(names) > MAX_NODES_SHOWN else ""
    devices = sorted({name for node in eligible for name in _read_allocatable(node) if "/" in name})
    amounts = ", ".join(f"{name}: {amount}" for name, amount in needs.items())
    raise LaunchError(
        f"the nodes have not {amounts} for each of {num_pods} pods; looked at {shown or 'no node, as none fits'}, "
        f"whose devices are {', '.join(devices) or 'none'}",
        where="launch.kubernetes.fabric.kind",
        value=settings.fabric.kind,
        fix="install the device plugin, name its resource in launch.kubernetes.fabric.resources, take another fabric, "
        "or set launch.kubernetes.fabric.check_nodes to false where nodes come on demand",
    )


def _is_eligible(node: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    is_open = not (node.get("spec") or {}).get("unschedulable")
    return is_open and all(labels.get(name) == value for name, value in selector.items())


def _count_pods(node: Mapping[str, Any], needs: Mapping[str, str]) -> int:
    """Count the pods with these resources that a node has room for."""
    from kubernetes.utils.quantity import parse_quantity

    has = _read_allocatable(node)
    amounts = ((parse_quantity(has.get(name, "0")), parse_quantity(need)) for name, need in needs.items())
    return min((int(available // need) for available, need in amounts if need), default=0)


def _read_allocatable(node: Mapping[str, Any]) -> Mapping[str, str]:
    return (node.get("status") or {}).get("allocatable") or {}
