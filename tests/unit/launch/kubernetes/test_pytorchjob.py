import dataclasses
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes_types import require_valid
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.core import storage
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import spec
from kftrain.launch.kubernetes import labels
from kftrain.launch.kubernetes import pod as pod_module
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.run.job_tasks import JOB_TASKS, TRAINING
from kftrain.run.paths import RunPaths

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "pytorchjob.yaml"
CRD = ROOT.parent / "shared" / "crds" / "kubeflow.org_pytorchjobs.yaml"

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch:
  backend: pytorchjob
  nodes: 2
  kubernetes:
    trainer_image: registry/trainer@sha256:0123
    gpus_per_node: 4
    node_selector: {pool: gpu}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    image_pull_secrets: [registry]
    priority_class: high
    queue: team
"""


OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "flow", "uid": "0123", "controller": False}


def build(text=TEXT, run_id="lm-0123456789ab", overrides=(), kfp_run_id="kfp-run-id", owner=None):
    resolved = config.parse(text, list(overrides))
    paths = RunPaths.of(resolved.run.storage_root, run_id)
    return KIND.build(spec.make_job(TRAINING, paths, resolved, "mlflow-run"), resolved, kfp_run_id, owner)


def pod_of(job):
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]


def digest_of(job):
    return job["metadata"]["annotations"][labels.DIGEST_ANNOTATION]


def test_the_job_is_the_golden_one():
    """After a wanted change: write `yaml.safe_dump(build())` there and read the difference."""
    assert yaml.safe_dump(build()) == GOLDEN.read_text()


def test_the_job_is_valid_against_the_operators_definition():
    if not CRD.exists():
        pytest.skip("the operator's CustomResourceDefinition is not beside this checkout")
    import jsonschema

    definition = yaml.safe_load(CRD.read_text())
    schema = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    jsonschema.validate(build(owner=OWNER), forbid_unknown(schema))


def forbid_unknown(schema):
    """The schema as strict field validation reads it: a key that it does not name is an error."""
    if not isinstance(schema, dict):
        return schema
    strict = {key: forbid_unknown(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        strict["properties"] = {name: forbid_unknown(part) for name, part in schema["properties"].items()}
        free = schema.get("x-kubernetes-preserve-unknown-fields") or set(schema["properties"]) <= {"apiVersion", "kind"}
        strict.setdefault("additionalProperties", bool(free))
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    return strict


def test_a_pod_asks_for_nothing_that_the_restricted_standard_forbids():
    pod = pod_of(build(overrides=["launch.kubernetes.ca_bundle=ours"]))["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_a_pod_reads_its_rack_from_its_own_label_where_there_is_one():
    label = "topology.kubernetes.io/zone"
    (container,) = pod_of(build(overrides=[f"launch.kubernetes.rack_label={label}"]))["spec"]["containers"]
    (variable,) = (each for each in container["env"] if each["name"] == "KFTRAIN_RACK")
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}


def test_every_scratch_volume_has_a_size():
    volumes = pod_of(build(overrides=["launch.kubernetes.scratch=7Gi"]))["spec"]["volumes"]
    sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in volumes if "emptyDir" in each}
    assert sizes == {"shared-memory": "1Gi", "scratch": "7Gi"}
    for path in (ROOT / "manifests").rglob("*.yaml"):
        assert "emptyDir: {}" not in path.read_text(), path


def test_workers_take_calls_of_workers_alone_under_the_overlay():
    (policy,) = yaml.safe_load_all((ROOT / "manifests" / "overlays" / "network" / "workers.yaml").read_text())
    require_valid("V1NetworkPolicy", policy)
    (rule,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert (
        rule == {"key": labels.RUN_LABEL, "operator": "Exists"}
        and labels.RUN_LABEL in pod_of(build())["metadata"]["labels"]
    )
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]


def test_workers_have_the_environment_of_the_configuration_and_ours_stays():
    job = build(overrides=["launch.environment={NCCL_DEBUG: INFO, OMP_NUM_THREADS: '3'}"])
    (container,) = pod_of(job)["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert (values["NCCL_DEBUG"], values["OMP_NUM_THREADS"]) == ("INFO", "3")
    assert values[spec.MLFLOW_RUN_ID_ENV] == "mlflow-run"
    for override in ("launch.environment={A: '1'}", "launch.kubernetes.memory=4Gi"):
        resolved = config.parse(TEXT)
        assert config.parse(TEXT, [override]).training_identity("d") == resolved.training_identity("d")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[
            (name, "it is set by kftrain")
            for name in (spec.NODE_RANK_ENV, "RANK", "LOCAL_WORLD_SIZE", "PET_NNODES", "HOME", "a b")
        ],
        *[(name, "launch.kubernetes.secrets") for name in ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN")],
    ],
)
def test_a_variable_of_ours_or_a_secret_in_the_environment_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"{name}.*{message}") as caught:
        config.parse(yaml.safe_dump({"launch": {"environment": {name: "canary"}}}))
    assert "canary" not in caught.value.line


@pytest.mark.parametrize("resource", ["google.com/tpu", "cloud-tpus.google.com/v3"])
def test_tpus_are_refused_by_name(resource):
    with pytest.raises(ConfigError, match="no training on TPUs"):
        config.parse(TEXT, [f"launch.kubernetes.gpu_resource={resource}"])


def test_no_credential_stands_in_the_job():
    text = yaml.safe_dump(build(overrides=["tracking.uri=http://ana:hunter2@mlflow:5000"]))
    assert "hunter2" not in text


def test_only_workers_so_that_all_must_succeed():
    job = build()["spec"]
    assert list(job["pytorchReplicaSpecs"]) == ["Worker"]
    assert "elasticPolicy" not in job
    assert job["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert job["runPolicy"]["cleanPodPolicy"] == "Running"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), st.sampled_from(sorted(JOB_TASKS)))
def test_every_run_id_gives_a_name_that_the_operator_can_use(run_id, task):
    resolved = config.parse(TEXT)
    paths = RunPaths.of(resolved.run.storage_root, run_id)
    job = spec.make_job(JOB_TASKS[task], paths, resolved)
    name = KIND.make_job_name(job)
    assert len(f"{name}-worker-999") <= 63
    assert name[0].isalpha() and name.endswith(task) and "--" not in name.replace(run_id, "")
    assert KIND.make_job_name(job) == name


def test_long_run_ids_stay_apart():
    resolved = config.parse(TEXT)
    runs = [RunPaths.of("s3://b", "a" * 60 + tail) for tail in ("b", "c")]
    names = {KIND.make_job_name(spec.make_job(TRAINING, paths, resolved)) for paths in runs}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("override", "where"),
    [("run.storage_root=/data/root", "run.storage_root"), ("tracking.uri=sqlite:///mlflow.db", "tracking.uri")],
)
def test_what_pods_cannot_reach_is_refused(override, where):
    with pytest.raises(LaunchError) as caught:
        build(overrides=[override])
    assert caught.value.where == where and caught.value.exit_code == 13


def test_a_mounted_volume_may_hold_the_runs():
    volumes = "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: runs}}]"
    mounts = "launch.kubernetes.volume_mounts=[{name: data, mountPath: /data}]"
    job = build(overrides=["run.storage_root=/data/root", volumes, mounts])
    pod = pod_of(job)["spec"]
    assert {"name": "data", "mountPath": "/data"} in pod["containers"][0]["volumeMounts"]


def test_processes_follow_the_gpus_of_a_node():
    assert spec.count_processes_per_node(config.parse(TEXT)) == 4
    assert spec.count_processes_per_node(config.parse(TEXT, ["launch.kubernetes.gpus_per_node=0"])) == 2


def test_the_digest_is_that_of_the_specification_alone():
    """The same job is adopted by another pipeline run and under another owner."""
    job = build()
    assert digest_of(job) == storage.digest_json(job["spec"])[:16]
    assert digest_of(build(kfp_run_id="another", owner=OWNER)) == digest_of(job)
    assert digest_of(build(overrides=["launch.kubernetes.memory=8Gi"])) != digest_of(job)


def test_a_job_belongs_to_its_owner():
    assert build(owner=OWNER)["metadata"]["ownerReferences"] == [OWNER]
    assert "ownerReferences" not in build()["metadata"]


def test_labels_of_queue_and_pipeline_run_belong_to_the_job_alone():
    """Kueue would manage a pod that bears a queue's label on its own."""
    job = build(overrides=["launch.kubernetes.queue_priority=urgent"])
    own = {labels.RUN_LABEL: "lm-0123456789ab", labels.TASK_LABEL: "train"}
    queue = {
        labels.QUEUE_LABEL: "team",
        labels.PRIORITY_LABEL: "urgent",
        labels.KFP_RUN_LABEL: "kfp-run-id",
    }
    assert pod_of(job)["metadata"]["labels"] == own
    assert job["metadata"]["labels"] == own | queue


def test_a_job_with_a_queue_starts_when_it_is_admitted():
    assert build()["spec"]["runPolicy"]["suspend"] is True
    assert "suspend" not in build(TEXT.replace("queue: team", ""))["spec"]["runPolicy"]


def test_a_worker_knows_its_rank_and_its_machine():
    (container,) = pod_of(build())["spec"]["containers"]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e}
    assert fields == {
        spec.NODE_RANK_ENV: "metadata.labels['training.kubeflow.org/replica-index']",
        spec.NODE_NAME_ENV: "spec.nodeName",
    }


def test_certificates_of_ones_own_are_mounted_and_named():
    pod = pod_of(build(overrides=["launch.kubernetes.ca_bundle=ours"]))["spec"]
    (container,) = pod["containers"]
    assert {"name": "ca", "configMap": {"name": "ours"}} in pod["volumes"]
    assert {"name": "ca", "mountPath": pod_module.CA_FOLDER, "readOnly": True} in container["volumeMounts"]
    values = {e["name"]: e.get("value") for e in container["env"]}
    assert {values[name] for name in pod_module.CA_VARIABLES} == {f"{pod_module.CA_FOLDER}/ca.crt"}


def test_secrets_that_do_not_exist_are_left_out():
    (container,) = pod_of(build(overrides=["launch.kubernetes.secrets=[one, two]"]))["spec"]["containers"]
    named = [(entry["secretRef"]["name"], entry["secretRef"]["optional"]) for entry in container["envFrom"]]
    assert named == [("one", True), ("two", True)]


def test_a_job_tells_for_which_configuration_it_was_started():
    assert KIND.read_config_digest(build()) == config.parse(TEXT).digest()
    job = build()
    (container,) = pod_of(job)["spec"]["containers"]
    del container["command"]
    assert KIND.read_config_digest(job) == ""


@pytest.mark.parametrize("name", ["server", "master"])
def test_a_role_that_has_no_place_in_the_job_is_refused(name):
    """A Master would be one, but a job with a Master succeeds when that one does."""
    resolved = config.parse(TEXT)
    training = spec.make_job(TRAINING, RunPaths.of(resolved.run.storage_root, "r"), resolved)
    both = dataclasses.replace(training, roles=(*training.roles, spec.Role(name, 1, 1, (name,))))
    with pytest.raises(
        LaunchError, match=rf"train job of s3://.*a PyTorchJob has workers alone \(got '?{name}'?\); "
    ) as caught:
        KIND.build(both, resolved)
    assert caught.value.exit_code == 13
