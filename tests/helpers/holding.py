"""Where a training of tests stands still until it is killed: who kills it there needs not be quick.

`HOLD` is JSON: `step`, before whose loss (from 0) it does, or `export`, before which it does.
"""

import json
import os
import time

from kftrain.checkpoint import exporting


def before_loss(step):
    """Called by a task, with how many losses it has computed."""
    if _told().get("step") == step:
        time.sleep(1000)


def before_export():
    """Called by a task at its beginning."""
    if _told().get("export"):
        exporting.export_checkpoint = lambda *arguments: time.sleep(1000)


def _told():
    return json.loads(os.environ.get("HOLD", "{}"))
