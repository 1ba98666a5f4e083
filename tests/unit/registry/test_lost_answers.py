"""A real MLflow server whose answers to writes get lost: whatever is tried again, everything is there once."""

import pytest
from helpers.fakes.proxies import LosingProxy

from kftrain import registry, tracking
from kftrain.errors import TrackingError
from kftrain.tracking import model_client

pytestmark = pytest.mark.timeout(300)

MADE = ("runs/create", "logged-models", "runs/outputs", "model-versions/create", "experiments/create")


def persevere(step, proxy):
    """Runs a step again as often as Kubeflow would, while answers get lost."""
    for _ in range(20):
        num_lost = sum(proxy.lost.values())
        try:
            return step()
        except TrackingError:
            if proxy.num_losses == 1 or sum(proxy.lost.values()) == num_lost:
                raise
    raise AssertionError("it never ends")


def story(proxy, make_config, finish, root, name):
    """A champion, a challenger that takes its place, and a person who wants the first."""
    config = make_config(proxy.uri, root, **{"registry.model_name": name, "tracking.experiment": name})
    runs = [
        persevere(lambda run=run, q=q: finish(config, f"{name}-{run}", q), proxy) for run, q in (("a", 0.6), ("b", 0.7))
    ]
    registered = [persevere(run.register, proxy) for run in runs]
    outcomes = [persevere(lambda r=r, v=v: r.gate(v), proxy) for r, v in zip(runs, registered, strict=True)]
    for run in runs:
        persevere(lambda run=run: tracking.log_text(proxy.uri, run.mlflow_run_id, "page", "report.html"), proxy)
        persevere(lambda run=run: tracking.finish_run(proxy.uri, run.mlflow_run_id, "FINISHED"), proxy)
    persevere(lambda: registry.promote(config, registered[0].version, "by hand"), proxy)
    return config, runs, registered, outcomes


def require_once(server, config, name, runs, registered, outcomes):
    import mlflow

    reader = mlflow.MlflowClient(tracking_uri=server.uri, registry_uri=server.uri)
    experiment = reader.get_experiment_by_name(name).experiment_id
    found = {run.info.run_id: run for run in reader.search_runs([experiment])}
    assert set(found) == {run.mlflow_run_id for run in runs} and {r.info.status for r in found.values()} == {"FINISHED"}
    models = {model.model_id: model for model in reader.search_logged_models([experiment])}
    assert set(models) == {version.logged_model_id for version in registered}
    assert {str(model.status) for model in models.values()} == {"READY"}
    for run, version in zip(runs, registered, strict=True):
        recorded = found[run.mlflow_run_id]
        assert [output.model_id for output in recorded.outputs.model_outputs] == [version.logged_model_id]
        assert len(recorded.inputs.dataset_inputs) == 1 and recorded.data.params["train.steps"] == "400"
        for key, metric in recorded.data.metrics.items():
            assert [point.value for point in reader.get_metric_history(run.mlflow_run_id, key)] == [metric], key
    assert [v.version for v in model_client.search_versions(server.uri, name)] == sorted(v.version for v in registered)
    assert all(outcome.promoted for outcome in outcomes)
    assert model_client.get_aliases(server.uri, name)["champion"] == registered[0].version
    assert registry.audit(config) == []


@pytest.mark.parametrize(
    ("only", "num_losses"),
    [*((only, number) for only in MADE for number in (1, 3)), ("", 1), pytest.param("", 3, marks=pytest.mark.slow)],
)
def test_what_an_answer_was_lost_of_is_there_once(server, tmp_path, make_config, finish, only, num_losses):
    name = f"{only.replace('/', '-') or 'all'}-{num_losses}"
    with LosingProxy(server.uri, num_losses, only) as proxy:
        told = story(proxy, make_config, finish, tmp_path / "root", name)
        assert proxy.lost
        require_once(server, told[0], name, *told[1:])
