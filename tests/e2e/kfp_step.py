"""A step of the compiled pipeline as a pod, the way Kubeflow's backend starts it.

Command, arguments, image, environment, secrets and security context come from the compiled YAML; the service account
is `pipeline-runner`; the pod is owned by a Workflow. What the backend's own launcher does is left out: the outputs are
written to the pod's disk instead of being uploaded.
"""

import contextlib
import json
import secrets

import yaml
from e2e.namespace import wait_until
from kubernetes.client.exceptions import ApiException

OUTPUTS = "/tmp/kfp"
WORKFLOWS = ("argoproj.io", "v1alpha1")
SERVICE_ACCOUNT = "pipeline-runner"


def step_pod(compiled, step, parameters, workflow, name):
    """The pod of step `step` with these input parameters."""
    pipeline, platform = yaml.safe_load_all(compiled)
    container = pipeline["deploymentSpec"]["executors"][f"exec-{step}"]["container"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{step}"]
    executor_input = json.dumps(_executor_input(pipeline["components"][f"comp-{step}"], parameters))
    run = workflow["metadata"]["name"]
    identity = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid"}
    return {
        "metadata": {
            "name": name,
            "labels": {"workflows.argoproj.io/workflow": run, "pipeline/runid": run},
            "ownerReferences": [owner_reference(workflow)],
        },
        "spec": {
            "serviceAccountName": SERVICE_ACCOUNT,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "main",
                    "image": container["image"],
                    "command": container["command"],
                    "args": [argument.replace("{{$}}", executor_input) for argument in container["args"]],
                    "env": [
                        *container.get("env", []),
                        *_secret_environment(settings),
                        *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in identity.items()),
                    ],
                    "securityContext": {
                        "runAsUser": int(settings["securityContext"]["runAsUser"]),
                        "runAsNonRoot": settings["securityContext"]["runAsNonRoot"],
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


def owner_reference(workflow):
    metadata = workflow["metadata"]
    return {
        "apiVersion": "/".join(WORKFLOWS),
        "kind": "Workflow",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def create_workflow(namespace, name):
    """A Workflow that owns what a run creates; no controller acts on it."""
    body = {
        "apiVersion": "/".join(WORKFLOWS),
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": "e", "templates": [{"name": "e", "suspend": {}}]},
    }
    return namespace.custom.create_namespaced_custom_object(*WORKFLOWS, namespace.name, "workflows", body)


def terminate_workflow(namespace, name):
    """What Kubeflow does at Terminate; Argo would kill the pods some 10 s later."""
    body = {"spec": {"activeDeadlineSeconds": 0}}
    namespace.custom.patch_namespaced_custom_object(*WORKFLOWS, namespace.name, "workflows", name, body)


def delete_workflow(namespace, name):
    namespace.custom.delete_namespaced_custom_object(*WORKFLOWS, namespace.name, "workflows", name)


def _executor_input(component, parameters):
    outputs = component.get("outputDefinitions", {})
    artifacts = {
        name: {"artifacts": [{"name": name, "uri": f"{OUTPUTS}/{name}", "type": definition["artifactType"]}]}
        for name, definition in outputs.get("artifacts", {}).items()
    }
    files = {name: {"outputFile": f"{OUTPUTS}/{name}"} for name in outputs.get("parameters", {})}
    return {
        "inputs": {"parameterValues": parameters},
        "outputs": {"artifacts": artifacts, "parameters": files, "outputFile": f"{OUTPUTS}/executor_output.json"},
    }


def _secret_environment(settings):
    for secret in settings.get("secretAsEnv", []):
        for pair in secret["keyToEnv"]:
            reference = {"name": secret["secretName"], "key": pair["secretKey"], "optional": secret["optional"]}
            yield {"name": pair["envVar"], "valueFrom": {"secretKeyRef": reference}}


class Steps:
    """Steps of one pipeline run: pods that one Workflow owns."""

    def __init__(self, namespace, compiled):
        self.name = f"e2e-{secrets.token_hex(3)}"
        self.namespace = namespace
        self._compiled = compiled
        self._count = 0
        self.workflow = create_workflow(namespace, self.name)

    @classmethod
    @contextlib.contextmanager
    def of_one_run(cls, namespace, compiled):
        """Steps whose Workflow, and with it everything of theirs, is deleted in the end."""
        found = cls(namespace, compiled)
        try:
            yield found
        finally:
            with contextlib.suppress(ApiException):  # a test may have deleted it
                delete_workflow(namespace, found.name)

    def start(self, step, parameters):
        """Starts a step; returns its pod's name."""
        self._count += 1
        pod = f"{self.name}-{step}-{self._count}"
        body = step_pod(self._compiled, step, parameters, self.workflow, pod)
        self.namespace.core.create_namespaced_pod(self.namespace.name, body)
        return pod

    def wait_for(self, pod, part, seconds=240):
        wait_until(lambda: part in self.namespace.log(pod), seconds, f"{part!r} in the log of {pod}")

    def finish(self, pod, phase="Succeeded", seconds=600):
        """Waits for the step's end; returns its log."""
        ended = wait_until(lambda: self._ended(pod), seconds, f"the end of {pod}")
        log = self.namespace.log(pod)
        assert ended == phase, log
        return log

    def _ended(self, pod):
        phase = self.namespace.pods()[pod].status.phase
        return phase if phase in ("Succeeded", "Failed") else None
