import json
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.tasks import bpe, build_task, tokenizer_json
from kftrain.tasks.bpe import BytePairTokenizer
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tasks.settings import TaskConfig
from kftrain.tasks.tokenizers import ByteTokenizer

WORDS = ["def", "return", "self", "import", "naïve", "None", "==", "shard", "\n    ", "日本語", "x1"]
TEXTS = [" ".join(random.Random(seed).choices(WORDS, k=200)).encode() for seed in range(20)]
TRAINED = bpe.train_bpe(iter(TEXTS), 400, 1 << 20)

SOME_BYTES = st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(SOME_BYTES | st.sampled_from(TEXTS[:3]), max_size=4).map(b"".join))
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "trained"])
def test_no_byte_is_lost_and_each_is_counted_once(tokenizer, text):
    ids = tokenizer.encode_document(text)
    assert ids[0] == tokenizer.document and tokenizer.padding not in ids and ids.dtype == tokenizer.dtype
    assert tokenizer.decode(np.append(ids, tokenizer.padding)) == text
    counts = [len(tokenizer.decode(ids[n : n + 1])) for n in range(len(ids))]
    assert tokenizer.bytes_per_id[ids].tolist() == counts and sum(counts) == len(text)


def test_special_tokens_in_a_text_are_its_bytes():
    text = b"<|document|> and <|padding|>"
    assert TRAINED.decode(TRAINED.encode(text)) == text and TRAINED.document not in TRAINED.encode(text)


def test_a_trained_tokenizer_has_merges_and_the_sizes_that_were_asked_for():
    assert TRAINED.num_ids <= 400 and TRAINED.vocab_size % 64 == 0 and TRAINED.vocab_size >= TRAINED.num_ids
    assert len(TRAINED.encode(TEXTS[0])) < len(TEXTS[0]) / 3
    assert {TRAINED.document, TRAINED.padding} == {TRAINED.num_ids - 2, TRAINED.num_ids - 1}
    assert pickle.loads(pickle.dumps(TRAINED)).digest == TRAINED.digest


TRAIN = """
import random, sys
from kftrain.tasks import bpe
from test_tokenizers import TEXTS
print(bpe.train_bpe(iter(TEXTS), 400, 1 << 20).digest)
"""


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_the_same_texts_give_the_same_tokenizer_in_any_process(parallel, pytestconfig):
    environment = {"PYTHONPATH": "tests/unit/tasks", "TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=environment, cwd=pytestconfig.rootpath, capture_output=True, text=True
    )
    assert done.stdout.strip() == TRAINED.digest, done.stderr


def test_only_so_much_of_the_texts_is_read():
    taken = []
    assert "".join(bpe._sample_texts((taken.append(1) or b"abcd" for _ in range(99)), 10)) == "abcdabcdab"
    assert len(taken) == 4
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        bpe.train_bpe(iter([]), 400, 10)


def test_long_texts_are_encoded_in_pieces_with_the_same_ids(monkeypatch):
    text = b"".join(b"line %d of the text\n" % number for number in range(500)) + b"\xff" + b"x" * 300
    whole = TRAINED.encode(text).tolist()
    monkeypatch.setattr(bpe, "PIECE_CHARACTERS", 200)
    assert TRAINED.encode(text[:5000]).tolist() == whole[: len(TRAINED.encode(text[:5000]))]
    assert TRAINED.decode(TRAINED.encode(text)) == text


def foreign(**changes):
    """A file as others write one: it normalises, adds a space and starts with a token of its own."""
    document = json.loads(TRAINED.content)
    document["added_tokens"] = [tokenizer_json._make_special("<|endoftext|>", TRAINED.document)]
    document["post_processor"] = None
    document["normalizer"] = {"type": "Lowercase"}
    document["pre_tokenizer"]["add_prefix_space"] = True
    document["model"]["dropout"] = 0.5
    return json.dumps(document | changes).encode()


def test_a_foreign_tokenizer_is_kept_without_what_changes_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(foreign())
    task = LanguageModeling(tokenizer=str(tmp_path / "tokenizer.json"))
    assert task.tokenizer.document == TRAINED.document and task.tokenizer.padding == TRAINED.document + 1
    text = b"Big Words  and more"
    assert task.tokenizer.encode(text).tolist() == TRAINED.encode(text).tolist()
    assert json.loads(task.tokenizer.content)["model"]["dropout"] is None
    assert task.asset_names == ("tokenizer.json",) and task.assets() == {"tokenizer.json": task.tokenizer.content}
    assert tokenizer_json.clean_tokenizer(task.tokenizer.content) == task.tokenizer.content


def test_the_document_token_of_a_foreign_tokenizer_is_known_or_named(tmp_path):
    (tmp_path / "t.json").write_bytes(
        foreign(added_tokens=[tokenizer_json._make_special("<|mine|>", TRAINED.document)])
    )
    uri = str(tmp_path / "t.json")
    assert LanguageModeling(tokenizer=uri).tokenizer.document == TRAINED.document + 1
    named = LanguageModeling(tokenizer={"uri": uri, "document_token": "<|mine|>"})
    assert named.tokenizer.document == TRAINED.document
    with pytest.raises(ConfigError, match=r"no such special token.*<\|mine\|>"):
        LanguageModeling(tokenizer={"uri": uri, "document_token": "<s>"}).tokenizer  # noqa: B018


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{}", "no tokenizer.json"),
        (b"not json", "no tokenizer.json"),
        (b"[" * 100_000, "no tokenizer.json"),
        (foreign(pre_tokenizer={"type": "Whitespace"}), "no byte-level BPE"),
        (foreign(decoder=None), "no byte-level BPE"),
        (foreign(model={"type": "WordPiece", "vocab": {}}), "no byte-level BPE"),
        (foreign(model={"type": "BPE", "vocab": {"\u2603": 0}, "merges": []}), "not made of bytes"),
        (foreign(model={"type": "BPE", "vocab": {"a": 1 << 60}, "merges": []}), "no numbers that follow"),
    ],
)
def test_what_is_no_byte_level_bpe_is_refused(tmp_path, content, what):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        LanguageModeling(tokenizer=str(tmp_path / "t.json")).tokenizer  # noqa: B018


def test_a_tokenizer_that_changes_a_text_is_refused_with_the_document():
    """A merge table without some byte drops it without a word."""
    document = json.loads(TRAINED.content)
    document["model"]["vocab"].pop("x")
    document["model"]["merges"] = [pair for pair in document["model"]["merges"] if "x" not in "".join(pair)]
    task = LanguageModeling(tokenizer="some/tokenizer.json")
    task.restore({"tokenizer.json": json.dumps(document).encode()})
    with pytest.raises(DataError, match=r"doc/7.*changes this text"):
        list(task.encode([Record("doc/7", {"text": b"x1"})], "train"))


def test_a_pattern_that_would_try_for_ever_is_refused_with_the_document():
    """The library ends with a panic then, which is no exception of Python's."""
    document = json.loads(TRAINED.content)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, document["pre_tokenizer"]]}
    task = LanguageModeling(tokenizer="some/tokenizer.json")
    task.restore({"tokenizer.json": json.dumps(document).encode()})
    with pytest.raises(DataError, match=r"doc/7.*cannot split this text"):
        list(task.encode([Record("doc/7", {"text": b"a" * 40 + b"b"})], "train"))


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("byte", "did you mean 'bytes'"),
        ({}, "either uri or train"),
        ({"uri": "a/b.json", "train": {}}, "either uri or train"),
        ({"train": {"vocab_size": 100}}, r"tokenizer\.train\.vocab_size"),
        ({"train": {"vocab": 300}}, r"tokenizer\.train\.vocab"),
        ({"path": "x"}, r"tokenizer\.path"),
        (3, "task.tokenizer"),
    ],
)
def test_a_wrong_option_is_refused(option, what):
    with pytest.raises(ConfigError, match=what):
        build_task(TaskConfig(kind="language_modeling", tokenizer=option))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        LanguageModeling(tokenizer=f"{tmp_path}/none.json").settings()


def test_a_tokenizer_that_is_not_trained_yet_has_the_largest_sizes_and_encodes_nothing():
    task = LanguageModeling(tokenizer={"train": {"vocab_size": 70_000}})
    assert task.model_arguments()["vocab_size"] == 70_016 and task.schema().fields[0].dtype == "uint32"
    assert task.assets() == {} and task.asset_names == ("tokenizer.json",)
    with pytest.raises(ConfigError, match="trained in the shard step"):
        task.rows({"text": b"x"})
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        task.restore({})


def test_a_task_with_the_files_of_another_encodes_as_that_one_does():
    first = LanguageModeling(sequence_length=8, tokenizer={"train": {"vocab_size": 400}})
    first.learn(Record(str(number), {"text": text}) for number, text in enumerate(TEXTS))
    second = LanguageModeling(sequence_length=8, tokenizer={"train": {"vocab_size": 400}})
    second.restore(first.assets())
    assert first.settings() == second.settings() and first.tokenizer.digest == TRAINED.digest
    assert np.array_equal(first.rows({"text": TEXTS[0]})["tokens"], second.rows({"text": TEXTS[0]})["tokens"])


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"kftrain\[sources\]"):
        BytePairTokenizer(TRAINED.content)


def test_a_token_that_is_guessed_right_is_all_of_its_bytes():
    torch = pytest.importorskip("torch")
    task = LanguageModeling(sequence_length=64, tokenizer={"train": {"vocab_size": 400}})
    task.restore({"tokenizer.json": TRAINED.content})
    rows = task.rows({"text": TEXTS[1][:60]})
    batch = task.batch(rows)
    logits = torch.nn.functional.one_hot(batch["targets"], TRAINED.vocab_size).float() * 30
    found = task.statistics(logits, batch)
    assert found["bytes"].tolist() == found["correct"].tolist() == [60] and found["bits"].item() < 1e-3
    none = task.statistics(-logits, batch)
    assert none["correct"].item() == 0 and none["bits"].item() > 60
