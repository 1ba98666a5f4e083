"""What is fixed when the pipeline is compiled: the image that every step runs in, and what its launchers ask for.

The image is kftrain with its kfp, kubeflow, mlflow, s3 and sources extras, and no torch; KFTRAIN_STEPS_IMAGE names
another one. A step that launches a job only watches it, for days: it takes 277 MB and hardly any CPU.
"""

import os

from kftrain import __version__

STEPS_IMAGE_VARIABLE = "KFTRAIN_STEPS_IMAGE"

NAMED_STEPS_IMAGE = os.environ.get(STEPS_IMAGE_VARIABLE, "")

STEPS_IMAGE = NAMED_STEPS_IMAGE or f"kftrain-steps:{__version__}"

LAUNCHER_CPU_VARIABLE, LAUNCHER_MEMORY_VARIABLE = "KFTRAIN_LAUNCHER_CPU", "KFTRAIN_LAUNCHER_MEMORY"

LAUNCHER_CPU = os.environ.get(LAUNCHER_CPU_VARIABLE) or "100m"
LAUNCHER_MEMORY = os.environ.get(LAUNCHER_MEMORY_VARIABLE) or "512Mi"
"""What the steps train and evaluate request, as Kubernetes writes it."""
