"""Names of models that MLflow refuses are refused before the training, not after it."""

import pytest

from kftrain.config import Config
from kftrain.errors import ConfigError
from kftrain.registry.settings import RegistryConfig
from kftrain.stages import preflight


@pytest.mark.parametrize("name", ["bob's model", "a/b", "a:b", "a" * 300])
def test_a_name_that_cannot_be_registered_is_refused_before_the_first_step(name):
    with pytest.raises(ConfigError, match=r"registry\.model_name: no name of a registered model"):
        preflight.check_run(Config(registry=RegistryConfig(model_name=name)))


def test_a_name_with_spaces_dots_and_other_letters_is_one():
    preflight.check_model_name("Bär v2.1 (night)")
