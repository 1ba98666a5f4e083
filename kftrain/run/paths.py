"""Where the files of a run lie below its folder, `<root>/runs/<run id>`.

<root>/shards/<dataset digest>/manifest.json                        shards        -> train, evaluate
<root>/shards/by-source/<source digest>.json                        shards        -> the next run's shards
<root>/runs/<run>/config.yaml                                       launcher      -> workers
<root>/runs/<run>/configs/<config digest>.yaml                      launcher      -> workers of one job
<root>/runs/<run>/configs/<config digest>-before.yaml                launcher      -> launcher (if that is refused)
<root>/runs/<run>/launcher.json                                     launcher      -> workers (its heartbeat)
<root>/runs/<run>/attempts/<n>.json                                 rank 0's claim
<root>/runs/<run>/checkpoints/step-<n>-a<attempt>/                  train         -> train (checkpoint/)
<root>/runs/<run>/export/<checkpoint digest>/                       train         -> evaluate, register
<root>/runs/<run>/COMPLETE.json                                     train         -> evaluate, register
<root>/runs/<run>/evaluation/<checkpoint>/<evaluation>/metrics.json evaluate      -> register
<root>/runs/<run>/evaluation/unmeasured.json                        evaluate      -> register
<root>/runs/<run>/evaluation/reference.json                         evaluate      -> register
<root>/runs/<run>/registration.json                                 register      -> reports
<root>/runs/<run>/report.html, comparison.html                      register      -> people
<root>/runs/<run>/error.json                                        a failed stage -> whoever shows it
<root>/runs/<run>/firing.json, SKIPPED.json                         shard         -> all others, of a scheduled run
<root>/runs/<run>/window.json                                       shard         -> finish, of a scheduled run
<root>/runs/<run>/logs/attempt-<n>/rank-<r>.log                     workers       -> people
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain import storage


class _Below:
    """The URI of something below a run's folder."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, paths: RunPaths, kind: type[RunPaths]) -> str:
        return storage.join(paths.uri, *self._parts)


@dataclass(frozen=True)
class RunPaths:
    """Where a run's files lie: `<root>/runs/<run id>`."""

    uri: str

    config = _Below("config.yaml")
    """The resolved configuration."""
    shards = _Below("shards.json")
    """Pointer to the run's shards."""
    complete = _Below("COMPLETE.json")
    """The proof that training succeeded."""
    registration = _Below("registration.json")
    """What registering and gating decided."""
    error = _Below("error.json")
    """Why the last stage failed."""
    skipped = _Below("SKIPPED.json")
    """Why a scheduled run had nothing to do."""
    window_files = _Below("window.json")
    """Which files of its window no run before has read, of a scheduled run."""
    failure = _Below("failure.json")
    """What the launcher found out about a failed job."""
    launcher = _Below("launcher.json")
    """The launcher's heartbeat."""
    logs = _Below("logs")
    """Folder of what every process printed: `attempt-<n>/rank-<r>.log` and `evaluation/rank-<r>.log`."""
    history = _Below("history.json")
    """Recorded points of the training curve, a JSON list; replaced as a whole at every commit."""
    comparison = _Below("comparison.html")
    """The page of the champion and the newest versions, as they were when this run was registered."""
    report = _Below("report.html")
    """The run's HTML report."""
    attempts = _Below("attempts")
    """Folder of claims."""
    checkpoints = _Below("checkpoints")
    """Folder of checkpoints."""
    evaluation_request = _Below("evaluation", "request.json")
    """What the evaluation job is asked to score."""
    drift = _Below("drift.json")
    """What has changed since the dataset before; not there where nothing was compared."""
    unmeasured = _Below("evaluation", "unmeasured.json")
    """Why the champion could not be scored; not there where it was."""
    reference_set = _Below("evaluation", "reference.json")
    """Which dataset the reference set was; not there where there is none."""

    @classmethod
    def of(cls, storage_root: str, run_id: str) -> RunPaths:
        """The folder of a run below a storage root."""
        return cls(storage.join(storage_root, "runs", run_id))

    @property
    def run_id(self) -> str:
        """Last part of the URI."""
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def storage_root(self) -> str:
        """What the run lies below."""
        return self.uri.rstrip("/").rsplit("/", 2)[0]

    def job_config(self, config_digest: str) -> str:
        """The configuration that one job was started for."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}.yaml")

    def config_before(self, config_digest: str) -> str:
        """The run's configuration before the one with this digest took its place."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}-before.yaml")

    def attempt(self, number: int) -> str:
        """The claim of one attempt."""
        return storage.join(self.attempts, f"{number}.json")

    def export(self, checkpoint_digest: str) -> str:
        """Folder of the export of one checkpoint."""
        return storage.join(self.uri, "export", checkpoint_digest[:16])

    def evaluation(self, checkpoint_digest: str, evaluation_digest: str) -> str:
        """Folder of one evaluation: `metrics.json` and `statistics.npz`."""
        return storage.join(self.uri, "evaluation", checkpoint_digest[:16], evaluation_digest[:16])
