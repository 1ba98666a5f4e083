import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.shards.keys import decode_key, encode_key, split_name

SUFFIX_BYTES = len(".tokens.npy")


@pytest.mark.parametrize(
    ("key", "encoded"),
    [
        ("digit-00042", "digit-00042"),
        ("email/message", "email/message"),
        ("notes.v2.txt", "notes_x2e_v2_x2e_txt"),
        ("data.jsonl:7", "data_x2e_jsonl_x3a_7"),
        ("../../etc/passwd", "_x2e__x2e_/_x2e__x2e_/etc/passwd"),
        ("/etc/passwd", "_x2f_etc/passwd"),
        ("__init__", "_x5f__init__"),
        ("a_x2e_b", "a_x5f_x2e_b"),
        ("a//b", "a/_x2f_b"),
    ],
)
def test_keys_become_readable_safe_names(key: str, encoded: str) -> None:
    assert encode_key(key, SUFFIX_BYTES) == encoded


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.one_of(st.text(min_size=1, max_size=4), st.text("_x2e./a", min_size=1, max_size=14)))
def test_every_short_key_comes_back_from_a_name_that_webdataset_and_tar_take(key: str) -> None:
    encoded = encode_key(key, SUFFIX_BYTES)
    assert re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", encoded)
    assert not encoded.startswith("__")
    assert decode_key(encoded) == key


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text(min_size=60, max_size=400))
def test_keys_of_any_length_fit_a_ustar_header(key: str) -> None:
    assert split_name(encode_key(key, SUFFIX_BYTES), SUFFIX_BYTES) is not None


def test_shortened_keys_stay_apart_and_keep_their_beginning() -> None:
    first, second = (encode_key("folder/" + "name" * 60 + ending, SUFFIX_BYTES) for ending in "ab")
    assert first != second
    assert first.startswith("folder/namename") and decode_key(first) == first


def test_a_long_path_keeps_its_folders_in_the_prefix_field() -> None:
    key = "a" * 80 + "/" + "b" * 60
    assert split_name(encode_key(key, SUFFIX_BYTES), SUFFIX_BYTES) == ("a" * 80, "b" * 60)


def test_a_name_that_is_no_encoded_key_is_shown_as_it_is() -> None:
    assert decode_key("torn_xff_") == "torn_xff_"
