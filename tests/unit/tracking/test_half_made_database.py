"""A process that is killed while MLflow makes its tables."""

import signal
import subprocess
import sys

import pytest

from kftrain.tracking import client

KILLED = """
import os, signal, sys
import sqlalchemy
from kftrain.tracking import client

@sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "after_cursor_execute")
def die(connection, cursor, statement, *others):
    if "CREATE TABLE trace_tags" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

client.ping(sys.argv[1])
"""


@pytest.mark.timeout(120)
def test_the_next_process_makes_all_of_them(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    killed = subprocess.run([sys.executable, "-c", KILLED, uri], check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL
    client.ping(uri)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
