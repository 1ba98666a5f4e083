"""What to do about a failure: one table by class of failure and by place, and the commands that go with it.

Pure, but for `Situation.from_environment`. The launcher, the failure report and `kftrain run` all ask here, so that
they cannot disagree. A row says what is to be done about the cause and what comes next; how the next thing is done here
(a command on a laptop, the form in the Kubeflow UI) is decided once for all rows, in `_next`.
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
"""Parameter of the pipeline that takes any setting, and those settings that have one of their own."""


class Place(str, Enum):
    """Where the reader is."""

    LAPTOP = "laptop"
    """At a shell: `kftrain run`, or a stage's own command, whatever backend trains."""
    KUBEFLOW = "kubeflow"
    """In the Kubeflow UI."""


class Next(Enum):
    """What comes next."""

    RESUME = "resume"
    RESUME_CHANGED = "resume with a setting changed"
    CORRECT = "go on with a corrected configuration"
    NEW_RUN = "start a new run"
    NEW_RUN_CHANGED = "start a new run with a setting changed"
    CHECKPOINTS = "look at the checkpoints"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Row:
    """What to do about a class of failures at one place."""

    remedy: str
    """About the cause; said where the error itself says no more."""
    next: Next = Next.RESUME
    setting: str = "KEY=VALUE"
    """What is changed, where `next` changes something."""
    note: str = ""
    """What is to be known in any case."""


@dataclass(frozen=True)
class Advice:
    """What a person reads."""

    text: str
    command: str = ""
    """A line for a shell; empty where there is none to run."""


@dataclass(frozen=True)
class Situation:
    """Where a failure is read, and what is known there."""

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
        """Of this process: a step of Kubeflow's, or something that was started at a shell."""
        started_by = os.environ.get(STARTED_BY_ENV, "")
        in_kubeflow = bool(os.environ.get(STEP_POD_ENV)) and not started_by
        place = Place.KUBEFLOW if in_kubeflow else Place.LAPTOP
        image = os.environ.get(STEPS_IMAGE_ENV, "") if in_kubeflow else ""
        log = os.environ.get(LOG_ENV, "")
        return cls(place, run_uri, started_by or "kftrain run", log, steps_image=image)

    def to_environment(self) -> dict[str, str]:
        """What tells it to the processes that a laptop's command starts."""
        assert self.place == Place.LAPTOP, self.place
        return {STARTED_BY_ENV: self.started_by, LOG_ENV: self.log}


PASSING = frozenset(
    (
        *(FailureClass.NETWORK, FailureClass.STORAGE, FailureClass.PREEMPTED, FailureClass.NODE, FailureClass.HANG),
        *(FailureClass.DELETED, FailureClass.TERMINATED, FailureClass.INTERRUPTED, FailureClass.LAUNCHER),
        *(FailureClass.TRACKING, FailureClass.FENCED),
    )
)
"""What may succeed when it is run again just as it was."""

_MEMORY = "train.micro_batch_size=N"


def _both(remedy: str, next_: Next = Next.RESUME, setting: str = "KEY=VALUE", note: str = "") -> dict[Place, Row]:
    row = Row(remedy, next_, setting, note)
    return {Place.LAPTOP: row, Place.KUBEFLOW: row}


def _each(laptop: Row, kubeflow: Row) -> dict[Place, Row]:
    return {Place.LAPTOP: laptop, Place.KUBEFLOW: kubeflow}


TABLE: dict[FailureClass, dict[Place, Row]] = {
    FailureClass.CONFIG: _both(
        "Correct the setting that is named.",
        Next.CORRECT,
    ),
    FailureClass.DATA: _both(
        "Correct the source, or name another; look at shards that are damaged with kftrain shards verify.",
        Next.RESUME_CHANGED,
        "data.source=SOURCE",
    ),
    FailureClass.CHECKPOINT: _both("See which checkpoints are committed.", Next.CHECKPOINTS),
    FailureClass.OTHER_TRAINING: _both(
        "Restore the settings that differ.",
        Next.NEW_RUN,
        note="Nothing was changed: a run that has committed a checkpoint keeps its data, task, model and optimizer.",
    ),
    FailureClass.LAUNCH: _both("Correct what the message names.", Next.RESUME_CHANGED),
    FailureClass.EVALUATION: _both("Correct what the message names.", note="Training is complete and is not repeated."),
    FailureClass.TRACKING: _both("See that MLflow can be reached and written."),
    FailureClass.HOST_MEMORY: _both(
        "Lower train.micro_batch_size or launch.processes_per_node; of pods, raise launch.kubernetes.memory.",
        Next.RESUME_CHANGED,
        _MEMORY,
    ),
    FailureClass.GPU_MEMORY: _both(
        "Lower train.micro_batch_size, or set train.activation_checkpointing=blocks.", Next.RESUME_CHANGED, _MEMORY
    ),
    FailureClass.NETWORK: _each(
        Row("A process went away. Look at the log if it repeats."),
        Row("A worker went away or the network broke. Look at the node if it repeats."),
    ),
    FailureClass.STORAGE: _each(
        Row("See that the storage answers and has room."),
        Row("See that the storage answers, from the pods too, and has room."),
    ),
    FailureClass.PREEMPTED: _both("The run goes on after its last commit."),
    FailureClass.NODE: _both("The run goes on after its last commit, on other nodes."),
    FailureClass.IMAGE: _both(
        "Check launch.kubernetes.trainer_image, its tag and image_pull_secrets.",
        Next.RESUME_CHANGED,
        "launch.kubernetes.trainer_image=IMAGE",
    ),
    FailureClass.STEP_IMAGE: _both(
        "Check the image of the step (kftrain submit --steps-image) and its account's pull secret."
    ),
    FailureClass.STEP_MEMORY: _both(
        "The step itself, not a worker, had too little memory: raise the limit of its namespace."
    ),
    FailureClass.VOLUME: _both(
        "Check launch.kubernetes.volumes: the claim, secret or config map must exist.", Next.RESUME_CHANGED
    ),
    FailureClass.QUOTA: _both("Ask for less, or use another launch.kubernetes.queue.", Next.RESUME_CHANGED),
    FailureClass.SCHEDULING: _both(
        "No node fits: check GPUs, cpu, memory, node_selector, tolerations of launch.kubernetes.", Next.RESUME_CHANGED
    ),
    FailureClass.HANG: _both(
        "The log of that rank says where it stood; if it was only slow, raise launch.timeout_seconds."
    ),
    FailureClass.DEADLINE: _both(
        "Raise the limit that is named, or find out why it took so long; what is committed is kept.",
        Next.RESUME_CHANGED,
    ),
    FailureClass.DIVERGED: _both(
        "Lower optimizer.learning_rate, or allow skips with train.max_nonfinite_steps.",
        Next.NEW_RUN_CHANGED,
        "optimizer.learning_rate=RATE",
    ),
    FailureClass.USER_CODE: _each(
        Row("Correct the code; its traceback is in the log."),
        Row("Correct the code; its traceback is in the log.", note="Build the image anew."),
    ),
    FailureClass.OPERATOR: _both("See that the training operator runs: kubectl get pods -A | grep training-operator."),
    FailureClass.FENCED: _both(
        "Another attempt of this run is at work: nothing is lost, and nothing needs to be done here.", Next.NOTHING
    ),
    FailureClass.LAUNCHER: _both("The step that followed the job vanished; the job committed and ended."),
    FailureClass.DELETED: _both("Somebody deleted the job; what is committed is kept."),
    FailureClass.TERMINATED: _both("The run goes on after its last commit."),
    FailureClass.INTERRUPTED: _both("The run goes on after its last commit."),
    FailureClass.BUG: _both("This is not an expected failure; its traceback is in the log. What is committed is kept."),
    FailureClass.UNKNOWN: _both("Nothing is known but this; what is committed is kept."),
}
"""What to do, by class of failure and by place."""


def remedy(kind: FailureClass, place: Place | None = None) -> str:
    """What to do about the cause, in one or two sentences, at a place; by default where this process is."""
    return TABLE[kind][place or Situation.from_environment().place].remedy


def fix_of(kind: FailureClass) -> str:
    """What to do about the cause, as the `fix` of an error."""
    text = remedy(kind).rstrip(".")
    return text[:1].lower() + text[1:]


def advise(error: ErrorDocument, situation: Situation, with_fix: bool = True) -> Advice:
    """What to do about a failure, and the command for that.

    What an error says itself about its cause is more to the point than what the table says about its class, so that is
    said only where the error says nothing. `with_fix`: False where the reader sees the error's own fix anyway.
    """
    row = TABLE[error.failure_class][situation.place]
    following = _next(row, situation)
    own = error.fix if with_fix else ""
    sentences = (_sentence(own), "" if error.fix else row.remedy, row.note, following.text)
    return Advice(" ".join(dict.fromkeys(filter(None, sentences))), following.command)


def _next(row: Row, situation: Situation) -> Advice:
    step, uri = row.next, situation.run_uri.rstrip("/")
    if step == Next.NOTHING:
        return Advice("")
    if not uri and step in (Next.RESUME, Next.RESUME_CHANGED, Next.CORRECT, Next.CHECKPOINTS):
        step = Next.NEW_RUN
    if step == Next.CHECKPOINTS:
        return Advice("", shlex.join(["kftrain", "checkpoints", "list", uri]))
    return _at_a_shell(step, row, situation) if situation.place == Place.LAPTOP else _in_kubeflow(step, row, situation)


def _at_a_shell(step: Next, row: Row, situation: Situation) -> Advice:
    change = f" --set {row.setting}"
    resume = shlex.join(["kftrain", "run", "--resume", situation.run_uri.rstrip("/")])
    return {
        Next.RESUME: Advice("Go on:", resume),
        Next.RESUME_CHANGED: Advice("Then go on:", resume + change),
        Next.CORRECT: _corrected(situation),
        Next.NEW_RUN: Advice("Then start a new run:", situation.started_by),
        Next.NEW_RUN_CHANGED: Advice("Start a new run:", situation.started_by + change),
    }[step]


def _corrected(situation: Situation) -> Advice:
    """A whole configuration: an override could not take a wrong key out of the one that the run has kept."""
    if "--config" not in situation.started_by:
        return Advice("Correct it in this command:", situation.started_by)
    resume = shlex.join(["--resume", situation.run_uri.rstrip("/")])
    return Advice("Correct it in the file, or in this command:", f"{situation.started_by} {resume}")


def _in_kubeflow(step: Next, row: Row, situation: Situation) -> Advice:
    uri, change = situation.run_uri.rstrip("/"), _in_the_form(row.setting)
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


def _in_the_form(setting: str) -> str:
    """How a setting is changed in the run form: by a parameter of its own, or in the object that takes any."""
    key, _, value = setting.partition("=")
    if key in FORM_PARAMETERS:
        return f"{FORM_PARAMETERS[key]} set to {value}"
    if "." not in key:
        return f"{FORM_OBJECT} set to what is to change"
    for part in reversed(key.split(".")):
        value = f'{{"{part}": {value}}}'
    return f"{FORM_OBJECT} set to {value}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""
