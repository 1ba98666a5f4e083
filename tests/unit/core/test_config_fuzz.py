"""No text, whatever it holds, gives anything but a configuration or a ConfigError of one line."""

import json
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError

LARGEST_INTEGER = 9_007_199_254_740_991

ATTACKS = {
    "an integer of 5,000 digits": "run: {seed: " + "9" * 5000 + "}",
    "an option of 5,000 digits": "model: {a: " + "9" * 5000 + "}",
    "5,000 brackets": "model: {a: " + "[" * 5000,
    "5,000 closed brackets": "model: {a: " + "[" * 5000 + "]" * 5000 + "}",
    "5,000 mappings": "model: " + "{a: " * 5000,
    "infinity": "optimizer: {learning_rate: .inf}",
    "an infinite option": "model: {scale: -.inf}",
    "no number": "model: {scale: [1, .nan]}",
    "infinity as text": "optimizer: {learning_rate: 'inf'}",
    "a float that overflows": "launch: {timeout_seconds: 1e999}",
    "a seed that JSON cannot hold": f"run: {{seed: {LARGEST_INTEGER + 1}}}",
    "such a seed as text": f"run: {{seed: '{LARGEST_INTEGER + 1}'}}",
    "such an option": f"model: {{a: [{{b: -{LARGEST_INTEGER + 1}}}]}}",
    "bytes": "model: {a: !!binary aGk=}",
    "bytes that are none": "model: {a: !!binary é}",
    "a set": "model: {a: !!set {b, c}}",
    "an empty integer": "model: {a: !!int ''}",
    "hexadecimal without digits": "model: {a: 0x_}",
    "binary without digits": "model: {a: 0b_}",
    "no boolean": "model: {a: !!bool maybe}",
    "a timestamp by its tag": "model: {a: !!timestamp x}",
    "a character beyond Unicode": 'model: {a: "\\UFFFFFFFF"}',
    "half a character": 'model: {a: "\\uD800"}',
    "half a character in a field": 'data: {source: "\\uD800"}',
    "half a character in a key": 'model: {"\\uD800": 1}',
    "a zero byte": 'run: {storage_root: "a\\0b"}',
    "a directive of 5,000 digits": "%YAML " + "1" * 5000 + ".1\n---\n{}",
    "Python": "model: {a: !!python/object/apply:os.getcwd []}",
    "a key that is a list": "model: {[a]: 1}",
    "a key that is nothing": "model: {~: 1}",
    "two documents": "run: {seed: 1}\n---\nrun: {seed: 2}",
    "too much": "#" * (1 << 20) + "\n",
}


def one_line(text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, overrides)
    assert "\n" not in caught.value.line and len(caught.value.line) < 2000
    return caught.value.line


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_in_one_line(attack: str) -> None:
    one_line(ATTACKS[attack])


@pytest.mark.parametrize(
    "value", ["[2001-99-99", "9" * 5000, "[" * 5000, ".inf", "!!binary aGk=", "0x_", str(LARGEST_INTEGER + 1), "[.nan]"]
)
def test_an_override_is_refused_as_a_file_would_be(value: str) -> None:
    one_line("", (f"model.a={value}",))


def test_an_override_cannot_nest_without_end() -> None:
    one_line("", (f"model.{'.'.join('a' * 5000)}=1",))


def test_the_key_and_the_file_of_an_unusable_value_are_named(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: {layers: [{width: .inf}]}")
    (tmp_path / "b.yaml").write_text("train: {steps: 3}")
    with pytest.raises(ConfigError, match=r"a\.yaml: model\.layers\.0\.width: not a finite number \(got inf\)"):
        config.load([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])


@pytest.mark.parametrize("date", ["2001-99-99", "2001-01-02", "2001-01-01 25:61:00"])
def test_what_looks_like_a_date_is_text(date: str) -> None:
    assert config.parse(f"task: {{since: {date}}}").task.options() == {"since": date}
    assert config.parse("", [f"task.since={date}"]).task.options() == {"since": date}


def test_the_largest_seed_is_kept_and_numbers_as_keys_are_text() -> None:
    resolved = config.parse(f"run: {{seed: {LARGEST_INTEGER}}}\ntask: {{names: {{0: cat, 1: dog}}}}")
    assert resolved.run.seed == LARGEST_INTEGER
    assert resolved.task.options() == {"names": {"0": "cat", "1": "dog"}}
    assert config.parse(resolved.to_yaml()) == resolved


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x80", b"run: {seed: 1}\x00", b"\xef\xbb\xbf\xff"])
def test_a_file_that_is_no_text_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        config.load(tmp_path / "c.yaml")


def test_a_file_without_an_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        config.load("/dev/zero")


def is_plain(value: object) -> bool:
    """Whether JSON can hold a value and every language read it again."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or abs(value) <= LARGEST_INTEGER


def check(text: str, overrides: tuple[str, ...] = ()) -> None:
    try:
        resolved = config.parse(text, overrides)
    except ConfigError as error:
        assert "\n" not in error.line
        return
    assert is_plain(resolved.to_dict()) and is_plain(resolved.task.options())
    assert config.parse(resolved.to_yaml()) == resolved
    json.dumps(resolved.to_dict(), allow_nan=False).encode()
    resolved.digest(), resolved.training_digest("d")


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates().map(str),
    st.sampled_from(["1e9", "1:30", "0o7", "0x_", ".inf", "!!binary x", "&a 1", "*a", "~", "<<", "=", "- ", "? "]),
)
values = st.recursive(scalars, lambda of: st.lists(of, max_size=3) | st.dictionaries(scalars, of, max_size=3))
FIELDS = [(name, key) for name, field in config.Config.model_fields.items() for key in field.annotation.model_fields]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.sampled_from(FIELDS), values)
@example(("launch", "kubernetes"), {"tolerations": [{"a": float("inf")}]})
def test_any_value_in_any_field_is_taken_or_refused(field: tuple[str, str], value: object) -> None:
    section, key = field
    check(f"{section}: {{{key}: {value!r}}}")
    check("", (f"{section}.{key}={value}",))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.sampled_from(["task", "model"]), st.sampled_from(["a", "kind", "1"]), values)
def test_any_option_of_a_plugin_is_taken_or_refused(section: str, key: str, value: object) -> None:
    check(f"{section}: {{{key}: {value!r}}}")


def test_any_bytes_in_place_of_others_are_taken_or_refused() -> None:
    draw = random.Random(0)
    original = config.parse("", ["task.names=[a, b]", "model.dim=64"]).to_yaml()
    pieces = ["[", "]", "{", "}", ": ", "- ", "!!", "&", "*", "|", ">", "'", '"', "%", "\t", "\\U", "9" * 30, ".inf"]
    for _ in range(60):
        text = original
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice([*pieces, chr(draw.randrange(0x110000))]) + text[at + draw.randint(0, 5) :]
        check(text)
