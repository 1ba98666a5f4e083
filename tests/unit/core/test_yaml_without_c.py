"""Where PyYAML was built without libyaml the same texts are read the same way, in Python."""

import importlib.util

import pytest
import yaml

from kftrain.core import plain
from kftrain.errors import ConfigError


@pytest.fixture(scope="module")
def in_python():
    """The module `kftrain.core.plain` of such a machine, beside the one of this."""
    assert yaml.__with_libyaml__, "the C parser is what it is compared with"
    spec = importlib.util.spec_from_file_location("plain_in_python", plain.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        spec.loader.exec_module(module)
    assert "CParser" not in {base.__name__ for base in module._PlainLoader.__mro__}
    assert "CParser" in {base.__name__ for base in plain._PlainLoader.__mro__}
    return module


def outcome(module, text):
    """What a text is read as, or that it is refused."""
    try:
        return module.load_yaml(text, "c.yaml")
    except ConfigError as error:
        assert "\n" not in error.line and "not valid YAML" in error.line
        return "refused"


TEXTS = {
    "": None,
    "a: 1": {"a": 1},
    "{a: [1, 2.5, true, null, text], 7: x}": {"a": [1, 2.5, True, None, "text"], "7": "x"},
    "a: 2001-99-99": {"a": "2001-99-99"},
    "a: |\n  two\n  lines\nb: 'caf\u00e9 \U0001f600'\n# comment\n": {"a": "two\nlines\n", "b": "caf\u00e9 \U0001f600"},
    "base: {a: 1}\nb: 0x1f\n": {"base": {"a": 1}, "b": 31},
}

REFUSED = [
    "a: !!binary aGVsbG8=",
    "a: &x [*x]",
    "a: [1",
    "a: !!python/object/apply:os.system [ls]",
    "[" * 5000,
    "1: a\n? [b]\n: c",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_values(in_python, text):
    assert outcome(in_python, text) == outcome(plain, text) == TEXTS[text]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:12])
def test_what_is_refused_is_refused(in_python, text):
    assert outcome(in_python, text) == outcome(plain, text) == "refused"
