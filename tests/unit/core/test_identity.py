"""The identity of a training: what older runs have keeps its value, and every key says whether it belongs to it."""

import json
from pathlib import Path

import pytest

from kftrain import config

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "identities.json").read_text())
"""Name -> configuration, identity and digest, as release 0.2.0 computed them. Runs of then go on only if they stay."""


@pytest.mark.parametrize("name", GOLDEN)
def test_a_run_of_release_02_has_the_identity_that_it_had_there(name):
    case = GOLDEN[name]
    resolved = config.parse(case["config"])
    assert resolved.training_identity("d" * 64) == case["identity"]
    assert resolved.training_digest("d" * 64) == case["digest"]
    assert config.parse_kept(resolved.to_yaml(), "kept").training_digest("d" * 64) == case["digest"]
