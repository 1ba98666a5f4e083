"""Imports a checkpoint of DeepSpeed ZeRO, trained anywhere, as a run: `import_checkpoint.py FOLDER`, on one process.

DeepSpeed's own zero_to_fp32 makes one set of weights of its parts; kftrain evaluates, compares and registers them.
"""

import os
import sys
from pathlib import Path

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file

import kftrain

export = Path(os.environ["KFTRAIN_CHECKPOINT_FOLDER"]) / "export"
export.mkdir()
weights = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
save_file({name: tensor.clone() for name, tensor in weights.items()}, export / "model.safetensors")
if not os.environ["KFTRAIN_RESUME"]:  # else committed already, and only the end is missing
    kftrain.commit(export, step=int(os.environ["KFTRAIN_STEPS"]))
kftrain.complete(export)
