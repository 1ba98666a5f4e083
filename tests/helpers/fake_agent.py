"""Stands in for the agent under a real supervisor: runs the Python that `FAKE_AGENT` holds."""

import os

from kftrain.process.kept import Reporter
from kftrain.process.parent_death import die_with_parent

die_with_parent()
Reporter().begin()
exec(os.environ["FAKE_AGENT"])
