"""A version as a KServe InferenceService."""

import re

import pytest
import yaml
from click.testing import CliRunner
from helpers.kubernetes_types import require_valid

from kftrain import registry
from kftrain.cli import cli
from kftrain.config import parse
from kftrain.errors import ConfigError
from kftrain.registry.inference_service import describe_inference_service
from kftrain.registry.reference import Reference
from kftrain.stages import preflight

FIELDS = ("run_uri", "checkpoint_digest", "dataset_digest", "training_digest", "evaluation_digest")
REFERENCE = Reference(export_uri="s3://m/runs/r/export/e", export_digest="d" * 64, **dict.fromkeys(FIELDS, "x"))

CONFIG = """
run: {name: tiny, storage_root: "s3://m"}
registry: {model_name: Tiny_LM}
launch:
  backend: pytorchjob
  kubernetes: {namespace: ml, image_pull_secrets: [pull], secrets: [kftrain-storage]}
"""


def container_of(document):
    [container] = document["spec"]["predictor"]["containers"]
    return container


def test_the_document_names_the_version_and_gives_the_server_what_it_needs():
    document = describe_inference_service(parse(CONFIG), 3, REFERENCE, "registry/tiny:3")
    assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert document["metadata"]["name"] == "tiny-lm" and document["metadata"]["namespace"] == "ml"
    assert document["metadata"]["annotations"] == {
        "kftrain/model": "Tiny_LM/3",
        "kftrain/export": "s3://m/runs/r/export/e",
        "kftrain/export-digest": "d" * 64,
    }
    container = container_of(document)
    assert (container["name"], container["image"]) == ("kserve-container", "registry/tiny:3")
    assert container["envFrom"] == [{"secretRef": {"name": "kftrain-storage", "optional": True}}]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ping", "port": container["ports"][0]["containerPort"]}
    assert "env" not in container and container["volumeMounts"] == [{"name": "scratch", "mountPath": "/tmp"}]
    assert document["spec"]["predictor"]["imagePullSecrets"] == [{"name": "pull"}]


def test_own_classes_are_allowed_by_name_and_folders_are_mounted():
    own = "task: {kind: 'wine.task:Quality'}\nmodel: {kind: 'wine.model:Net'}\n"
    volumes = "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: data}}]"
    mounts = "launch.kubernetes.volume_mounts=[{name: data, mountPath: /data}]"
    document = describe_inference_service(parse(CONFIG + own, [volumes, mounts]), 3, REFERENCE, "i")
    container = container_of(document)
    assert container["env"] == [{"name": "KFTRAIN_TRUSTED_KINDS", "value": "wine.task:Quality,wine.model:Net"}]
    assert container["volumeMounts"][1:] == [{"name": "data", "mountPath": "/data"}]
    assert document["spec"]["predictor"]["volumes"][1]["name"] == "data"


def test_the_server_has_no_more_rights_than_a_restricted_namespace_gives_and_no_token():
    document = describe_inference_service(parse(CONFIG, ["launch.kubernetes.scratch=7Gi"]), 3, REFERENCE, "i")
    predictor, container = document["spec"]["predictor"], container_of(document)
    assert predictor["automountServiceAccountToken"] is False
    assert predictor["securityContext"]["runAsNonRoot"] is True
    assert predictor["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert predictor["volumes"] == [{"name": "scratch", "emptyDir": {"sizeLimit": "7Gi"}}]


PREDICTOR = {
    "minReplicas": "int",
    "maxReplicas": "int",
    "scaleTarget": "int",
    "scaleMetric": "str",
    "containerConcurrency": "int",
    "timeout": "int",
    "canaryTrafficPercent": "int",
    "labels": "dict(str, str)",
    "annotations": "dict(str, str)",
    "deploymentStrategy": "V1DeploymentStrategy",
}
"""What serving.kserve.io/v1beta1 adds to a pod's specification, of the fields that all its releases have."""


def require_inference_service(document):
    """As KServe's API has it: a predictor is a pod's specification, in which one container serves, and some fields."""
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"} and document["spec"].keys() == {"predictor"}
    require_valid("V1ObjectMeta", document["metadata"], "metadata")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    predictor = dict(document["spec"]["predictor"])
    for key, kind in PREDICTOR.items():
        if key in predictor:
            require_valid(kind, predictor.pop(key), key)
    require_valid("V1PodSpec", predictor, "predictor")
    assert [each["name"] for each in predictor["containers"]] == ["kserve-container"]


def test_every_key_is_one_of_kserve_or_of_kubernetes():
    volumes = "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: data}}]"
    mounts = "launch.kubernetes.volume_mounts=[{name: data, mountPath: /data}]"
    own = "task: {kind: 'wine.task:Quality'}\n"
    document = describe_inference_service(parse(CONFIG + own, [volumes, mounts]), 3, REFERENCE, "i")
    require_inference_service(document)
    predictor = document["spec"]["predictor"]
    for wrong in ({"min_replicas": 1}, {"volumes": "data"}, {"minReplicas": "1"}):
        with pytest.raises(AssertionError):
            require_inference_service({**document, "spec": {"predictor": {**predictor, **wrong}}})


@pytest.mark.parametrize("name", ["7up", "-", "x" * 64])
def test_a_name_that_no_service_can_have_is_refused(name):
    with pytest.raises(ConfigError, match=r"registry\.model_name"):
        describe_inference_service(parse(CONFIG, [f"registry.model_name={name}"]), 3, REFERENCE, "i")


def test_the_command_prints_a_document_that_kubectl_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "find_version", lambda config, name: (3, REFERENCE))
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    (tmp_path / "c.yaml").write_text(CONFIG)
    arguments = ["models", "deploy", "champion", "--render", "--config", str(tmp_path / "c.yaml")]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert container_of(yaml.safe_load(done.stdout))["image"] == "Tiny_LM:3"
    assert "mlflow models generate-dockerfile -m models:/Tiny_LM/3" in done.stderr and "warning" not in done.stderr
    assert CliRunner().invoke(cli, arguments[:3]).exit_code != 0  # there is nothing but rendering
