"""Stands in for the agent under a real supervisor: runs the Python that `FAKE_AGENT` holds."""

import os

from kftrain.process.kept import Reporter

Reporter().begin()
exec(os.environ["FAKE_AGENT"])
