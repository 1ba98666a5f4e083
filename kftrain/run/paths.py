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


@dataclass(frozen=True)
class RunPaths:
    """Where a run's files lie: `<root>/runs/<run id>`."""

    uri: str

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

    @property
    def config(self) -> str:
        """The resolved configuration."""
        return storage.join(self.uri, "config.yaml")

    def job_config(self, config_digest: str) -> str:
        """The configuration that one job was started for."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}.yaml")

    def config_before(self, config_digest: str) -> str:
        """The run's configuration before the one with this digest took its place."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}-before.yaml")

    @property
    def shards(self) -> str:
        """Pointer to the run's shards."""
        return storage.join(self.uri, "shards.json")

    @property
    def complete(self) -> str:
        """The proof that training succeeded."""
        return storage.join(self.uri, "COMPLETE.json")

    @property
    def registration(self) -> str:
        """What registering and gating decided."""
        return storage.join(self.uri, "registration.json")

    @property
    def error(self) -> str:
        """Why the last stage failed."""
        return storage.join(self.uri, "error.json")

    @property
    def skipped(self) -> str:
        """Why a scheduled run had nothing to do."""
        return storage.join(self.uri, "SKIPPED.json")

    @property
    def window_files(self) -> str:
        """Which files of its window no run before has read, of a scheduled run."""
        return storage.join(self.uri, "window.json")

    @property
    def failure(self) -> str:
        """What the launcher found out about a failed job."""
        return storage.join(self.uri, "failure.json")

    @property
    def launcher(self) -> str:
        """The launcher's heartbeat."""
        return storage.join(self.uri, "launcher.json")

    @property
    def logs(self) -> str:
        """Folder of what every process printed: `attempt-<n>/rank-<r>.log` and `evaluation/rank-<r>.log`."""
        return storage.join(self.uri, "logs")

    @property
    def history(self) -> str:
        """Recorded points of the training curve, a JSON list; replaced as a whole at every commit."""
        return storage.join(self.uri, "history.json")

    @property
    def comparison(self) -> str:
        """The page of the champion and the newest versions, as they were when this run was registered."""
        return storage.join(self.uri, "comparison.html")

    @property
    def report(self) -> str:
        """The run's HTML report."""
        return storage.join(self.uri, "report.html")

    @property
    def attempts(self) -> str:
        """Folder of claims."""
        return storage.join(self.uri, "attempts")

    def attempt(self, number: int) -> str:
        """The claim of one attempt."""
        return storage.join(self.attempts, f"{number}.json")

    @property
    def checkpoints(self) -> str:
        """Folder of checkpoints."""
        return storage.join(self.uri, "checkpoints")

    def export(self, checkpoint_digest: str) -> str:
        """Folder of the export of one checkpoint."""
        return storage.join(self.uri, "export", checkpoint_digest[:16])

    @property
    def evaluation_request(self) -> str:
        """What the evaluation job is asked to score."""
        return storage.join(self.uri, "evaluation", "request.json")

    @property
    def drift(self) -> str:
        """What has changed since the dataset before; not there where nothing was compared."""
        return storage.join(self.uri, "drift.json")

    @property
    def unmeasured(self) -> str:
        """Why the champion could not be scored; not there where it was."""
        return storage.join(self.uri, "evaluation", "unmeasured.json")

    @property
    def reference_set(self) -> str:
        """Which dataset the reference set was; not there where there is none."""
        return storage.join(self.uri, "evaluation", "reference.json")

    def evaluation(self, checkpoint_digest: str, evaluation_digest: str) -> str:
        """Folder of one evaluation: `metrics.json` and `statistics.npz`."""
        return storage.join(self.uri, "evaluation", checkpoint_digest[:16], evaluation_digest[:16])
