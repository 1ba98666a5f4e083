import subprocess
import sys
from pathlib import Path

import pytest

from kftrain.errors import ConfigError
from kftrain.tasks import Task, build_task
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tasks.settings import TaskConfig

REPOSITORY = Path(__file__).parents[3]


class OwnTask(LanguageModeling):
    def __init__(self, *, window: int = 4) -> None:
        super().__init__(sequence_length=window)


class Unfinished(Task):
    def schema(self):
        raise NotImplementedError

    def metrics(self, sums):
        raise NotImplementedError


class Hides(LanguageModeling):
    def __init__(self):
        super().__init__()
        self.examples = ["of its own"]


class NoTask:
    pass


def built_by_a_function():
    return NoTask()


def own(name, **options):
    return TaskConfig(kind=f"{__name__}:{name}", **options)


def test_built_in_and_own_kinds_are_built_with_their_options():
    task = build_task(TaskConfig(kind="language_modeling", sequence_length=32))
    assert isinstance(task, LanguageModeling) and task.sequence_length == 32
    assert isinstance(
        build_task(TaskConfig(kind="image_classification", image_size=8, num_classes=3)), ImageClassification
    )
    assert build_task(own("OwnTask", window=9)).sequence_length == 9


@pytest.mark.parametrize(
    ("config", "where", "part"),
    [
        (TaskConfig(kind="language_modelling"), "task.kind", "did you mean 'language_modeling'?"),
        (TaskConfig(sequence_lenght=3), "task.sequence_lenght", "did you mean 'sequence_length'?"),
        (TaskConfig(sequence_length=0), "task.sequence_length", "greater than or equal to 1"),
        (TaskConfig(sequence_length="long"), "task.sequence_length", "integer"),
        (TaskConfig(kind="image_classification", num_classes=3), "task.image_size", "required option is missing"),
        (TaskConfig(kind="image_classification", image_size=8, num_classes=1), "task.num_classes", "or equal to 2"),
        (own("Unfinished"), "task.kind", "lacks loss, statistics"),
        (own("Hides"), "task.kind", "an attribute of its own hides a method (got ['examples'])"),
        (own("NoTask"), "task.kind", "is no task"),
        (own("built_by_a_function"), "task.kind", "is no task"),
        (own("OwnTask", windo=9), "task.windo", "did you mean 'window'?"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_place_and_the_fix(config, where, part):
    with pytest.raises(ConfigError) as raised:
        build_task(config)
    assert raised.value.where == where
    assert part in raised.value.line and "\n" not in raised.value.line


WITHOUT_TORCH = """
import pkgutil
import sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch here", name="torch")

sys.meta_path.insert(0, NoTorch())
import numpy, kftrain.tasks
from kftrain.tasks.settings import TaskConfig
from kftrain.data.schema import Record
for module in pkgutil.iter_modules(kftrain.tasks.__path__, "kftrain.tasks."):
    __import__(module.name)
text = kftrain.tasks.build_task(TaskConfig(sequence_length=8))
records = [Record("a/b", {"text": b"some text that is long enough"})]
(block,) = text.encode(records, "validation")
rows = text.rows({"text": block.arrays["text"][0]})
text.settings(), text.baselines([block.arrays]), text.model_arguments(), text.count_terms(rows)
sums = {"bits": numpy.ones(1), "bytes": numpy.ones(1), "correct": numpy.ones(1)}
text.metrics(sums), text.slice_names(["a/b"], sums), text.confusion(sums)
images = kftrain.tasks.build_task(TaskConfig(kind="image_classification", image_size=2, num_classes=2))
records = [Record("a", {"image": numpy.zeros((2, 2), "uint8"), "label": 1})]
(block,) = images.encode(records, "train")
images.settings(), images.baselines([block.arrays]), images.model_arguments(), images.count_terms(block.arrays)
sums = {name: numpy.ones(1) for name in ("correct", "cross_entropy", "count", "label", "prediction")}
images.metrics(sums), images.slice_names(["a"], sums), images.confusion(sums)
"""


def test_sharding_and_the_gate_need_no_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, cwd=REPOSITORY)
