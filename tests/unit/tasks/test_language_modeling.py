import lzma
import zlib

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.models.transformer import Transformer
from kftrain.tasks import language_modeling
from kftrain.tasks.language_modeling import LanguageModeling

DOCUMENT, PADDING = 256, 257
LENGTH = 8


def records(texts):
    return [Record(f"folder/{number}.txt", {"text": text}) for number, text in enumerate(texts)]


def rows_of(task, texts):
    """Rows of the joined stream, cut by hand."""
    stream, length = stream_of(texts), task.sequence_length
    cut = [stream[start : start + length + 1] for start in range(0, len(stream) - 1, length)]
    rows = [row + [PADDING] * (length + 1 - len(row)) for row in cut]
    return np.array(rows, np.uint16).reshape(-1, length + 1)


def stream_of(texts):
    return [token for text in texts for token in (DOCUMENT, *text)]


def some_model(task, seed=0):
    torch.manual_seed(seed)
    model = Transformer(**task.model_arguments(), dim=32, num_layers=2, num_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


TEXTS = st.lists(st.binary(max_size=3 * LENGTH), max_size=8)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 20))
def test_training_blocks_are_the_joined_stream(texts, tokens_per_block):
    task = LanguageModeling(sequence_length=LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_modeling, "TOKENS_PER_BLOCK", tokens_per_block)
        blocks = [block.arrays["tokens"] for block in task.encode(iter(records(texts)), "train")]
    assert [token for block in blocks for token in block.tolist()] == stream_of(texts)
    assert all(len(block) == tokens_per_block for block in blocks[:-1])
    assert all(block.dtype == np.uint16 and 1 <= len(block) <= tokens_per_block for block in blocks)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(TEXTS)
def test_validation_rows_predict_every_byte_once_from_its_own_document(texts):
    task = LanguageModeling(sequence_length=LENGTH)
    blocks = list(task.encode(iter(records(texts)), "validation"))
    expected = [(record.key, record.fields["text"]) for record in records(texts) if record.fields["text"]]
    assert [block.key for block in blocks] == [key for key, _ in expected]
    for block, (_, text) in zip(blocks, expected, strict=True):
        assert block.arrays["text"].tolist() == [text]
        rows = task.rows({"text": memoryview(block.arrays["text"][0])})["tokens"]
        targets = rows[:, 1:].reshape(-1)
        assert rows[0, 0] == DOCUMENT
        assert targets[targets != PADDING].tolist() == list(text)
        assert task.count_terms({"tokens": rows}).sum() == len(text)
        assert len(rows) == -(-len(text) // LENGTH)


def test_training_blocks_have_unique_keys():
    task = LanguageModeling(sequence_length=2)
    blocks = list(task.encode(iter(records([b"x" * 100_000, b"x" * 100_000])), "train"))
    assert [block.num_rows for block in blocks] == [1 << 16, 1 << 16, 1 << 16, 200_002 - 3 * (1 << 16)]
    assert len({block.key for block in blocks}) == 4


def test_encoding_does_not_read_ahead_of_what_is_taken():
    seen = []

    def endless():
        while True:
            seen.append(1)
            yield Record(str(len(seen)), {"text": b"x" * 1023})

    next(LanguageModeling(sequence_length=32).encode(endless(), "train"))
    assert len(seen) == 64


def test_text_of_either_kind_gives_equal_tokens_and_anything_else_is_refused():
    task = LanguageModeling(sequence_length=LENGTH)
    text = "naïve\ud800"
    one, other = (
        next(task.encode(iter(records([given])), "train")).arrays["tokens"].tolist()
        for given in (text, text.encode("utf-8", "surrogatepass"))
    )
    assert one == other == stream_of([text.encode("utf-8", "surrogatepass")])
    with pytest.raises(DataError, match=r"folder/0\.txt"):
        list(task.encode(iter(records([3])), "train"))


def test_the_schemas_describe_what_encoding_yields():
    task = LanguageModeling(sequence_length=LENGTH)
    texts = [b"some text of a document", b"", b"x"]
    (tokens,), (text,) = task.sample_schema("train").fields, task.sample_schema("validation").fields
    for block in task.encode(iter(records(texts)), "train"):
        assert block.arrays["tokens"].dtype == tokens.dtype and block.arrays["tokens"].shape[1:] == tokens.shape
    assert (text.name, text.dtype, text.extensions) == ("text", "bytes", ("txt",))


def test_loss_is_the_summed_cross_entropy_of_real_targets_in_real_rows():
    task = LanguageModeling(sequence_length=LENGTH)
    model, rows = some_model(task), rows_of(task, [b"hello, my dear friends", b"bye"])
    batch, weight = task.batch({"tokens": rows}), torch.ones(len(rows))
    weight[0] = 0
    logits = model(batch["inputs"])
    expected = 0.0
    for row in range(1, len(rows)):
        for position in range(LENGTH):
            target = int(rows[row, position + 1])
            if target != PADDING:
                expected -= torch.log_softmax(logits[row, position], dim=-1)[target].item()
    loss = task.loss(model(*task.inputs(batch)), batch, weight)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_terms_weigh_rows_so_that_loss_over_terms_is_the_mean_of_torch():
    task = LanguageModeling(sequence_length=LENGTH)
    model, rows = some_model(task), rows_of(task, [b"hello, my dear friends", b"bye"])
    batch = task.batch({"tokens": rows})
    terms = task.count_terms({"tokens": rows})
    mean = torch.nn.functional.cross_entropy(
        model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=PADDING
    )
    loss = task.loss(model(*task.inputs(batch)), batch, torch.ones(len(rows)))
    assert (loss / terms.sum()).item() == pytest.approx(mean.item(), rel=1e-6)


def test_a_batch_of_padding_rows_has_no_loss_and_finite_gradients():
    task = LanguageModeling(sequence_length=LENGTH)
    model, rows = some_model(task), rows_of(task, [b"hello"])
    batch = task.batch({"tokens": rows})
    loss = task.loss(model(*task.inputs(batch)), batch, torch.zeros(len(rows)))
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_statistics_count_bits_of_bytes_only():
    task = LanguageModeling(sequence_length=LENGTH)
    model, texts = some_model(task).eval(), [b"hello, my dear friends", b"bye"]
    rows = rows_of(task, texts)
    batch = task.batch({"tokens": rows})
    with torch.no_grad():
        logits = model(batch["inputs"]).double()
        statistics = task.statistics(model(*task.inputs(batch)), batch)
    is_byte = batch["targets"] < 256
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    expected = (nats * is_byte).sum(1) / np.log(2)
    torch.testing.assert_close(statistics["bits"], expected, rtol=1e-6, atol=1e-6)
    assert statistics["bytes"].sum() == sum(map(len, texts))
    guessed = (logits.argmax(-1) == batch["targets"]) & is_byte
    assert torch.equal(statistics["correct"], guessed.sum(1).double())
    assert all(value.dtype == torch.float64 and value.shape == (len(rows),) for value in statistics.values())


def test_perplexity_is_that_of_the_mean_loss_of_a_token_that_stands_for_bytes():
    task = LanguageModeling(sequence_length=LENGTH)
    model, texts = some_model(task).eval(), [b"hello, my dear friends", b"bye"]
    batch = task.batch({"tokens": rows_of(task, texts)})
    with torch.no_grad():
        output = model(*task.inputs(batch))
    statistics = {name: values.sum().numpy() for name, values in task.statistics(output, batch).items()}
    targets, scores = batch["targets"].numpy().ravel(), output.double().numpy().reshape(batch["targets"].numel(), -1)
    of_bytes = targets < 256
    chosen = scores[of_bytes, targets[of_bytes]]
    nats = np.log(np.exp(scores[of_bytes]).sum(axis=1)) - chosen
    assert float(task.metrics(statistics)["perplexity"]) == pytest.approx(np.exp(nats.mean()), rel=1e-5)


def test_perplexity_is_finite_whatever_a_model_says_and_missing_from_evaluations_of_before():
    sums = {"bits": np.array(1e6), "bytes": np.array(3.0), "correct": np.array(0.0)}
    assert "perplexity" not in LanguageModeling().metrics(sums)
    assert np.isfinite(LanguageModeling().metrics({**sums, "tokens": np.array(2.0)})["perplexity"])


def test_metrics_are_elementwise_over_any_shape_and_not_a_number_without_bytes():
    task = LanguageModeling()
    sums = {"bits": np.array([[6.0, 0.0]]), "bytes": np.array([[3.0, 0.0]]), "correct": np.array([[2.0, 0.0]])}
    metrics = task.metrics(sums)
    assert metrics["bits_per_byte"].shape == (1, 2)
    assert metrics["bits_per_byte"][0, 0] == 2 and metrics["accuracy"][0, 0] == pytest.approx(2 / 3)
    assert np.isnan(metrics["bits_per_byte"][0, 1])


def test_predict_gives_what_evaluation_computes_for_the_same_documents():
    task = LanguageModeling(sequence_length=LENGTH)
    model = some_model(task)
    texts = [b"a document of more than a row, in fact of more than a batch " * 6, b"x", b""]
    answer = task.predict(model, pandas.DataFrame({"text": [text.decode() for text in texts]}, index=[5, 6, 7]))
    assert model.training
    assert list(answer.index) == [5, 6, 7] and answer["num_bytes"].tolist() == [360, 1, 0]
    for row, text in enumerate(texts[:2]):
        batch = task.batch(task.rows({"text": text}))
        with torch.no_grad():
            statistics = task.statistics(model.eval()(*task.inputs(batch)), batch)
        sums = {name: value.sum().numpy() for name, value in statistics.items()}
        assert answer["bits_per_byte"].iloc[row] == pytest.approx(task.metrics(sums)["bits_per_byte"], rel=1e-6)
    assert np.isnan(answer["bits_per_byte"].iloc[2])


def test_predict_refuses_inputs_without_text():
    task = LanguageModeling(sequence_length=LENGTH)
    with pytest.raises(DataError, match="column 'text'"):
        task.predict(some_model(task), pandas.DataFrame({"words": ["a"]}))
    with pytest.raises(DataError, match="row 0"):
        task.predict(some_model(task), pandas.DataFrame({"text": [None]}))
    assert task.predict(some_model(task), pandas.DataFrame({"text": []})).empty


def test_slices_are_first_folders_and_small_ones_are_counted_together():
    task = LanguageModeling()
    keys = ["json/a.py", "json/b.py", "os.py", *(f"folder{number:02}/a.py" for number in range(20))]
    sizes = {"bytes": np.array([5.0, 5.0, 7.0, *(100.0 - number for number in range(20))])}
    names = task.slice_names(keys, sizes)
    assert len(set(names)) == language_modeling.MAX_SLICES
    assert names[:3] == ["other", "other", "other"] and names[3:5] == ["folder00", "folder01"]
    assert task.slice_names(keys[:3], {"bytes": sizes["bytes"][:3]}) == ["json", "json", "(top)"]
    assert task.slice_names(["a.py", "b.py"], {"bytes": np.ones(2)}) == ["all", "all"]
    assert task.slice_names([], {"bytes": np.ones(0)}) == []


def test_baselines_are_those_of_the_joined_documents():
    texts = [b"import os\n" * 40, "café".encode() * 30]
    task = LanguageModeling()
    figures = task.baselines(block.arrays for block in task.encode(records(texts), "validation"))["bits_per_byte"]
    joined = b"".join(texts)
    assert figures["zlib -9"] == 8 * len(zlib.compress(joined, 9)) / len(joined)
    assert figures["xz -9"] == 8 * len(lzma.compress(joined, preset=9)) / len(joined)
    assert LanguageModeling().baselines(iter([])) == LanguageModeling().baselines(iter([{"text": [b""]}])) == {}


def test_baselines_look_at_the_first_bytes_only(monkeypatch):
    monkeypatch.setattr(language_modeling, "MAX_BASELINE_BYTES", 100)
    noise = [np.random.default_rng(seed).bytes(60) for seed in range(3)]
    task = LanguageModeling()
    first = task.baselines({"text": [text]} for text in noise)
    assert first == task.baselines([{"text": [b"".join(noise)[:100]]}])
    assert 8 < first["bits_per_byte"]["zlib -9"] < 10


def test_settings_change_with_what_changes_the_bytes_alone():
    assert LanguageModeling(sequence_length=8).settings() == LanguageModeling(sequence_length=9).settings()
    other = LanguageModeling(tokenizer={"train": {"vocab_size": 300}})
    assert LanguageModeling().settings() != other.settings()


def test_the_vocabulary_covers_every_id_and_decoding_gives_the_bytes_back():
    tokenizer = LanguageModeling().tokenizer
    text = bytes(range(256))
    tokens = tokenizer.encode_document(text)
    assert tokens[0] == DOCUMENT and tokens.max() < tokenizer.vocab_size == 320
    assert tokenizer.decode(np.append(tokens, PADDING)) == text


def test_an_unknown_tokenizer_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'bytes'"):
        LanguageModeling(tokenizer="byte")
