"""Skip-gram: its samples against the definition, its metrics against scikit-learn, and answers for any name."""

import itertools
from collections import Counter

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import label_ranking_average_precision_score
from torch import nn

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.tasks.skip_gram import BLOCK_ROWS, MAX_NAMES, SkipGram, find_names
from kftrain.tasks.skip_gram import hash_identifier as key_of

pytestmark = pytest.mark.timeout(60)

NUMBERED = [f"name_{number}" for number in range(3000)]


def build(records, **options):
    task = SkipGram(**options)
    task.learn(records)
    return task


def text_of(names, key="t"):
    return Record(key, {"text": " = ".join(names)})


def rows_of(task, records, split="train"):
    blocks = list(task.encode(records, split))
    return [np.concatenate([block.arrays[name] for block in blocks]) for name in ("center", "candidates")]


def test_names_stand_at_most_so_far_apart_and_both_ways():
    record = text_of(NUMBERED)
    task = build([record], max_distance=3, subsample=1.0)
    centers, candidates = rows_of(task, [record])
    place = {key_of(name): number for number, name in enumerate(NUMBERED)}
    distances = Counter(place[near] - place[center] for center, near in zip(centers, candidates[:, 0], strict=True))
    assert sorted(distances) == [-3, -2, -1, 1, 2, 3]
    assert min(distances.values()) > 0.8 * len(NUMBERED) / 6  # five deviations are 0.17
    assert sorted(centers.tolist()) == sorted(place)


def test_the_others_are_drawn_by_the_count_to_the_power_of_three_quarters():
    counts = {"a": 1000, "b": 300, "c": 50, "d": 1}
    names = [name for name, count in counts.items() for _ in range(count)]
    names = np.random.default_rng(0).permutation(names).tolist()
    task = build([text_of(names)], num_negatives=50, subsample=1.0)
    _, candidates = rows_of(task, [text_of(names)])
    assert not (candidates[:, 1:] == candidates[:, :1]).any()
    negatives = candidates[candidates[:, 0] == key_of("c"), 1:]
    drawn = Counter(negatives.reshape(-1).tolist())
    weights = {name: count**0.75 for name, count in counts.items()}
    for name in ("a", "b"):  # what "c" would have got goes to "d", behind it
        share = weights[name] / sum(weights.values())
        assert drawn[key_of(name)] / negatives.size == pytest.approx(share, abs=5 * (share / negatives.size) ** 0.5)


def test_frequent_names_are_left_out_the_more_often_the_more_frequent_they_are():
    names = [name for rare in NUMBERED for name in ("self", rare)]
    task = build([text_of(names)], subsample=0.02)
    centers, _ = rows_of(task, [text_of(names)])
    assert (centers == key_of("self")).sum() / 3000 == pytest.approx((0.02 / 0.5) ** 0.5, abs=0.04)
    assert len(set(centers.tolist())) > 2990


def test_a_texts_samples_are_its_own_wherever_it_is_encoded():
    records = [text_of(NUMBERED[start : start + 700], f"t{start}") for start in range(0, 2800, 700)]
    task = build(records)
    whole = rows_of(task, records * 3)
    single = [rows_of(task, [record], "validation") for record in records * 3]
    for number in range(2):
        assert np.array_equal(whole[number], np.concatenate([rows[number] for rows in single]))
    blocks = list(task.encode(records * 3, "train"))
    assert [block.num_rows for block in blocks[:-1]] == [BLOCK_ROWS] * (len(blocks) - 1) and len(blocks) == 3
    assert len({block.key for block in blocks}) == 3


def test_a_text_without_two_names_has_no_samples_and_texts_without_names_are_refused():
    task = build([text_of(NUMBERED)])
    assert not list(task.encode([text_of([]), text_of(["one"])], "validation"))
    assert not list(task.encode([text_of(["one"])], "train"))
    with pytest.raises(DataError, match="fewer than two names"):
        build([text_of(["one", "one", "7"])])
    with pytest.raises(DataError, match="needs a field 'text'"):
        build([Record("r", {"txt": "a b"})])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mask = 0xFF + 1e5 + 0b101 + 3j; x1", ["mask", "x1"]),
        ("e\u0301t\u00e9 \uff21\uff22 AB \u00b2y", ["\u00e9t\u00e9", "AB", "AB"]),
        (b"a\xff b\x00c", ["a", "b", "c"]),
        ("a" * 129 + " " + "b" * 128, ["b" * 128]),
        ("", []),
    ],
)
def test_names_are_whole_words_that_begin_with_a_letter(text, names):
    assert find_names(Record("r", {"text": text})) == names


def test_a_name_has_a_neighbour_however_short_its_text_is():
    texts = [text_of(NUMBERED[start : start + 2], f"t{start}") for start in range(0, 200, 2)]
    task = build(texts, max_distance=10**9, subsample=1.0)
    centers, candidates = rows_of(task, texts)
    places = [NUMBERED.index(name) for name in NUMBERED[:200]]
    assert centers.tolist() == [key_of(NUMBERED[place]) for place in places]
    assert candidates[:, 0].tolist() == [key_of(NUMBERED[place ^ 1]) for place in places]


def test_the_names_of_a_dataset_are_restored_and_without_them_it_is_refused():
    records = [text_of(["größe", "größe", "b", "c"] * 50)]
    task, restored = build(records), SkipGram()
    restored.restore(task.assets())
    ours, theirs = rows_of(task, records), rows_of(restored, records)
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert restored.show({name: rows[:1] for name, rows in zip(("center", "candidates"), ours, strict=True)})[
        "name"
    ] in {"größe", "b", "c"}
    with pytest.raises(ConfigError, match="shard again"):
        SkipGram().restore({})
    assert not SkipGram().assets()


def test_only_so_many_names_are_kept(monkeypatch):
    monkeypatch.setattr("kftrain.tasks.skip_gram.MAX_NAMES", 2)
    task = build([text_of(["a"] * 3 + ["b"] * 2 + ["c"])], subsample=1.0)
    centers, candidates = rows_of(task, [text_of(["a", "c", "b"] * 9)])
    assert key_of("c") in centers and set(candidates[:, 1:].reshape(-1).tolist()) <= {
        key_of("a"),
        key_of("b"),
    }
    assert MAX_NAMES > 2


def test_the_rank_is_scikit_learns_and_the_loss_is_torchs():
    task = SkipGram(num_negatives=4)
    logits = torch.randn(300, 5, dtype=torch.float64)
    targets = torch.zeros(300, 5, dtype=torch.float64)
    targets[:, 0] = 1
    sums = {name: values.sum().numpy() for name, values in task.statistics(logits, {}).items()}
    metrics = task.metrics(sums)
    oracle = label_ranking_average_precision_score(targets.numpy(), logits.numpy())
    assert metrics["reciprocal_rank"] == pytest.approx(oracle, rel=1e-12)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    assert metrics["negative_sampling_loss"] == pytest.approx(float(loss.mean()), rel=1e-12)
    weight = torch.arange(300) % 2
    assert float(task.loss(logits, {}, weight)) == pytest.approx(float((loss * weight).sum()), rel=1e-5)


def test_equal_scores_and_nonsense_are_no_better_than_chance():
    task = SkipGram(num_negatives=4)
    for logits in (torch.zeros(2, 5), torch.full((2, 5), torch.nan)):
        assert (
            task.statistics(logits, {})["reciprocal_rank"].tolist()
            == [pytest.approx(sum(1 / rank for rank in range(1, 6)) / 5)] * 2
        )


def test_trivial_answers_are_scored():
    records = [text_of([name for name, count in (("a", 9), ("b", 4), ("c", 1)) for _ in range(count)])]
    task = build(records, num_negatives=1)
    ids = [key_of(name) for name in "abc"]
    samples = [{"candidates": np.array([[right, wrong]])} for right, wrong in itertools.permutations(ids, 2)]
    assert task.baselines(samples)["reciprocal_rank"] == {"any order": 0.75, "the more frequent name": 0.75}
    assert task.baselines(samples[:2])["reciprocal_rank"]["the more frequent name"] == 1
    assert not task.baselines([])


class Products(nn.Module):
    """Stands in for a trained network: log-odds that its ids alone decide."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, center, candidates):
        return (center.unsqueeze(1) % 1000 + 2 * (candidates % 1000)) * self.weight


def test_a_served_model_answers_for_names_also_for_those_that_nobody_has_seen():
    task = SkipGram()
    inputs = pandas.DataFrame({"identifier": ["self", "never_seen"], "other": ["cls", "größe"]})
    answer = task.predict(Products(), inputs)
    expected = [
        key_of(a) % 1000 + 2 * (key_of(b) % 1000) for a, b in zip(inputs["identifier"], inputs["other"], strict=True)
    ]
    assert answer["log_odds"].tolist() == expected and list(task.answer_types()) == list(answer)
    with pytest.raises(DataError, match="a column 'other' of names"):
        task.predict(Products(), pandas.DataFrame({"identifier": ["self"]}))
    with pytest.raises(DataError, match="of names"):
        task.predict(Products(), pandas.DataFrame([["a", "b", "c"]], columns=["identifier", "other", "other"]))
    with pytest.raises(DataError, match="of names"):
        task.predict(Products(), pandas.DataFrame({"identifier": [3], "other": ["a"]}))
