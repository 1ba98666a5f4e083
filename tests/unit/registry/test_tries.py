"""Which try against a champion it is, and what that does to the decision: counted once, whatever is repeated."""

import threading

import numpy as np
import pytest

from kftrain import registry
from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry import tries
from kftrain.registry.gate import Decision, Judgement
from kftrain.registry.tries import Tries

NUM_GROUPS = 60


def changed(config, **registry_options):
    return config.model_copy(update={"registry": config.registry.model_copy(update=registry_options)})


def tries_of(config, run):
    return Tries.of(config.run.storage_root, "toy", run.completion.export_digest).read_all()


def near(num_errors):
    """Statistics of a model that is better than the one of 0 by so many standard errors."""
    count, keys = np.full(NUM_GROUPS, 10.0), np.array([f"item-{number:03d}" for number in range(NUM_GROUPS)])
    noise = np.random.default_rng(1).normal(size=NUM_GROUPS)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    gain = noise + num_errors / np.sqrt(NUM_GROUPS) if num_errors else np.zeros(NUM_GROUPS)
    return {"correct": 6.0 + gain, "count": count, "keys": keys}


def test_each_challenger_is_one_more_try_and_a_repeated_step_is_none(config, finished):
    champion = finished("one", 0.6)
    assert champion.submit().num_tries == 0, "the first model is compared with nothing"
    runs = [finished(name, 0.6) for name in ("two", "three")]
    found = [run.submit() for run in (runs[0], runs[0], runs[1], runs[0], runs[1])]
    assert [each.num_tries for each in found] == [1, 1, 2, 1, 2]
    assert found[0] == found[1] == found[3] and found[2] == found[4]
    assert [each.confidence for each in found[:3]] == pytest.approx([0.975, 0.975, 1 - 0.05 / 6])
    assert "at 99.167% confidence, try 2" in found[2].reason
    assert [(each.number, each.run_id, each.version) for each in tries_of(config, champion)] == [
        (1, "two", 2),
        (2, "three", 3),
    ]
    assert tries_of(config, champion)[0].reasons == tuple(found[0].reasons)


def test_the_same_difference_is_enough_at_the_first_try_and_not_at_the_hundredth(config, finished):
    champion = finished("one", 0.6, statistics=near(0.0))
    champion.submit()
    book = Tries.of(config.run.storage_root, "toy", champion.completion.export_digest)
    close = finished("close", 0.6, statistics=near(3.3))
    first = close.submit(changed(config, promotion="never"))
    assert first.reasons[0].code == "better" and not first.promoted and not first.awaits_person
    for number in range(1, 100):
        book.decide_and_count(str(number), "run", 9, lambda number: Judgement(Decision(False, ""), None))
    late = close.submit()
    assert (late.num_tries, late.promoted, late.reasons[0].code) == (100, False, "not_significant")
    uncorrected = close.submit(changed(config, correct_repeated_tries=False))
    assert (uncorrected.num_tries, uncorrected.confidence, uncorrected.promoted) == (100, 0.95, True)


def test_what_cannot_promote_is_not_counted(config, finished):
    champion = finished("one", 0.6)
    champion.submit()
    registration = finished("two", 0.7).submit(changed(config, promotion="never"))
    assert (registration.num_tries, registration.confidence) == (0, 0.975)
    assert tries_of(config, champion) == []
    assert finished("three", 0.6).submit().num_tries == 1


def test_other_data_and_another_metric_are_other_tries_and_another_least_effect_is_not(config, finished):
    champion = finished("one", 0.6)
    champion.submit()
    run = finished("two", 0.6)
    settings = [{}, {"min_effect": 0.1}, {"metric": "error", "goal": "minimize"}]
    assert [run.submit(changed(config, **each)).num_tries for each in settings] == [1, 1, 2]


def test_a_new_champion_begins_anew_and_one_that_comes_back_goes_on(config, finished):
    finished("one", 0.6).submit()
    finished("two", 0.6).submit()
    assert finished("three", 0.7).submit().num_tries == 2
    promoted = finished("four", 0.7).submit()
    assert promoted.num_tries == 1 and promoted.champion_version == 3
    registry.rollback(config)
    assert finished("five", 0.6).submit().num_tries == 3


def test_a_promotion_answers_the_same_when_it_is_repeated(config, finished):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    first = run.submit()
    assert first.promoted and first.num_tries == 1 and [each.code for each in first.reasons] == ["better"]
    assert run.submit() == first


def test_challengers_at_once_have_different_numbers(tmp_path):
    book, found = Tries(str(tmp_path)), []
    barrier = threading.Barrier(8)

    def contend(name):
        barrier.wait(240)
        for _ in range(2):
            book.decide_and_count(name, name, 1, lambda number: Judgement(Decision(False, str(number)), None))
        judgement = book.decide_and_count(name, name, 1, lambda number: Judgement(Decision(False, str(number)), None))
        found.append(int(judgement.decision.reason))

    threads = [threading.Thread(target=contend, args=(f"run-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(found) == list(range(1, 9)) == [each.number for each in book.read_all()]


def test_a_damaged_try_is_told_by_its_file(tmp_path):
    (tmp_path / "1.json").write_text("{")
    with pytest.raises(TrackingError, match=r"1\.json is not valid JSON"):
        Tries(str(tmp_path)).find_number("mine")


def test_what_is_the_same_try():
    one = tries.digest_identity("x", "e", "accuracy", "maximize")
    assert one == tries.digest_identity("x", "e", "accuracy", "maximize")
    assert len({one, *(tries.digest_identity(*each) for each in ("yeam", "xfam", "xebm", "xean"))}) == 5


@pytest.mark.parametrize("number", [0, -1, tries.MAX_NUMBER + 1, 10**200])
def test_a_try_with_a_number_that_none_has_is_damaged(tmp_path, number):
    book = Tries.of(str(tmp_path), "toy", "c" * 64)
    book.decide_and_count("first", "run", 1, lambda number: Judgement(Decision(False, ""), None))
    document = storage.read_json(f"{book.uri}/1.json")
    storage.publish_json(f"{book.uri}/1.json", {**document, "number": number})
    with pytest.raises(TrackingError, match=r"1\.json is damaged: number"):
        book.decide_and_count("second", "run", 2, lambda number: Judgement(Decision(False, ""), None))


def test_after_the_last_number_there_is_none(tmp_path):
    book = Tries.of(str(tmp_path), "toy", "c" * 64)
    book.decide_and_count("first", "run", 1, lambda number: Judgement(Decision(False, ""), None))
    document = {**storage.read_json(f"{book.uri}/1.json"), "number": tries.MAX_NUMBER}
    storage.publish_json(f"{book.uri}/{tries.MAX_NUMBER}.json", document)
    with pytest.raises(TrackingError, match="always faster"):
        book.decide_and_count("second", "run", 2, lambda number: Judgement(Decision(False, ""), None))
