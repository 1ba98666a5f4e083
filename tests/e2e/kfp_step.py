"""A step of the compiled pipeline as a pod, the way Kubeflow's backend starts it.

Command, arguments, image, environment, secrets and security context come from the compiled YAML; the service account
is `pipeline-runner`; the pod is owned by a Workflow. What the backend's own launcher does is left out: the outputs are
written to the pod's disk instead of being uploaded.
"""

import json

import yaml

OUTPUTS = "/tmp/kfp"
WORKFLOWS = ("argoproj.io", "v1alpha1")
SERVICE_ACCOUNT = "pipeline-runner"


def step_pod(compiled, step, parameters, workflow, name):
    """The pod of step `step` with these input parameters."""
    pipeline, platform = yaml.safe_load_all(compiled)
    container = pipeline["deploymentSpec"]["executors"][f"exec-{step}"]["container"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{step}"]
    executor_input = json.dumps(_executor_input(pipeline["components"][f"comp-{step}"], parameters))
    identity = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid"}
    return {
        "metadata": {
            "name": name,
            "labels": {"workflows.argoproj.io/workflow": workflow["metadata"]["name"], "pipeline/runid": name},
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
