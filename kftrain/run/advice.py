"""Advice about failures: one table by class of failure and by place, and the commands that go with it.

Pure, but for `Situation.from_environment`. The launcher, the failure report and `kftrain run` all ask here, so that
they cannot disagree. A row says what is to be done about the cause and what comes next; how the next thing is done here
(a command on a laptop, the form in the Kubeflow UI) is decided once for all rows, in `_advise_next`.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from enum import Enum

from kftrain.errors import FailureClass
from kftrain.run.error import ErrorDocument

STARTED_BY_ENV = "KFTRAIN_STARTED_BY"
"""The command line of the `kftrain run` that a stage belongs to, without its `--resume`."""

LOG_ENV = "KFTRAIN_LOG"
"""The log file of the `kftrain run` that a stage belongs to."""

STEP_POD_ENV = "KFP_POD_NAME"
"""Kubeflow tells every step the name of its pod."""

STEPS_IMAGE_ENV = "KFTRAIN_STEPS_IMAGE"
"""Names the image of the steps where a pipeline is compiled, and tells it to each of them."""

FORM_OBJECT = "config_json"
FORM_PARAMETERS = {
    "optimizer.learning_rate": "learning_rate",
    "data.source": "source",
    "launch.kubernetes.trainer_image": "trainer_image",
}
"""Setting -> the pipeline's parameter for it; `FORM_OBJECT` is the parameter that takes every other setting."""


class Place(str, Enum):
    """The place at which a person reads about a failure; it decides how the next thing is done."""

    LAPTOP = "laptop"
    """At a shell: `kftrain run`, or a stage's own command, whatever backend trains."""
    KUBEFLOW = "kubeflow"
    """A step of a pipeline, whose person looks at the Kubeflow UI."""


class Next(Enum):
    """The next thing to do about a failure."""

    RESUME = "resume"
    RESUME_CHANGED = "resume with a setting changed"
    CORRECT = "go on with a corrected configuration"
    NEW_RUN = "start a new run"
    NEW_RUN_CHANGED = "start a new run with a setting changed"
    CHECKPOINTS = "look at the checkpoints"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Row:
    """The remedy and the next thing to do for a class of failures at one place."""

    remedy: str
    """About the cause; said where the error itself says no more."""
    next: Next = Next.RESUME
    setting: str = "KEY=VALUE"
    """The setting to change, where `next` changes one."""
    note: str = ""
    """A sentence that is said even where the error names its own fix."""


@dataclass(frozen=True)
class Advice:
    """A sentence for a person, with the command that carries it out."""

    text: str
    command: str = ""
    """A line for a shell; empty where there is none to run."""


@dataclass(frozen=True)
class Situation:
    """The place at which a failure is read, and the facts that are known there."""

    place: Place
    run_uri: str = ""
    """Empty where the failed command has opened no run."""
    started_by: str = "kftrain run"
    """The command that starts such a run anew."""
    log: str = ""
    """Log file with everything that was printed; empty where Kubeflow keeps it."""
    kubeflow_url: str = ""
    """Address of the Kubeflow UI, where it is known."""
    steps_image: str = ""
    """Image of the pipeline's steps, where that is not the default: who submits again must name it."""

    @classmethod
    def from_environment(cls, run_uri: str = "") -> Situation:
        """Build the situation of this process: a step of Kubeflow's, or something that was started at a shell."""
        started_by = os.environ.get(STARTED_BY_ENV, "")
        in_kubeflow = bool(os.environ.get(STEP_POD_ENV)) and not started_by
        place = Place.KUBEFLOW if in_kubeflow else Place.LAPTOP
        image = os.environ.get(STEPS_IMAGE_ENV, "") if in_kubeflow else ""
        log = os.environ.get(LOG_ENV, "")
        return cls(place, run_uri, started_by or "kftrain run", log, steps_image=image)

    def to_environment(self) -> dict[str, str]:
        """Return the variables that hand a laptop's situation to the processes that its command starts."""
        assert self.place == Place.LAPTOP, self.place
        return {STARTED_BY_ENV: self.started_by, LOG_ENV: self.log}


PASSING = frozenset(
    (
        *(FailureClass.NETWORK, FailureClass.STORAGE, FailureClass.PREEMPTED, FailureClass.NODE, FailureClass.HANG),
        *(FailureClass.DELETED, FailureClass.TERMINATED, FailureClass.INTERRUPTED, FailureClass.LAUNCHER),
        *(FailureClass.TRACKING, FailureClass.FENCED),
    )
)
"""Classes of failures that may not come again when the same thing is run again unchanged."""

_MEMORY = "train.micro_batch_size=N"


def _share_row(remedy: str, next_: Next = Next.RESUME, setting: str = "KEY=VALUE", note: str = "") -> dict[Place, Row]:
    row = Row(remedy, next_, setting, note)
    return {Place.LAPTOP: row, Place.KUBEFLOW: row}


def _split_rows(laptop: Row, kubeflow: Row) -> dict[Place, Row]:
    return {Place.LAPTOP: laptop, Place.KUBEFLOW: kubeflow}


TABLE: dict[FailureClass, dict[Place, Row]] = {
    FailureClass.CONFIG: _share_row(
        "Correct the setting that is named.",
        Next.CORRECT,
    ),
    FailureClass.DATA: _share_row(
        "Correct the source, or name another; look at shards that are damaged with kftrain shards verify.",
        Next.RESUME_CHANGED,
        "data.source=SOURCE",
    ),
    FailureClass.CHECKPOINT: _share_row("See which checkpoints are committed.", Next.CHECKPOINTS),
    FailureClass.OTHER_TRAINING: _share_row(
        "Restore the settings that differ.",
        Next.NEW_RUN,
        note="Nothing was changed: a run that has committed a checkpoint keeps its data, task, model and optimizer.",
    ),
    FailureClass.LAUNCH: _share_row("Correct what the message names.", Next.RESUME_CHANGED),
    FailureClass.EVALUATION: _share_row(
        "Correct what the message names.", note="Training is complete and is not repeated."
    ),
    FailureClass.TRACKING: _share_row("See that MLflow can be reached and written."),
    FailureClass.HOST_MEMORY: _share_row(
        "Lower train.micro_batch_size or launch.processes_per_node; of pods, raise launch.kubernetes.memory.",
        Next.RESUME_CHANGED,
        _MEMORY,
    ),
    FailureClass.GPU_MEMORY: _share_row(
        "Lower train.micro_batch_size, or set train.activation_checkpointing=blocks.", Next.RESUME_CHANGED, _MEMORY
    ),
    FailureClass.NETWORK: _split_rows(
        Row("A process went away. Look at the log if it repeats."),
        Row("A worker went away or the network broke. Look at the node if it repeats."),
    ),
    FailureClass.STORAGE: _split_rows(
        Row("See that the storage answers and has room."),
        Row("See that the storage answers, from the pods too, and has room."),
    ),
    FailureClass.PREEMPTED: _share_row("The run goes on after its last commit."),
    FailureClass.NODE: _share_row("The run goes on after its last commit, on other nodes."),
    FailureClass.IMAGE: _share_row(
        "Check launch.kubernetes.trainer_image, its tag and image_pull_secrets.",
        Next.RESUME_CHANGED,
        "launch.kubernetes.trainer_image=IMAGE",
    ),
    FailureClass.STEP_IMAGE: _share_row(
        "Check the image of the step (kftrain submit --steps-image) and its account's pull secret."
    ),
    FailureClass.STEP_MEMORY: _share_row(
        "The step itself, not a worker, had too little memory: raise the limit of its namespace."
    ),
    FailureClass.VOLUME: _share_row(
        "Check launch.kubernetes.volumes: the claim, secret or config map must exist.", Next.RESUME_CHANGED
    ),
    FailureClass.QUOTA: _share_row("Ask for less, or use another launch.kubernetes.queue.", Next.RESUME_CHANGED),
    FailureClass.SCHEDULING: _share_row(
        "No node fits: check GPUs, cpu, memory, node_selector, tolerations of launch.kubernetes.", Next.RESUME_CHANGED
    ),
    FailureClass.HANG: _share_row(
        "The log of that rank says where it stood; if it was only slow, raise launch.timeout_seconds."
    ),
    FailureClass.DEADLINE: _share_row(
        "Raise the limit that is named, or find out why it took so long; what is committed is kept.",
        Next.RESUME_CHANGED,
    ),
    FailureClass.DIVERGED: _share_row(
        "Lower optimizer.learning_rate, or allow skips with train.max_nonfinite_steps.",
        Next.NEW_RUN_CHANGED,
        "optimizer.learning_rate=RATE",
    ),
    FailureClass.USER_CODE: _split_rows(
        Row("Correct the code; its traceback is in the log."),
        Row("Correct the code; its traceback is in the log.", note="Build the image anew."),
    ),
    FailureClass.OPERATOR: _share_row(
        "See that the training operator runs: kubectl get pods -A | grep training-operator."
    ),
    FailureClass.FENCED: _share_row(
        "Another attempt of this run is at work: nothing is lost, and nothing needs to be done here.", Next.NOTHING
    ),
    FailureClass.LAUNCHER: _share_row("The step that followed the job vanished; the job committed and ended."),
    FailureClass.DELETED: _share_row("Somebody deleted the job; what is committed is kept."),
    FailureClass.TERMINATED: _share_row("The run goes on after its last commit."),
    FailureClass.INTERRUPTED: _share_row("The run goes on after its last commit."),
    FailureClass.BUG: _share_row(
        "This is not an expected failure; its traceback is in the log. What is committed is kept."
    ),
    FailureClass.UNKNOWN: _share_row("Nothing is known but this; what is committed is kept."),
}
"""Class of failure -> place -> the row for it. Every class has a row at both places."""


def find_remedy(kind: FailureClass, place: Place | None = None) -> str:
    """Return what to do about the cause, in one or two sentences, at a place; by default where this process is."""
    return TABLE[kind][place or Situation.from_environment().place].remedy


def make_fix(kind: FailureClass) -> str:
    """Return the remedy as the `fix` of an error: it begins in lower case and ends without a full stop."""
    text = find_remedy(kind).rstrip(".")
    return text[:1].lower() + text[1:]


def advise(error: ErrorDocument, situation: Situation, with_fix: bool = True) -> Advice:
    """Return what to do about a failure, and the command for that.

    What an error says itself about its cause is more to the point than what the table says about its class, so that is
    said only where the error says nothing. `with_fix`: False where the reader sees the error's own fix anyway.
    """
    row = TABLE[error.failure_class][situation.place]
    following = _advise_next(row, situation)
    own = error.fix if with_fix else ""
    sentences = (_make_sentence(own), "" if error.fix else row.remedy, row.note, following.text)
    return Advice(" ".join(dict.fromkeys(filter(None, sentences))), following.command)


def _advise_next(row: Row, situation: Situation) -> Advice:
    """Choose the next thing; without a run to go on with, that is a new run."""
    step, uri = row.next, situation.run_uri.rstrip("/")
    if step == Next.NOTHING:
        return Advice("")
    if not uri and step in (Next.RESUME, Next.RESUME_CHANGED, Next.CORRECT, Next.CHECKPOINTS):
        step = Next.NEW_RUN
    if step == Next.CHECKPOINTS:
        return Advice("", shlex.join(["kftrain", "checkpoints", "list", uri]))
    return (
        _advise_at_shell(step, row, situation)
        if situation.place == Place.LAPTOP
        else _advise_in_kubeflow(step, row, situation)
    )


def _advise_at_shell(step: Next, row: Row, situation: Situation) -> Advice:
    change = f" --set {row.setting}"
    resume = shlex.join(["kftrain", "run", "--resume", situation.run_uri.rstrip("/")])
    return {
        Next.RESUME: Advice("Go on:", resume),
        Next.RESUME_CHANGED: Advice("Then go on:", resume + change),
        Next.CORRECT: _advise_correction(situation),
        Next.NEW_RUN: Advice("Then start a new run:", situation.started_by),
        Next.NEW_RUN_CHANGED: Advice("Start a new run:", situation.started_by + change),
    }[step]


def _advise_correction(situation: Situation) -> Advice:
    """Name a whole configuration: an override could not take a wrong key out of the one that the run has kept."""
    if "--config" not in situation.started_by:
        return Advice("Correct it in this command:", situation.started_by)
    resume = shlex.join(["--resume", situation.run_uri.rstrip("/")])
    return Advice("Correct it in the file, or in this command:", f"{situation.started_by} {resume}")


def _advise_in_kubeflow(step: Next, row: Row, situation: Situation) -> Advice:
    uri, change = situation.run_uri.rstrip("/"), _describe_form_change(row.setting)
    there = f"in the Kubeflow UI, start a run with nothing but resume_run set to {uri}"
    image = ["--steps-image", situation.steps_image] if situation.steps_image else []
    submit = shlex.join(["kftrain", "submit", "--host", situation.kubeflow_url or "URL", *image])
    resume = f"{submit} {shlex.join(['--resume', uri])}"
    return {
        Next.RESUME: Advice(f"Then go on: {there}; or from a shell:", resume),
        Next.RESUME_CHANGED: Advice(
            f"Then go on: {there}, and {change}; or from a shell:", f"{resume} --set {row.setting}"
        ),
        Next.CORRECT: Advice(
            f"Clone the run in the Kubeflow UI, correct {FORM_OBJECT} and set resume_run to {uri}; or, as a text in "
            "config cannot be edited there, correct the file and submit it from a shell:",
            f"{submit} --config FILE {shlex.join(['--resume', uri])}",
        ),
        Next.NEW_RUN: Advice(f"Then clone the run in the Kubeflow UI and correct it there, with {FORM_OBJECT}."),
        Next.NEW_RUN_CHANGED: Advice(f"Clone the run in the Kubeflow UI, with {change}."),
    }[step]


def _describe_form_change(setting: str) -> str:
    """Describe how the run form changes a setting: by a parameter of its own, or in the object that takes any."""
    key, _, value = setting.partition("=")
    if key in FORM_PARAMETERS:
        return f"{FORM_PARAMETERS[key]} set to {value}"
    if "." not in key:
        return f"{FORM_OBJECT} set to what is to change"
    for part in reversed(key.split(".")):
        value = f'{{"{part}": {value}}}'
    return f"{FORM_OBJECT} set to {value}"


def _make_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""
