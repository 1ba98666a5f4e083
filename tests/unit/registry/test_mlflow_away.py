"""MLflow or its artifacts away for a while: nothing is decided without what could not be read."""

import pytest
import requests

from kftrain import registry
from kftrain.errors import TrackingError
from kftrain.registry.journal import Journal


def http_error(status):
    """As MLflow raises it, with the id of a model in the address that happens to hold other digits."""
    answer = requests.Response()
    answer.status_code, answer.url = status, "http://mlflow/api/2.0/mlflow-artifacts/artifacts/1/models/m-4041404"
    return requests.HTTPError(f"{status} Error for url: {answer.url}/reference.json", response=answer)


def of_s3():
    from botocore.exceptions import EndpointConnectionError

    return EndpointConnectionError(endpoint_url="http://minio:9000/")


OUTAGES = {
    "server error": lambda: http_error(503),
    "refused": lambda: requests.ConnectionError("Max retries exceeded with url: /models/m-4041404/reference.json"),
    "driver of the artifacts": of_s3,
}


def fail_downloads(monkeypatch, error, when=lambda number: True):
    """Lets downloads fail whose number, from 1 on, `when` names; returns their list."""
    from mlflow import artifacts

    download, calls = artifacts.download_artifacts, []

    def downloaded(**options):
        calls.append(options["artifact_uri"])
        if when(len(calls)):
            raise error
        return download(**options)

    monkeypatch.setattr(artifacts, "download_artifacts", downloaded)
    return calls


def entries(config):
    return [(entry.kind, entry.version) for entry in Journal.of(config.run.storage_root, "toy").entries()]


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_champion_whose_reference_cannot_be_read_now_is_not_taken_for_one_that_cannot_be_measured(
    config, finished, aliases, monkeypatch, outage
):
    finished("one", 0.6).submit()
    run = finished("two", 0.9)
    registered = run.register()
    with monkeypatch.context() as patched:
        calls = fail_downloads(patched, OUTAGES[outage]())
        with pytest.raises(TrackingError, match=r"cannot read reference\.json"):
            registry.champion(config)
        with pytest.raises(TrackingError, match=r"cannot read reference\.json"):
            run.gate(registered)
        assert calls
    assert (entries(config), aliases()) == ([("promote", 1)], {"champion": 1})
    assert run.gate(registered).promoted, "the same step, run again"


def test_a_reference_that_is_not_there_is_none(config, finished, tmp_path):
    finished("one", 0.6).submit()
    [reference] = (tmp_path / "mlruns").rglob("reference.json")
    reference.unlink()
    assert registry.champion(config) is None
    [finding] = registry.audit(config)
    assert finding.version == 1 and "has no reference.json" in finding.problem


def test_a_rollback_passes_over_no_version_that_cannot_be_read_now(config, finished, aliases, monkeypatch):
    for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.8)):
        finished(name, quality).submit()
    with monkeypatch.context() as patched:
        calls = fail_downloads(patched, http_error(503), when=lambda number: number == 2)
        with pytest.raises(TrackingError, match=r"cannot read reference\.json"):
            registry.rollback(config)
        assert len(calls) == 2
    assert aliases()["champion"] == 3
    assert registry.rollback(config).version == 2


def test_an_audit_calls_no_version_wrong_that_cannot_be_read_now(config, finished, monkeypatch):
    finished("one", 0.6).submit()
    with monkeypatch.context() as patched:
        fail_downloads(patched, http_error(503))
        with pytest.raises(TrackingError, match=r"cannot read reference\.json"):
            registry.audit(config)
    assert registry.audit(config) == []
