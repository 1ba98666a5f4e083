"""`kftrain gc` and schedules: the rights in the manifests are enough, and none of them is too much."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.fakes.kfp_server import Server

from kftrain.cli import jobs
from kftrain.errors import LaunchError
from kftrain.kubeflow.client import disable_all
from kftrain.schedule.state import History

GC = Path(__file__).parents[3] / "manifests" / "base" / "gc.yaml"

pytestmark = pytest.mark.usefixtures("nobody_logged_in")


def documents():
    return list(yaml.safe_load_all(GC.read_text()))


def rights_of_pipelines():
    (role,) = [each for each in documents() if each["kind"] == "Role"]
    rules = [rule for rule in role["rules"] if rule["apiGroups"] == ["pipelines.kubeflow.org"]]
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def enabled(name, identity):
    trigger = {"cron_schedule": {"cron": "0 0 2 * * *"}}
    return {"display_name": name, "recurring_run_id": identity, "mode": "ENABLE", "trigger": trigger, "fired": []}


@pytest.mark.parametrize("multi_user", [False, True])
def test_what_is_paused_is_disabled_with_the_rights_of_the_manifests(multi_user):
    with Server(multi_user, rights=rights_of_pipelines()) as server:
        server.recurring = [enabled("nightly", "r-1"), enabled("weekly", "r-2")]
        line = "in Kubeflow: it is paused"
        assert disable_all(server.url, "team", ["nightly"], dry_run=True) == [f"would disable nightly {line}"]
        assert disable_all(server.url, "team", ["nightly"], dry_run=False) == [f"disabled nightly {line}"]
        assert [each["mode"] for each in server.recurring] == ["DISABLE", "ENABLE"]
        assert disable_all(server.url, "team", ["nightly"], dry_run=False) == []


@pytest.mark.parametrize("right", sorted(rights_of_pipelines()))
def test_with_one_verb_less_it_fails(right):
    with Server(multi_user=True, rights=rights_of_pipelines() - {right}) as server:
        server.recurring = [enabled("nightly", "r-1")]
        with pytest.raises(LaunchError, match="403"):
            disable_all(server.url, "team", ["nightly"], dry_run=False)


def test_a_cluster_without_kubeflow_pipelines_is_a_warning(tmp_path, capsys):
    History.of(str(tmp_path), "nightly").add_event("paused", "by hand")
    jobs._close_firings(SimpleNamespace(namespace="team"), str(tmp_path), False, "http://127.0.0.1:1")
    assert "warning: what is paused may still be enabled in Kubeflow" in capsys.readouterr().err


def test_the_pod_has_a_token_for_kubeflow_pipelines_where_kfp_looks_for_it():
    (cron,) = [each for each in documents() if each["kind"] == "CronJob"]
    pod = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (source,) = next(v for v in pod["volumes"] if v["name"] == "pipelines-token")["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"
    mount = next(m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "pipelines-token")
    env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert env["KF_PIPELINES_SA_TOKEN_PATH"] == f"{mount['mountPath']}/{source['serviceAccountToken']['path']}"
