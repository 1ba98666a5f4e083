"""The section `tracking`."""

from __future__ import annotations

from kftrain.settings.section import KeepsTraining, Section


class TrackingConfig(Section):
    """Where runs and models are recorded."""

    uri: KeepsTraining[str] = "sqlite:///mlflow.db"
    """MLflow tracking URI: `sqlite:///…` or `http(s)://…`."""
    experiment: KeepsTraining[str] = ""
    """Experiment name; empty: the run's name."""
    kubeflow_url: KeepsTraining[str] = ""
    """Address of the Kubeflow UI, for a tag that leads from MLflow to a pipeline run; `kftrain submit` fills it in."""
    allow_credentials_over_http: KeepsTraining[bool] = False
    """Send MLflow's password or token over plain http to another machine: only in a network of your own."""
