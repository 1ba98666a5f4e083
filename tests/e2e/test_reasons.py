"""Why a job waits: the reason is printed within seconds, and waiting ends when it makes no sense."""

import time

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until

pytestmark = pytest.mark.timeout(600, func_only=True)

PRINT_SECONDS = 15.0
"""From the job's creation to its reason."""

WAITING = {
    "image": ({"launch.kubernetes.trainer_image": "localhost/none:1"}, "ImagePull", 10),
    "image name": ({"launch.kubernetes.trainer_image": "localhost/UPPER:1"}, "InvalidImageName", 0),
    "cpu": ({"launch.kubernetes.cpu": 999}, "Insufficient cpu", 0),
    "gpu": ({"launch.kubernetes.gpus_per_node": 8}, "Insufficient nvidia.com/gpu", 0),
    "secret": (
        {
            "launch.kubernetes.volumes": "[{name: v, secret: {secretName: nope}}]",
            "launch.kubernetes.volume_mounts": "[{name: v, mountPath: /v}]",
        },
        'secret "nope" not found',
        0,
    ),
    "priority class": ({"launch.kubernetes.priority_class": "nope"}, "no PriorityClass with name nope", 0),
    "claim": (
        {
            "launch.kubernetes.volumes": "[{name: v, persistentVolumeClaim: {claimName: nope}}]",
            "launch.kubernetes.volume_mounts": "[{name: v, mountPath: /v}]",
        },
        'persistentvolumeclaim "nope" not found',
        0,
    ),
}
"""Case -> settings, what the reason contains, and how many seconds later the kubelet itself knows it."""


@pytest.mark.parametrize("case", WAITING)
def test_the_reason_is_printed_and_the_job_is_given_up(case, settings, namespace, tmp_path):
    changes, part, later = WAITING[case]
    limit = {"launch.kubernetes.start_timeout_seconds": 20}
    run_uri = kftrain("shard", *options({**settings, **changes, **limit}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("-train in namespace")
        start = time.monotonic()
        command.wait_for(part, 60)
        assert time.monotonic() - start < PRINT_SECONDS + later
        command.finish(code=13, seconds=120)
    assert part in command.lines[-2] + command.lines[-1] + command.lines[-3]
    assert namespace.jobs() == {} and wait_until(lambda: not namespace.workers(), 60, "the end of the pods")
