"""A schedule as a CronJob: two firings on a real cluster, without Kubeflow's scheduler."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from e2e.commands import EXAMPLE, SMALL
from e2e.namespace import wait_until
from helpers.fakes.object_store import BUCKET

from kftrain.core.storage import read_json
from kftrain.run import documents
from kftrain.run.documents import Registration
from kftrain.run.paths import RunPaths
from kftrain.schedule.state import History

pytestmark = pytest.mark.timeout(1500, func_only=True)

RIGHTS = Path(__file__).parents[2] / "manifests" / "base" / "scheduled.yaml"
SCHEDULE = {"name": "often", "cron": "0 */2 * * * *", "time_zone": "UTC", "skip_unchanged": False}


def kubectl(namespace, *arguments, text=None):
    subprocess.run(["kubectl", "-n", namespace.name, *arguments], input=text, text=True, check=True)


def test_two_firings_are_two_runs_and_the_second_uses_the_shards_of_the_first(settings, images, namespace, tmp_path):
    knobs = {**SMALL, **settings, "launch.nodes": 1, "train.steps": 20, "run.storage_root": f"s3://{BUCKET}/often"}
    knobs["registry.model_name"] = SCHEDULE["name"]  # a registered model belongs to one storage root
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(yaml.safe_dump({**SCHEDULE, "configs": [EXAMPLE], "knobs": knobs}))
    render = ["schedule", "apply", "-f", str(schedule), "--render", "cronjob", "--image", images["steps"]]
    command = [sys.executable, "-m", "kftrain", *render, "--namespace", namespace.name]
    rendered = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    kubectl(namespace, "apply", "-f", str(RIGHTS))
    kubectl(namespace, "apply", "-f", "-", text=rendered)
    history = History.of(knobs["run.storage_root"], SCHEDULE["name"])
    wait_until(lambda: len(list(history.iterate_ends())) >= 2, 1200, "two firings that have ended")
    logs = [namespace.log(name) for name in namespace.pods() if name.startswith(f"kftrain-{SCHEDULE['name']}-")]
    kubectl(namespace, "delete", "cronjob", "--all")
    second, first = list(history.iterate_ends())[:2]
    assert (first.result, second.result) == ("trained", "trained"), (first.line, second.line)
    paths = [RunPaths(end.run_uri) for end in (first, second)]
    assert paths[0].uri != paths[1].uri
    # The same training: equal weights are one version.
    assert [documents.read(Registration, each.registration).version for each in paths] == [1, 1]
    assert read_json(paths[0].shards)["manifest_uri"] == read_json(paths[1].shards)["manifest_uri"]
    assert sum("shards written: " in log for log in logs) == 1
    assert any("shards already there: " in log for log in logs)
