"""What to do about a failure: one table, read by the launcher, the failure report and `kftrain run`."""

import pytest

from kftrain import errors
from kftrain.core import storage
from kftrain.errors import FailureClass
from kftrain.run import advice
from kftrain.run.advice import Next, Place, Situation
from kftrain.run.error import ErrorDocument

RUN = "/store/runs/my run"
AT_HOME = Situation(Place.LAPTOP, RUN, "kftrain run --config=own.yaml", "/w/logs/1.log")
IN_KUBEFLOW = Situation(Place.KUBEFLOW, RUN)


def advise(error, situation=AT_HOME):
    return advice.advise(ErrorDocument.of(error), situation)


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("kind", FailureClass)
def test_every_class_has_advice_at_every_place(kind, place):
    row = advice.TABLE[kind][place]
    assert row.remedy.endswith(".")
    changes = row.next in (Next.RESUME_CHANGED, Next.NEW_RUN_CHANGED)
    assert changes or row.setting == "KEY=VALUE", "a setting that is never shown"


@pytest.mark.parametrize("kind", FailureClass)
def test_at_home_nobody_is_sent_to_the_kubeflow_ui(kind):
    found = advice.advise(ErrorDocument.salvage({"failure": {"failure_class": kind.value}}), AT_HOME)
    assert "Kubeflow" not in found.text + found.command and "submit" not in found.command


@pytest.mark.parametrize("kind", FailureClass)
def test_in_kubeflow_nobody_is_sent_to_the_local_runner(kind):
    found = advice.advise(ErrorDocument.salvage({"failure": {"failure_class": kind.value}}), IN_KUBEFLOW)
    assert "kftrain run" not in found.text + found.command


def test_a_run_that_diverged_is_not_resumed():
    assert (
        advise(errors.DivergedError("nan")).command
        == "kftrain run --config=own.yaml --set optimizer.learning_rate=RATE"
    )
    there = advise(errors.DivergedError("nan"), IN_KUBEFLOW)
    assert (
        there.text.endswith("Clone the run in the Kubeflow UI, with learning_rate set to RATE.") and not there.command
    )


def test_what_is_another_training_is_not_resumed_and_a_damaged_checkpoint_is_looked_at():
    assert advise(errors.OtherTrainingError("x")).command == "kftrain run --config=own.yaml"
    assert advise(errors.CheckpointError("x")).command == "kftrain checkpoints list '/store/runs/my run'"


def test_a_wrong_setting_is_corrected_in_the_same_run():
    found = advise(errors.ConfigError("unknown option", where="model.dimm", fix="did you mean 'dim'?"))
    assert found.text.startswith("Did you mean 'dim'? Correct it in the file") and "checkpoint" not in found.text
    assert found.command == "kftrain run --config=own.yaml --resume '/store/runs/my run'"
    without_a_file = Situation(Place.LAPTOP, RUN, "kftrain run --set=model.dimm=3")
    assert advise(errors.ConfigError("x"), without_a_file).command == without_a_file.started_by
    there = advise(errors.ConfigError("x"), IN_KUBEFLOW)
    assert there.command == "kftrain submit --host URL --config FILE --resume '/store/runs/my run'"


@pytest.mark.parametrize("kind", FailureClass)
def test_without_a_run_nothing_is_resumed(kind):
    found = advice.advise(ErrorDocument.salvage({"failure": {"failure_class": kind.value}}), Situation(Place.LAPTOP))
    assert "--resume" not in found.command and "checkpoints" not in found.command


@pytest.mark.parametrize("kind", FailureClass)
def test_what_the_error_says_itself_about_its_cause_is_not_said_again_in_general(kind):
    error = errors.LaunchError("x", fix=advice.make_fix(kind)).of_class(kind)
    said = advice.advise(ErrorDocument.of(error), AT_HOME).text
    assert said.lower().count(advice.make_fix(kind).lower()) == 1
    own = advice.advise(ErrorDocument.of(errors.LaunchError("x", fix="do this").of_class(kind)), AT_HOME).text
    assert own.startswith("Do this.") and advice.find_remedy(kind) not in own


def test_a_run_that_diverged_is_told_once_to_lower_its_learning_rate():
    error = errors.DivergedError("nan", fix=advice.make_fix(FailureClass.DIVERGED))
    assert advise(error).text.count("learning_rate") == 1
    beside_its_own_line = advice.advise(ErrorDocument.of(error), AT_HOME, with_fix=False)
    assert "learning_rate" not in beside_its_own_line.text and "learning_rate=RATE" in beside_its_own_line.command


@pytest.mark.parametrize("error", [{}, {"exit_code": None}, {"failure": []}, {"failure": {"failure_class": 3}}])
def test_an_error_with_fields_that_are_missing_or_odd_has_advice(error):
    assert advice.advise(ErrorDocument.salvage(error), AT_HOME).command


def test_in_kubeflow_the_command_that_goes_on_is_whole_where_all_of_it_is_known():
    """The image of the steps is not part of a run's configuration: without it the default one would be taken."""
    known = Situation(Place.KUBEFLOW, "s3://b/runs/r", kubeflow_url="https://kf.example", steps_image="r/steps:7")
    command = "kftrain submit --host https://kf.example --steps-image r/steps:7 --resume s3://b/runs/r"
    assert advise(errors.Preempted("x"), known).command == command


def test_in_kubeflow_a_setting_without_a_parameter_of_its_own_is_changed_by_the_object():
    found = advice.advise(
        ErrorDocument.salvage({"failure": {"failure_class": FailureClass.GPU_MEMORY.value}}), IN_KUBEFLOW
    )
    assert 'config_json set to {"train": {"micro_batch_size": N}}' in found.text
    data = advise(errors.DataError("no such file"), IN_KUBEFLOW)
    assert "resume_run set to /store/runs/my run, and source set to SOURCE" in data.text
    assert data.command.endswith("--set data.source=SOURCE")


def test_the_parameters_of_the_form_are_those_of_the_pipeline():
    from kftrain.kubeflow import parameters
    from kftrain.stages import resolve

    assert {name: key for key, name in advice.FORM_PARAMETERS.items()}.items() <= resolve.KNOBS.items()
    assert advice.FORM_OBJECT == parameters.OBJECT


def test_a_run_that_was_terminated_may_succeed_when_it_is_run_again():
    error = ErrorDocument.of(errors.LaunchError("somebody terminated it").of_class(FailureClass.TERMINATED))
    assert error.failure_class in advice.PASSING
    assert advice.advise(error, IN_KUBEFLOW).command.startswith("kftrain submit --host URL --resume ")


def test_where_we_are_is_told_by_the_environment(monkeypatch):
    for name in (advice.STARTED_BY_ENV, advice.LOG_ENV, advice.STEP_POD_ENV, advice.STEPS_IMAGE_ENV):
        monkeypatch.delenv(name, raising=False)
    assert Situation.from_environment(RUN) == Situation(Place.LAPTOP, RUN)
    monkeypatch.setenv(advice.STEP_POD_ENV, "step-1")
    assert Situation.from_environment(RUN) == IN_KUBEFLOW
    for name, value in AT_HOME.to_environment().items():  # kftrain run in a notebook's pod
        monkeypatch.setenv(name, value)
    assert Situation.from_environment(RUN) == AT_HOME


def test_a_full_disk_is_the_storages_failure_and_no_lost_peer():
    error = ErrorDocument.of(storage.make_full_error(OSError(28, "No space left on device", "/disk/x")))
    assert error.failure_class is FailureClass.STORAGE
    assert "Free some" in advice.advise(error, AT_HOME).text
    assert ErrorDocument.of(errors.LostPeerError("lost contact")).failure_class is FailureClass.NETWORK
