"""TrainJobs of Kubeflow Trainer 2.3, on the TrainingRuntime that users apply."""

from pathlib import Path

import yaml
from launchers.sites.cluster import open_cluster

RUNTIME = Path(__file__).parents[3] / "manifests" / "overlays" / "trainer" / "runtime.yaml"


def open_site(request, folder):
    return open_cluster(
        request,
        "trainjob",
        ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
        "kubeflow-trainer-controller-manager",
        prepare=_create_runtime,
        refused={"servers": "the runtime of our TrainJobs has workers alone"},
    )


def _create_runtime(namespace):
    runtime = yaml.safe_load(RUNTIME.read_text())
    namespace.custom.create_namespaced_custom_object(
        "trainer.kubeflow.org", "v1alpha1", namespace.name, "trainingruntimes", runtime
    )
