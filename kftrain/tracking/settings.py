"""The section `tracking`."""

from __future__ import annotations

from kftrain.settings.section import KeepsTraining, Section


class TrackingConfig(Section):
    """The MLflow server that records runs and models."""

    uri: KeepsTraining[str] = "sqlite:///mlflow.db"
    """MLflow tracking URI: `sqlite:///…` or `http(s)://…`."""
    experiment: KeepsTraining[str] = ""
    """Name of the MLflow experiment; empty: the run's name."""
    kubeflow_url: KeepsTraining[str] = ""
    """Address of the Kubeflow UI; a tag in MLflow links to the pipeline run there. `kftrain submit` fills it in."""
    allow_credentials_over_http: KeepsTraining[bool] = False
    """Send MLflow's password or token over plain http to another machine; use it only in a network of your own."""
