"""The identity of a training: what older runs have keeps its value, and every key says whether it belongs to it."""

import itertools
import json
from pathlib import Path
from typing import Annotated, get_args

import pytest
from pydantic import Field

from kftrain import config
from kftrain.parallel.settings import ParallelConfig
from kftrain.settings.section import ChangesTraining, Effect, KeepsTraining, Section
from kftrain.train.settings import OptimizerConfig, ParameterGroup, TrainConfig

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "identities.json").read_text())
"""Name -> configuration, identity and digest, as release 0.2.0 computed them. Runs of then go on only if they stay."""


@pytest.mark.parametrize("name", GOLDEN)
def test_a_run_of_release_02_has_the_identity_that_it_had_there(name):
    case = GOLDEN[name]
    resolved = config.parse(case["config"], ["data.order=2"])
    assert resolved.training_identity("d" * 64) == case["identity"]
    assert resolved.training_digest("d" * 64) == case["digest"]
    assert config.parse_kept(resolved.to_yaml(), "kept").training_digest("d" * 64) == case["digest"]
    assert config.parse_kept(case["config"], "kept").training_digest("d" * 64) == case["digest"]
    assert config.parse(case["config"]).training_identity("d" * 64) == case["identity"] | {"order": 3}


def walk_sections(kind, path=""):
    """Yield where each section stands, and its class: those in lists, too."""
    for name, field in kind.model_fields.items():
        inner = next(filter(is_section, (field.annotation, *get_args(field.annotation))), None)
        if inner is not None:
            yield f"{path}{name}", inner
            yield from walk_sections(inner, f"{path}{name}.")


def is_section(kind):
    return isinstance(kind, type) and issubclass(kind, Section)


SECTIONS = dict(walk_sections(config.Config))

ENTRIES = {"dataset", "order", "initial_weights", "data.mixture_weights"}
"""Entries of an identity that stand for several keys, or for what lies outside of the configuration."""


def find_unmarked(kind):
    marks = {
        name: [mark for mark in field.metadata if isinstance(mark, Effect)] for name, field in kind.model_fields.items()
    }
    own = {name: marks[name] for name, field in kind.model_fields.items() if not is_section(field.annotation)}
    return [name for name, found in own.items() if len(found) != 1]


@pytest.mark.parametrize("path", SECTIONS)
def test_every_key_says_whether_it_changes_training(path):
    assert not find_unmarked(SECTIONS[path]), "annotate them with ChangesTraining or KeepsTraining"
    assert {mark.counted_as for mark in SECTIONS[path].effects().values()} <= {"", *ENTRIES}


def test_a_key_without_a_mark_or_with_two_is_noticed():
    class Wider(TrainConfig):
        ema: float = 0.0
        both: KeepsTraining[ChangesTraining[int]] = 0

    assert find_unmarked(Wider) == ["ema", "both"]


LISTED = {"optimizer.groups", "server.tables", "train.batch_warmup"}
"""Sections of lists that are empty by default: their own tests see that they count."""


@pytest.mark.parametrize("path", [path for path in SECTIONS if "mixture" not in path and path not in LISTED])
def test_a_key_belongs_to_the_identity_if_and_only_if_its_mark_says_so(path):
    for name, mark in SECTIONS[path].effects().items():
        base = config.parse("")
        sections = list(itertools.accumulate(path.split("."), getattr, initial=base))
        changed = sections[-1].model_copy(update={name: "something else"})
        for section, key in zip(reversed(sections[:-1]), reversed(path.split(".")), strict=True):
            changed = section.model_copy(update={key: changed})
        if mark.counted_as in ("", "initial_weights") and name != "start_from":
            assert (changed.training_identity("d") != base.training_identity("d")) is mark.changes_training, name


def identity_with(section, **values):
    """Return the identity of the defaults with one section of another class."""
    name = {ParallelConfig: "parallel", OptimizerConfig: "optimizer"}[type(section).__mro__[1]]
    return config.parse("").model_copy(update={name: section.model_copy(update=values)}).training_identity("d")


def test_a_key_that_is_added_with_a_default_leaves_every_identity_as_it_was():
    class Wrapping(ParallelConfig):
        wrapping: Annotated[str, Effect(changes_training=True, added="0.3")] = ""
        buckets: KeepsTraining[int] = 4

    class Averaging(OptimizerConfig):
        averages: Annotated[dict[str, float], Effect(changes_training=True, added="0.3")] = Field(default_factory=dict)

    before = config.parse("").training_identity("d")
    assert identity_with(Wrapping()) == identity_with(Averaging()) == identity_with(Wrapping(), buckets=9) == before
    assert identity_with(Wrapping(), wrapping="int8") == before | {"parallel": {"wrapping": "int8"}}
    averaged = identity_with(Averaging(), averages={"ema": 0.9})
    assert averaged == before | {"optimizer": before["optimizer"] | {"averages": {"ema": 0.9}}}


def test_a_key_that_is_added_to_an_entry_of_a_list_leaves_the_others_as_they_were():
    class Group(ParameterGroup):
        clip: Annotated[float, Effect(changes_training=True, added="0.3")] = 1.0

    def identify(group):
        return OptimizerConfig().model_copy(update={"groups": (group,)}).identity()["groups"]

    assert identify(Group(pattern="*")) == identify(ParameterGroup(pattern="*"))
    assert identify(Group(pattern="*", clip=0.5))[0]["clip"] == 0.5
