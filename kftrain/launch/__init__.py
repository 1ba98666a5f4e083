"""Jobs: what runs on many processes, where it is started, and how its success is known. Imports no torch."""

from kftrain.launch.jobs import run_evaluation, run_training

__all__ = ["run_evaluation", "run_training"]
