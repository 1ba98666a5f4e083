"""What the tests do to a namespace of a real cluster."""

import contextlib
import os
import secrets
import time

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

JOBS = ("kubeflow.org", "v1")


def wait_until(condition, seconds, what="the condition"):
    """The first true answer of `condition`, asked twice a second."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.5)


def connect():
    config.load_kube_config(os.environ["KUBECONFIG"])
    return client.CoreV1Api()


def held_images():
    """Tags of the images that every node says it holds."""
    nodes = connect().list_node().items
    return set.intersection(*({name for image in node.status.images or [] for name in image.names} for node in nodes))


class Namespace:
    """One namespace; as a context manager it is deleted in the end."""

    def __init__(self, name):
        self.name = name
        self.core = connect()
        self.custom = client.CustomObjectsApi()

    @classmethod
    @contextlib.contextmanager
    def create(cls, labels=None):
        found = cls(f"kftrain-e2e-{secrets.token_hex(3)}")
        found.core.create_namespace({"metadata": {"name": found.name, "labels": labels or {}}})
        try:
            yield found
        finally:
            found.core.delete_namespace(found.name)

    def create_secret(self, name, values):
        """Creates a secret in place of one that tests which were killed have left."""
        with contextlib.suppress(ApiException):
            self.delete_secret(name)
        self.core.create_namespaced_secret(self.name, {"metadata": {"name": name}, "stringData": values})

    def delete_secret(self, name):
        self.core.delete_namespaced_secret(name, self.name)

    def jobs(self):
        """PyTorchJobs, by name."""
        found = self.custom.list_namespaced_custom_object(*JOBS, self.name, "pytorchjobs")
        return {item["metadata"]["name"]: item for item in found["items"]}

    def pods(self, selector=""):
        """Pods, by name."""
        return {
            pod.metadata.name: pod for pod in self.core.list_namespaced_pod(self.name, label_selector=selector).items
        }

    def workers(self):
        """Pods of PyTorchJobs, by name."""
        return self.pods("training.kubeflow.org/job-name")

    def delete_pod(self, name, grace_seconds=None):
        self.core.delete_namespaced_pod(name, self.name, grace_period_seconds=grace_seconds)

    def log(self, pod):
        """What a pod has printed so far; empty where there is no log yet."""
        try:
            return self.core.read_namespaced_pod_log(pod, self.name)
        except ApiException as error:
            assert error.status in (400, 404, 500), error
            return ""
