"""A promotion by a person from a pipeline: into the journal with its reason, refused in one line."""

import pytest

pytest.importorskip("mlflow")

from kftrain import registry
from kftrain.errors import ConfigError
from kftrain.registry.journal import Declined, make_next_entry
from kftrain.stages.promote import promote_version

CONFIG = "run: {name: digits, storage_root: /data}\nregistry: {model_name: named}\n"


@pytest.fixture
def asked(monkeypatch):
    found = []

    def promote(config, version, reason):
        found.append((config.model_name, config.run.storage_root, version, reason))
        return make_next_entry([], "promote", version, f"by hand: {reason}")

    monkeypatch.setattr(registry, "promote", promote)
    return found


@pytest.mark.parametrize(("model", "name"), [("", "named"), ("other", "other")])
def test_the_version_of_the_named_model_becomes_champion(asked, model, name):
    lines = []
    outcome = promote_version(CONFIG, model, 7, "better on *new* customers", progress=lines.append)
    assert asked == [(name, "/data", 7, "better on *new* customers")]
    assert outcome.summary["result"] == f"version 7 of {name} is champion" and outcome.summary["number"] == 1
    assert "better on \\*new\\* customers" in outcome.markdown and outcome.run_uri == ""
    assert lines == [f"version 7 of {name} is champion (by hand: better on *new* customers)"]


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_promotion_by_hand_needs_a_reason(asked, reason):
    with pytest.raises(ConfigError, match="needs a reason"):
        promote_version(CONFIG, "", 7, reason, progress=lambda line: None)
    assert asked == []


def test_a_version_is_declined_the_same_way(monkeypatch):
    monkeypatch.setattr(
        registry,
        "decline",
        lambda config, version, reason: Declined(
            version=version, export_digest="d" * 64, reason=reason, time="2026", entry_id="x"
        ),
    )
    config = CONFIG.replace("/data", "memory://declined")
    outcome = promote_version(config, "", 7, "worse on _names_", decline=True, progress=lambda line: None)
    assert outcome.summary["result"] == "version 7 of named is declined" and "worse on \\_names\\_" in outcome.markdown
