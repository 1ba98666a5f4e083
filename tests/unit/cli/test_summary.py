from helpers.documents import finished_run, interval

from kftrain.cli import summary
from kftrain.core import storage
from kftrain.run.advice import Place, Situation
from kftrain.run.documents import Registration, read
from kftrain.run.error import ErrorDocument


def test_the_end_of_a_run_says_what_was_trained_how_good_it_is_and_where_it_is(tmp_path):
    paths, config = finished_run(tmp_path)
    text = "\n".join(summary.success_lines(paths.uri))
    for part in (
        "run r-1 is complete",
        "1,633 samples for training",
        "12,345 parameters, 20 steps",
        "accuracy 0.900 (0.890 to 0.910); baselines: most frequent class 0.13",
        "tiny version 3, champion: better by 0.02",
        "version 2 was champion: accuracy 0.880",
        "improvement +0.020 (+0.010 to +0.030)",
        paths.report,
        f"mlflow ui --backend-store-uri {config.tracking.uri}",
        "models:/tiny/3",
    ):
        assert part in text, part


def test_a_first_model_is_compared_with_nothing(tmp_path):
    paths, _ = finished_run(tmp_path)
    first = {"champion": None, "champion_version": None, "improvement": None, "promoted": False, "reason": "manual"}
    registration = read(Registration, paths.registration).model_copy(update=first)
    storage.publish_json(paths.registration, registration.to_dict())
    text = "\n".join(summary.success_lines(paths.uri))
    assert "not champion: manual" in text
    assert "was champion" not in text and "improvement" not in text


def test_after_a_failure_the_command_that_goes_on_is_shown():
    situation = Situation(Place.LAPTOP, "/r/runs/a b", "kftrain run -c x.yaml", "/w/logs/x.log")
    lines = summary.failure_lines(ErrorDocument.salvage({"stage": "train", "exit_code": 138}), situation)
    assert lines[0] == "train failed"
    assert any("kftrain run --resume '/r/runs/a b'" in line for line in lines)
    assert any("/w/logs/x.log" in line for line in lines)


def test_after_a_failure_that_opened_no_run_a_new_one_is_started():
    lines = summary.failure_lines(
        ErrorDocument.salvage({"exit_code": 138}), Situation(Place.LAPTOP, started_by="kftrain run -c x.yaml")
    )
    assert lines[-1].endswith("kftrain run -c x.yaml")
    assert not any("resume" in line for line in lines)


def test_an_interval_is_shown_with_as_many_digits_as_it_has():
    assert summary.describe_interval(interval(2.3141, 0.024)) == "2.314 (2.290 to 2.338)"
