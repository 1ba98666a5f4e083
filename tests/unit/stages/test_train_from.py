"""`train.from` is looked up once, when a run is opened, and belongs to the training from then on."""

import json

import pytest
from helpers.documents import digits_config, publish_commit, publish_described_export
from helpers.models.toy_task import ToyTask

from kftrain import config, registry, tracking
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, OtherTrainingError
from kftrain.registry import Champion, initial_weights, lineage
from kftrain.registry.reference import Reference
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.stages.shard import shard
from kftrain.tracking import model_client
from kftrain.tracking.model_client import ModelVersion


@pytest.fixture
def champions(tmp_path, monkeypatch):
    """Exports by version; the last one is champion."""
    made = []

    def champion(resolved):
        return made[-1] if made else None

    monkeypatch.setattr(tracking, "check", lambda uri: None)
    monkeypatch.setattr(registry, "champion", champion)
    return made


SMALL = {"dim": 16, "num_layers": 1, "num_heads": 2}
"""What `digits_config` says."""


def crown(champions, root, kind="vision_transformer", **options):
    number = len(champions) + 1
    uri = f"{root}/store/runs/old-{number}/export/c"
    description = {
        "schema_version": 1,
        "model": {"kind": kind, **(options or SMALL)},
        "task": {"kind": "image_classification", "image_size": 8},
        "model_arguments": {"number": number},
    }
    digest = publish_described_export(uri, description)
    champions.append(Champion(number, f"{root}/store/runs/old-{number}", "c", uri, digest))
    return champions[-1]


def opened(root, run_id, *overrides, lines=None):
    outcome = shard(digits_config(root, *overrides), run_id, progress=(lines if lines is not None else []).append)
    return read_config(RunPaths(outcome.run_uri))


def test_the_champion_of_the_moment_is_kept_in_the_run_and_is_part_of_the_training(tmp_path, champions):
    first = crown(champions, tmp_path)
    lines = []
    kept = opened(tmp_path, "r-1", "train.from=champion", lines=lines)
    assert kept.train.initial_weights.export_uri == first.export_uri
    assert kept.train.initial_weights.export_digest == first.export_digest
    assert "train.from champion: version 1, the champion" in lines
    assert kept.training_identity("d")["initial_weights"] == first.export_digest
    assert kept.training_digest("d") != digits_config(tmp_path).training_digest("d")
    crown(champions, tmp_path)
    again = opened(tmp_path, "r-1", "train.from=champion", lines=lines)
    assert again == kept, "a later champion is not that of this run"
    other = opened(tmp_path, "r-2", "train.from=champion")
    assert other.train.initial_weights.origin == "version 2, the champion"
    assert other.training_digest("d") != kept.training_digest("d")


def test_without_a_champion_the_training_starts_from_scratch_and_says_so(tmp_path, champions):
    lines = []
    kept = opened(tmp_path, "r-1", "train.from=champion", lines=lines)
    assert "train.from champion: no champion yet, from scratch" in lines
    assert kept.train.initial_weights.origin == "no champion yet, from scratch"
    assert kept.training_digest("d") == digits_config(tmp_path).training_digest("d")
    crown(champions, tmp_path)
    assert opened(tmp_path, "r-1", "train.from=champion") == kept, "it stays what it was when the run was opened"


def test_a_run_that_has_trained_starts_with_nothing_else(tmp_path, champions):
    crown(champions, tmp_path)
    kept = opened(tmp_path, "r-1", "train.from=champion")
    publish_commit(RunPaths.of(f"{tmp_path}/store", "r-1"))
    for other in ("scratch", f"{crown(champions, tmp_path).export_uri}"):
        with pytest.raises(OtherTrainingError, match="initial_weights"):
            opened(tmp_path, "r-1", f"train.from={other}")
    storage.remove(champions[0].export_uri)
    assert opened(tmp_path, "r-1", "train.from=champion") == kept, "its first weights are needed no more"


def test_a_kept_configuration_with_another_wish_is_looked_up_again(tmp_path, champions):
    first, second = crown(champions, tmp_path), crown(champions, tmp_path)
    kept = opened(tmp_path, "r-1", "train.from=champion")
    changed = config.parse_kept(kept.to_yaml(), "kept", [f"train.from={first.export_uri}"])
    paths = RunPaths.of(f"{tmp_path}/store", "r-2")
    assert kept.train.initial_weights.export_digest == second.export_digest
    found = initial_weights.with_initial_weights(changed, paths, [].append)
    assert found.train.initial_weights.export_digest == first.export_digest
    scratch = config.parse_kept(kept.to_yaml(), "kept", ["train.from=scratch"])
    assert initial_weights.with_initial_weights(scratch, paths, [].append) == digits_config(tmp_path)


def test_a_version_is_found_through_its_reference(tmp_path, champions, monkeypatch):
    export = crown(champions, tmp_path)
    version = ModelVersion(name="tiny", version=7, source="models:/m-1", run_id="", tags={})
    fields = dict.fromkeys(
        ("run_uri", "checkpoint_digest", "dataset_digest", "training_digest", "evaluation_digest"), "x"
    )
    reference = Reference(export_uri=export.export_uri, export_digest=export.export_digest, **fields)
    monkeypatch.setattr(model_client, "get_version", lambda uri, name, number: version if number == 7 else None)
    monkeypatch.setattr(lineage, "read_reference", lambda uri, found: reference)
    for text in ("7", "v7"):
        kept = opened(tmp_path, f"r-{text}", f"train.from={text}")
        assert kept.train.initial_weights.origin == "version 7"
        assert kept.train.initial_weights.export_digest == export.export_digest
    with pytest.raises(ConfigError, match=r"tiny has no such version \(got 8\)"):
        opened(tmp_path, "r-8", "train.from=8")


@pytest.mark.parametrize("uri", ["http://evil/export", "/elsewhere/export"])
def test_a_foreign_place_is_not_read(tmp_path, champions, uri):
    with pytest.raises(ConfigError, match="does not lie below a storage root that may be read here"):
        opened(tmp_path, "r-1", f"train.from={uri}")


def test_an_export_that_is_gone_and_a_model_of_another_kind_are_refused(tmp_path, champions):
    with pytest.raises(CheckpointError, match="no export here"):
        opened(tmp_path, "r-1", f"train.from={tmp_path}/store/runs/gone")
    crown(champions, tmp_path, "transformer")
    with pytest.raises(ConfigError, match=r"whose model\.kind is transformer"):
        opened(tmp_path, "r-2", "train.from=champion")


def require_fit(root, champion, model, *overrides):
    trust = "trusted_kinds: ['helpers.models.odd:Recurrent']"
    text = f"{{model: {json.dumps(model)}, run: {{storage_root: {root}/store}}, registry: {{{trust}}}}}"
    resolved = config.parse(text, overrides)
    train = resolved.train.starting_with("version 1", champion.export_uri, champion.export_digest)
    initial_weights.require_fit(resolved.model_copy(update={"train": train}), ToyTask())


@pytest.mark.parametrize(
    ("kind", "name", "theirs", "ours", "shown"),
    [
        ("vision_transformer", "num_heads", 2, None, r"model\.num_heads: .* whose num_heads is 2 \(got 4\)"),
        ("transformer", "num_heads", 3, 2, r"whose num_heads is 3 \(got 2"),
        ("transformer", "rope_theta", 1e4, 500.0, r"whose rope_theta is 10000\.0 \(got 500"),
        ("transformer", "norm_eps", 1e-6, None, r"whose norm_eps is 1e-06 \(got 1e-05"),
        ("helpers.models.odd:Recurrent", "gain", 2, 3, r"whose gain is 2 \(got 3"),
    ],
)
def test_an_option_that_changes_no_shape_must_be_that_of_the_export(
    tmp_path, champions, kind, name, theirs, ours, shown
):
    champion = crown(champions, tmp_path, kind, **{name: theirs})
    model = {"kind": kind, **({} if ours is None else {name: ours})}
    with pytest.raises(ConfigError, match=shown) as caught:
        require_fit(tmp_path, champion, model)
    assert "\n" not in caught.value.line
    require_fit(tmp_path, champion, {"kind": kind, name: theirs})


def test_what_is_dropped_in_training_and_sizes_by_another_name_may_differ(tmp_path, champions):
    champion = crown(champions, tmp_path, dropout=0.1, dim=64)
    require_fit(tmp_path, champion, {"kind": "vision_transformer"})
    champion = crown(champions, tmp_path, "transformer", num_heads=4, num_kv_heads=4)
    require_fit(tmp_path, champion, {"kind": "transformer", "num_heads": 4, "rope_theta": 10000})


@pytest.mark.parametrize("theirs", [b"another", None])
def test_weights_that_were_trained_with_another_tokenizer_are_refused(tmp_path, champions, theirs):
    class Reads(ToyTask):
        def assets(self):
            return {"tokenizer.json": b"ours"}

    def fits(content):
        uri = f"{tmp_path}/store/runs/old/export/c"
        description = {"schema_version": 1, "model": {"kind": "transformer"}, "model_arguments": {}}
        contents = {} if content is None else {"tokenizer.json": content}
        digest = publish_described_export(uri, {**description, "task": {"kind": "language_modeling"}}, contents)
        resolved = config.parse("", [f"run.storage_root={tmp_path}/store"])
        train = resolved.train.starting_with("version 1", uri, digest)
        initial_weights.require_fit(resolved.model_copy(update={"train": train}), Reads())

    fits(b"ours")
    with pytest.raises(ConfigError, match=r"version 1 was trained with another tokenizer\.json"):
        fits(theirs)


@pytest.mark.parametrize("text", ["best", "v", "-1", "1.5", "", "Champion"])
def test_what_is_nobody_to_start_from_is_refused(text):
    with pytest.raises(ConfigError, match=r"train\.from") as caught:
        config.parse(f"train: {{from: '{text}'}}")
    assert "scratch, champion, a version" in caught.value.line


def test_the_key_is_called_from_wherever_it_is_written():
    own = config.parse("train: {from: 3}")
    assert own.train.start_from == "3" and own.train.from_version == 3
    assert own.to_dict()["train"]["from"] == "3" and config.parse(own.to_yaml()) == own
    assert own.beyond_defaults() == {"train": {"from": "3"}}
    with pytest.raises(ConfigError, match="unknown key"):
        config.parse("train: {start_from: '3'}")
    with pytest.raises(ConfigError, match="did you mean 'from'"):
        config.parse("train: {frm: '3'}")


def test_credentials_in_a_place_to_start_from_are_refused(tmp_path, champions):
    with pytest.raises(ConfigError, match=r"train\.from: a URI with credentials"):
        opened(tmp_path, "r-1", "train.from=s3://name:secret@bucket/runs/r")
