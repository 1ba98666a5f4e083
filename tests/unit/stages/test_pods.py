"""Settings of a pipeline's task reach the workers of its job."""

from types import SimpleNamespace

from kftrain import config
from kftrain.core import storage
from kftrain.launch.kubernetes import task_pods
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths

NOTHING = {"node_selector": None, "tolerations": None, "affinity": None, "volumes": None, "volume_mounts": None}
TOLERATION = {"key": "gpu", "operator": "Exists"}


def task_config(**settings):
    return SimpleNamespace(**{**NOTHING, **settings}, resources={"limits": {"cpu": "1"}}, env=[{"name": "A"}])


def test_what_is_set_on_the_task_joins_the_configuration():
    own = config.parse("launch: {kubernetes: {node_selector: {a: b}, tolerations: [{key: own}], cpu: 3}}")
    changed = task_pods.with_task_config(
        own,
        task_config(
            node_selector={"c": "d"},
            tolerations=[TOLERATION, {"key": "own"}],
            affinity={"nodeAffinity": {}},
            volumes=[{"name": "v"}],
            volume_mounts=[{"name": "v", "mountPath": "/v"}],
        ),
    ).launch.kubernetes
    assert changed.node_selector == {"a": "b", "c": "d"}
    assert changed.tolerations == ({"key": "own"}, TOLERATION)
    assert changed.affinity == {"nodeAffinity": {}}
    assert (changed.volumes, changed.volume_mounts) == (({"name": "v"},), ({"name": "v", "mountPath": "/v"},))
    assert changed.cpu == "3", "the step's own resources are not the workers'"


def test_it_is_saved_for_the_workers_once_and_a_retry_changes_nothing(tmp_path):
    paths = RunPaths.of(str(tmp_path), "r")
    storage.publish(paths.config, config.parse("").to_yaml())
    first = task_pods.apply_task_pods(read_config(paths), paths, task_config(tolerations=[TOLERATION]))
    again = task_pods.apply_task_pods(read_config(paths), paths, task_config(tolerations=[TOLERATION]))
    assert first == again == read_config(paths)
    assert first.launch.kubernetes.tolerations == (TOLERATION,)
    assert (
        task_pods.apply_task_pods(first, paths, task_config()) == task_pods.apply_task_pods(first, paths, None) == first
    )
