"""Options of a model are refused from its source alone: the first pod of a pipeline has no torch."""

import subprocess
import sys

import pytest

from kftrain.errors import ConfigError
from kftrain.models.registry import BUILT_IN
from kftrain.models.settings import ModelConfig
from kftrain.models.signature import check_options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"kind": "transformer", "num_layer": 2},
            "model.num_layer: unknown option (got 2); did you mean",
        ),
        ({"kind": "transformer", "dim": "wide"}, "model.dim: input should be a valid integer"),
        ({"kind": "transformer", "rope_theta": -1.0}, "model.rope_theta: input should be greater than 0 (got -1.0)"),
        ({"kind": "vision_transformer", "dropout": 7}, "model.dropout: input should be"),
    ],
)
def test_a_wrong_option_of_a_built_in_model_is_refused(options, line):
    with pytest.raises(ConfigError) as raised:
        check_options(ModelConfig(**options))
    assert raised.value.line.startswith(line)


def test_right_options_and_models_that_show_no_constructor_pass(tmp_path, monkeypatch):
    (tmp_path / "mine_checked.py").write_text(
        "raise SystemExit('imported')\n"
        "class Net:\n    def __init__(self, *, width=3): pass\n"
        "class Any:\n    def __init__(self, **options): pass\n"
        "class Inherits(Net): pass\n"
        "def build(width): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_options(ModelConfig(kind="transformer", dim=96, rope_theta=1e4, tie_embeddings=True))
    check_options(ModelConfig(kind="mine_checked:Any", whatever=1))
    check_options(ModelConfig(kind="mine_checked:Inherits", whatever=1))
    check_options(ModelConfig(kind="no_such_module:Net", whatever=1))
    for kind in ("mine_checked:Net", "mine_checked:build"):
        check_options(ModelConfig(kind=kind, width=4))
        with pytest.raises(ConfigError, match=r"model\.widht: unknown option .* did you mean 'width'"):
            check_options(ModelConfig(kind=kind, widht=4))


def test_the_check_imports_no_torch():
    code = (
        "import sys\n"
        "from kftrain.models.signature import check_options\n"
        "from kftrain.models.settings import ModelConfig\n"
        "check_options(ModelConfig(kind='transformer', dim=48)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_option_of_a_built_in_model_has_a_type_that_is_checked(kind):
    """Against the real signature: what the source shows is what the constructor takes."""
    import inspect

    from kftrain.models import options

    target = options.import_kind(kind, BUILT_IN, "model")
    for name in inspect.signature(target).parameters:
        with pytest.raises(ConfigError, match=rf"model\.{name}: input should be"):
            check_options(ModelConfig(kind=kind, **{name: {"not": "a value"}}))
