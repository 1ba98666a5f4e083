"""A real MLflow on sqlite for every test; its tables are made once, which takes seconds."""

import shutil

import pytest

pytest.importorskip("mlflow")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    from kftrain.tracking import client

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client.ping(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(empty_database, tmp_path):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"
