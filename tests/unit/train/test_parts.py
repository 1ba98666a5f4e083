"""The parts of a checkpoint: each is known in its version, or the checkpoint is refused."""

import json

import pytest

from kftrain.errors import CheckpointError
from kftrain.parallel.distributed import Part
from kftrain.run.commit import CheckpointManifest
from kftrain.train.engine import Parts


def parts(**versions):
    return Parts({name: Part(version, dict, lambda state: None) for name, version in versions.items()})


OWN = {"model": 1, "optimizer": 1}


@pytest.mark.parametrize(
    ("own", "found", "what"),
    [
        (OWN, {**OWN, "scaler": 1}, "the checkpoint holds 'scaler', which this release or this training"),
        (OWN, {**OWN, "optimizer": 2}, "the checkpoint holds version 2 of 'optimizer', this release reads version 1"),
        ({**OWN, "model": 3}, OWN, "the checkpoint holds version 1 of 'model', this release reads version 3"),
        ({**OWN, "scaler": 1}, OWN, "the checkpoint has no 'scaler', which this training needs"),
    ],
)
def test_another_part_or_another_version_is_refused_in_one_line(own, found, what):
    with pytest.raises(CheckpointError) as raised:
        parts(**own).require_same(found, "s3://b/step-1")
    assert raised.value.exit_code == 12
    assert what in raised.value.line
    assert "\n" not in raised.value.line and "s3://b/step-1" in raised.value.line


def test_a_checkpoint_that_does_not_say_its_parts_holds_model_and_optimizer():
    fields = {"step": 1, "samples_consumed": 1, "attempt": 1, "world_size": 1, "dataset_digest": "", "files": {}}
    fields |= {"schema_version": 1, "training_digest": "", "training_identity": {}}
    manifest = CheckpointManifest.model_validate(json.loads(json.dumps(fields)))
    parts(**OWN).require_same(manifest.parts, "x")


def test_the_state_is_that_of_each_part_under_its_name():
    loaded = {}
    own = Parts(
        {name: Part(1, lambda name=name: {"of": name}, lambda s, n=name: loaded.update({n: s})) for name in OWN}
    )
    assert own.save() == {"model": {"of": "model"}, "optimizer": {"of": "optimizer"}} and own.versions == OWN
    own.load(own.save())
    assert loaded == own.save()


def test_averages_may_be_left_and_a_part_that_is_missing_begins():
    begun = []
    more = Part(2, dict, None, is_optional=True, begin=begun.append)
    own = Parts({**{name: Part(1, dict, lambda _: None) for name in OWN}, "more": more})
    own.require_same({**OWN, "averages": 7}, "x")
    assert own.list_dispensable({**OWN, "averages": 7}) == ["averages"] and own.list_missing(OWN) == ["more"]
    own.begin(["more"], 7)
    assert begun == [7]
    with pytest.raises(CheckpointError, match="version 1 of 'more'"):
        own.require_same({**OWN, "more": 1}, "x")
