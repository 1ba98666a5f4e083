"""Where the time of a training went, against sums by hand."""

import pytest

from kftrain.run.attempts import Claim
from kftrain.run.documents import Completion
from kftrain.run.timeline import compute_timeline


def claim(attempt, start_step, start_time, world_size=2):
    return Claim(
        attempt=attempt,
        start_step=start_step,
        world_size=world_size,
        host="h",
        process_id=1,
        start_time=start_time,
    )


def completed(attempt=1, seconds=100.0):
    texts = ("checkpoint_uri", "checkpoint_digest", "export_uri", "export_digest", "dataset_digest", "training_digest")
    return Completion(
        run_id="r",
        step=100,
        samples_consumed=800,
        attempt=attempt,
        world_size=2,
        num_parameters=1,
        metrics={},
        seconds=seconds,
        **dict.fromkeys(texts, "x"),
    )


def points(steps, speed):
    return [{"step": step, "samples_per_second": speed, "seconds": step * 8 / speed + 5} for step in steps]


def test_one_attempt_is_parted_into_steps_what_is_around_them_and_the_rest():
    found = compute_timeline([claim(1, 0, 1000.0)], completed(), points(range(10, 101, 10), speed=10.0))
    assert found.step_seconds == pytest.approx(80)  # 800 samples at 10 per second
    assert found.around_seconds == pytest.approx(5)
    assert found.lost_seconds == pytest.approx(15)
    assert found.wall_seconds == 100 and found.process_seconds == 200 and found.goodput == pytest.approx(0.8)


def test_what_a_killed_attempt_did_beyond_its_commit_is_lost_and_so_is_the_pause_after_it():
    claims = [claim(2, 50, 1300.0, world_size=1), claim(1, 0, 1000.0)]
    found = compute_timeline(claims, completed(attempt=2), points(range(10, 101, 10), speed=10.0))
    assert [(span.attempt, span.seconds, span.world_size) for span in found.attempts] == [(1, 300, 2), (2, 100, 1)]
    assert found.process_seconds == 300 * 2 + 100 * 1
    assert found.goodput == pytest.approx(80 / 400)
    assert found.step_seconds + found.around_seconds + found.lost_seconds == pytest.approx(found.wall_seconds)


def test_a_thinned_curve_and_points_without_a_speed_give_the_same():
    dense = points(range(1, 101), speed=16.0)
    thin = [point for point in dense if point["step"] % 25 == 0]
    validations = [{"step": 30, "validation/accuracy": 0.5, "seconds": 20.0}]
    sums = [
        compute_timeline([claim(1, 0, 0.0)], completed(), each).step_seconds
        for each in (dense, thin, validations + thin)
    ]
    assert sums == pytest.approx([50, 50, 50])


def test_parts_never_exceed_the_whole_and_later_claims_do_not_count():
    found = compute_timeline([claim(1, 0, 0.0), claim(2, 100, 50.0)], completed(), points([100], speed=1.0))
    assert found.step_seconds == found.wall_seconds == 100 and found.lost_seconds == found.around_seconds == 0


def test_without_the_claim_of_the_attempt_that_completed_there_is_none():
    assert compute_timeline([], completed(), []) is None
    assert compute_timeline([claim(1, 0, 0.0)], completed(attempt=2), []) is None
