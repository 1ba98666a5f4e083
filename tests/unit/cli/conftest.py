"""Kubeflow Pipelines as `kftrain submit` finds it: a scripted API server, and nothing of the user's own."""

import os

import pytest
from helpers.fakes import kfp_server

from kftrain.client import submit


@pytest.fixture
def nobody_logged_in(monkeypatch, tmp_path):
    """kfp's client knows neither a server nor a token."""
    import kfp

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", f"{tmp_path}/context.json")
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.01)
    for name in os.environ:
        if name.startswith(("KFP_", "KF_PIPELINES_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    """Answers as its API server does."""
    with kfp_server.Server() as started:
        yield started
