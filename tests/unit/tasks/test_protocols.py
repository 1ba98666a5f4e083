"""The three protocols of a task: what sharding, training and serving ask, and nothing twice."""

import inspect

from kftrain.tasks import Task
from kftrain.tasks.base import EncodingTask, SampleTask, ServingTask, TrainingTask

PARTS = (EncodingTask, TrainingTask, ServingTask)


def hooks(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_each_hook_belongs_to_one_protocol():
    shared, *parts = (hooks(kind) for kind in (SampleTask, *PARTS))
    assert sum(map(len, [shared, *parts])) == len(set.union(shared, *parts))
    assert Task.__bases__ == PARTS and hooks(Task) == {"predict", "export_files"} < hooks(ServingTask)
    assert {"encode", "settings"} <= parts[0] and {"loss", "batch"} <= parts[1] and {"predict", "answer"} <= parts[2]


def test_a_task_says_four_things_itself_and_inherits_the_others():
    assert Task.__abstractmethods__ == {"schema", "loss", "statistics", "metrics"}
    assert not inspect.isabstract(type("Whole", (Task,), dict.fromkeys(Task.__abstractmethods__, lambda self: None)))
