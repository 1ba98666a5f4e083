"""kftrain: distributed training pipelines on Kubeflow that do not lose runs.

`load_config`, `run_pipeline`, `compile_pipeline`, `submit_pipeline`, `open_dataset` and `load_export` are the product
from Python, see `kftrain.api`; a script of `train.command` calls `report`, `commit`, `complete` and `should_stop`.
Importing this package costs nothing: every heavy library (torch, kfp, mlflow, kubernetes) is imported by the module
that needs it, when it needs it.
"""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.api import (
        CompletedRun,
        commit,
        compile_pipeline,
        complete,
        load_config,
        load_export,
        open_dataset,
        report,
        run_pipeline,
        should_stop,
        submit_pipeline,
    )

__version__ = "0.2.0"

__all__ = (
    "load_config",
    "run_pipeline",
    "compile_pipeline",
    "submit_pipeline",
    "open_dataset",
    "load_export",
    "CompletedRun",
    "commit",
    "complete",
    "report",
    "should_stop",
)

__getattr__ = attributes(__name__, {"kftrain.api": __all__})
