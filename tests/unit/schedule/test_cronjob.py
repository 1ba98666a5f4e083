"""A schedule as a CronJob: the golden one, valid for Kubernetes, and what it runs."""

from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes_types import require_valid

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.schedule import cronjob, spec

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "cronjob.yaml"
NOW = datetime(2026, 11, 22, tzinfo=timezone.utc)
FILE = 'name: nightly\ncron: "0 0 2 * * *"\ntime_zone: Europe/Berlin\nconfigs: [c.yaml]\n'
CONFIG = """
run: {name: lm, storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, nodes: 2}
"""


def schedule(folder, text=FILE):
    (folder / "c.yaml").write_text(CONFIG)
    return spec.parse_schedule(text, "schedule.yaml", folder)


def without_configuration(text):
    """The golden file does not follow each new key of the configuration."""
    documents = list(yaml.safe_load_all(text))
    documents[0]["data"] = {cronjob.CONFIG_FILE: "…"}
    annotations = documents[1]["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["annotations"]
    annotations["kftrain.io/config"] = "…"
    return yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True)


def test_the_cronjob_is_the_golden_one(tmp_path):
    """After a wanted change: write the left side there and read the difference."""
    found = without_configuration(cronjob.render(schedule(tmp_path), "kftrain-steps:0.2.0", NOW, "team"))
    assert found == GOLDEN.read_text()


def test_the_configuration_in_it_is_the_schedules(tmp_path):
    found = schedule(tmp_path)
    first = next(yaml.safe_load_all(cronjob.render(found, "image", NOW)))
    assert config.parse(first["data"][cronjob.CONFIG_FILE]) == found.config


def test_every_key_is_one_of_kubernetes(tmp_path):
    config_map, found = cronjob.build_objects(schedule(tmp_path), "image", NOW, "team")
    require_valid("V1ConfigMap", config_map)
    require_valid("V1CronJob", found)
    wrong = {**found, "spec": {**found["spec"], "timezone": "Etc/UTC"}}
    with pytest.raises(AssertionError):
        require_valid("V1CronJob", wrong)


def test_the_manifests_have_the_account_and_its_secrets_are_optional(tmp_path):
    pod = cronjob.build_objects(schedule(tmp_path), "image", NOW)[1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    accounts = [
        document["metadata"]["name"]
        for document in yaml.safe_load_all((ROOT / "manifests" / "base" / "scheduled.yaml").read_text())
        if document["kind"] == "ServiceAccount"
    ]
    assert [pod["serviceAccountName"]] == accounts
    assert all(each["secretRef"]["optional"] for each in pod["containers"][0]["envFrom"])


@pytest.mark.parametrize(
    ("change", "line"),
    [(("0 0 2", "30 0 2"), "starts at the full minute"), (("0 0 2", "*/20 0 2"), "starts at the full minute")],
)
def test_what_a_cronjob_cannot_do_is_refused(tmp_path, change, line):
    with pytest.raises(ConfigError, match=line):
        cronjob.render(schedule(tmp_path, FILE.replace(*change)), "image", NOW)
