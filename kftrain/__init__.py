"""kftrain: distributed training pipelines on Kubeflow that do not lose runs.

Importing this package costs nothing: every heavy library (torch, kfp, mlflow, kubernetes) is imported by the module
that needs it, when it needs it.
"""

__version__ = "0.2.0"
