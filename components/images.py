"""The image that every step runs in: kftrain with its kfp, kubeflow, mlflow, s3 and sources extras, and no torch.

It is fixed when the pipeline is compiled; KFTRAIN_STEPS_IMAGE names another one.
"""

import os

from kftrain import __version__

STEPS_IMAGE_VARIABLE = "KFTRAIN_STEPS_IMAGE"

STEPS_IMAGE = os.environ.get(STEPS_IMAGE_VARIABLE) or f"kftrain-steps:{__version__}"
