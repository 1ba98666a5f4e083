"""What is secret in a text is not shown, whatever characters it is made of."""

import random
import string

import pytest

from kftrain.core import credentials
from kftrain.core.credentials import holds_credentials, redact, take_out_credentials
from kftrain.errors import TrackingError, error_to_dict

PASSWORDS = ["p/ss", "p@ss", "p'ss", 'p"ss', "p ss", "p@s/s", "a b@c d", "5/canary", "#x", "?x=1", "a:b", "p<s>", "//@"]


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("scheme", ["http", "https", "postgresql+psycopg2"])
def test_no_part_of_a_password_in_a_uri_is_shown(password: str, scheme: str) -> None:
    uri = f"{scheme}://user:{password}@host.example:5000/path"
    assert redact(uri) == f"{scheme}://host.example:5000/path"
    error = TrackingError("away", where=uri, value=uri, fix=f"see {scheme}://host.example")
    for text in (error.line, *map(str, error.to_dict().values()), str(error)):
        assert password not in text and "user" not in text


def test_passwords_of_random_punctuation_leave_nothing_behind() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        password = "".join(draw.choice(string.punctuation + " ") for _ in range(draw.randint(1, 12))) + "CANARY"
        uri = f"https://user:{password}@host/api"
        assert redact(uri) == "https://host/api"
        assert "CANARY" not in redact(f"GET {uri}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://TOKEN@host/x", "https://host/x"),
        ("https://ab/cd==@host", "https://host"),
        (
            "get s3://b/k?X-Amz-Signature=abc&X-Amz-Expires=60 now",
            "get s3://b/k?X-Amz-Signature=***&X-Amz-Expires=60 now",
        ),
        ("https://a.blob/x?sv=1&sig=a%2Bb%3D&se=2", "https://a.blob/x?sv=1&sig=***&se=2"),
        ("https://h/x?token=t", "https://h/x?token=***"),
        ("https://h/x?X-Amz-Credential=AK%2F1&a=b", "https://h/x?X-Amz-Credential=***&a=b"),
        ("https://h/x?access_token=t#frag", "https://h/x?access_token=***#frag"),
        *[
            (f"https://h/x?a=b&{name}=canary&c=d", f"https://h/x?a=b&{name}=***&c=d")
            for name in (
                *("secret_key", "AccountKey", "private_key", "storage_key", "sas", "pass", "pw", "passphrase", "jwt"),
                *("session", "password[]", "%70assword", "auth[token]", "passwor%64%5B%5D"),
            )
        ],
        ("https://h/x?a=b%26password%3Dcanary&c=d", "https://h/x?a=***&c=d"),
        *[(text, text) for text in ("https://h/x?passage=1&sessions=2&bypass=3", "https://h/x?a=%26b%3Dc")],
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer ***"),
        ("at https://user:p w@host failed", "at https://host failed"),
        *[(text, text) for text in ("s3://bucket/user@corp/x", "sqlite:////x@y.db", "hdfs://nn:8020/user@corp", "a@b")],
        *[
            (text, text)
            for text in ("abfss://container@account.dfs.core.windows.net/x", "http://h:5000/?design=1&monkey=2")
        ],
        ("http://host:5000 is away", "http://host:5000 is away"),
    ],
)
def test_what_is_shown_of_a_text(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_secrets_of_the_environment_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pa ss@w/ord'1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abc/def+ghi")
    error = error_to_dict(ValueError("with pa ss@w/ord'1 and abc%2Fdef%2Bghi and abc/def+ghi"))
    assert "ss@w" not in error["line"] and "def" not in error["line"].replace("_def", "")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a")
    assert redact("a banana") == "a banana"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("https://TOKEN@host", True),
        ("http://user:pw@host:5000", True),
        ("http://user:p/w@host", True),
        ("https://host/file?X-Amz-Signature=a", True),
        *[(f"https://host/file?{name}=a", True) for name in ("secret_key", "sas", "password[]", "%70assword")],
        ("s3://key:secret@bucket", True),
        *[
            (uri, False)
            for uri in ("http://host:5000/a@b", "s3://bucket/a@b", "/a/b@c", "stdlib", "abfs://c@account/x")
        ],
    ],
)
def test_which_uris_hold_credentials(uri: str, expected: bool) -> None:
    assert holds_credentials(uri) == expected


def test_user_and_password_go_where_mlflow_looks_for_them() -> None:
    variables = {credentials.USERNAME_VARIABLE: "u", credentials.PASSWORD_VARIABLE: "p@/s"}
    assert take_out_credentials("https://u:p%40%2Fs@host:1/x?y") == ("https://host:1/x?y", variables)
    for uri in ("https://TOKEN@host", "http://host:5000", "sqlite:///x", "postgresql://u:p@h/d", "http://u:p/w@host"):
        assert take_out_credentials(uri) == (uri, {})
