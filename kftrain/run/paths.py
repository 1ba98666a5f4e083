"""The places of a run's files below its folder, `<root>/runs/<run id>`. The list says who writes a file, and for whom.

<root>/shards/<dataset digest>/manifest.json                        shards        -> train, evaluate
<root>/shards/by-source/<source digest>.json                        shards        -> the next run's shards
<root>/runs/<run>/config.yaml                                       launcher      -> workers
<root>/runs/<run>/configs/<config digest>.yaml                      launcher      -> workers of one job
<root>/runs/<run>/configs/<config digest>-before.yaml                launcher      -> launcher (if that is refused)
<root>/runs/<run>/launcher.json                                     launcher      -> workers (its heartbeat)
<root>/runs/<run>/sharding/<config digest>/<rank>.json              shard         -> workers of its job
<root>/runs/<run>/sharding/parts/<input digest>.json                workers       -> shard
<root>/runs/<run>/shards.json                                       shard         -> train, evaluate
<root>/runs/<run>/drift.json                                        shard         -> reports
<root>/runs/<run>/attempts/<n>.json                                 rank 0's claim
<root>/runs/<run>/checkpoints/step-<n>-a<attempt>/                  train         -> train (checkpoint/)
<root>/runs/<run>/servers/<n>.json                                  servers       -> workers of one attempt
<root>/runs/<run>/servers/wanted.json, ring-<epoch>.json             people, train -> launcher, train, servers
<root>/runs/<run>/micro_batch.json                                  train         -> train
<root>/runs/<run>/history.json                                      train         -> train, reports
<root>/runs/<run>/export/<checkpoint digest>/                       train         -> evaluate, register
<root>/runs/<run>/COMPLETE.json                                     train         -> evaluate, register
<root>/runs/<run>/evaluation/request.json                           evaluate      -> workers
<root>/runs/<run>/evaluation/<checkpoint>/<evaluation>/metrics.json evaluate      -> register
<root>/runs/<run>/evaluation/unmeasured.json                        evaluate      -> register
<root>/runs/<run>/evaluation/reference.json                         evaluate      -> register
<root>/runs/<run>/registration.json                                 register      -> reports
<root>/runs/<run>/report.html, comparison.html                      register      -> people
<root>/runs/<run>/error.json                                        a failed stage -> whoever shows it
<root>/runs/<run>/failure.json                                      launcher      -> the stage that started it
<root>/runs/<run>/firing.json, SKIPPED.json                         shard         -> all others, of a scheduled run
<root>/runs/<run>/window.json                                       shard         -> finish, of a scheduled run
<root>/runs/<run>/logs/attempt-<n>/rank-<r>.log                     workers       -> people
<root>/runs/<run>/slurm/<task>-<job>.log, .code                      slurm         -> launcher, people
<root>/runs/<run>/ray/<task>.json                                   launchers     -> launchers: who follows the job
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.core import storage


class _Below:
    """An attribute of `RunPaths` that is the URI of something below the run's folder."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, paths: RunPaths, kind: type[RunPaths]) -> str:
        return storage.join(paths.uri, *self._parts)


@dataclass(frozen=True)
class RunPaths:
    """The URIs of a run's files. `uri` is that of its folder, `<root>/runs/<run id>`."""

    uri: str

    config = _Below("config.yaml")
    """The configuration, resolved, that the run was opened with last."""
    shards = _Below("shards.json")
    """The manifest's URI and the digest of the run's dataset, which lies outside of its folder."""
    complete = _Below("COMPLETE.json")
    """The only proof that the training succeeded."""
    registration = _Below("registration.json")
    """The registered version, and the gate's decision."""
    error = _Below("error.json")
    """The error of the stage that failed last."""
    skipped = _Below("SKIPPED.json")
    """The reason why a scheduled run had nothing to do."""
    window_files = _Below("window.json")
    """Files of a scheduled run's window that no run before has read."""
    failure = _Below("failure.json")
    """The launcher's findings about a failed job."""
    bandwidth = _Below("bandwidth.json")
    """The rows that `kftrain bandwidth` has measured, in a folder that is no run."""
    launcher = _Below("launcher.json")
    """The launcher's heartbeat, written once a minute while it lives."""
    logs = _Below("logs")
    """Folder of what every process printed: `attempt-<n>/rank-<r>.log` and `evaluation/rank-<r>.log`."""
    servers = _Below("servers")
    """Folder of the addresses of parameter servers, `<n>.json`; the next attempt's replace them."""
    micro_batch = _Below("micro_batch.json")
    """The micro batch that was found for this run."""
    history = _Below("history.json")
    """Recorded points of the training curve, a JSON list; replaced as a whole at every commit."""
    comparison = _Below("comparison.html")
    """The page of the champion and the newest versions, as they were when this run was registered."""
    report = _Below("report.html")
    """The run's report, an HTML page."""
    attempts = _Below("attempts")
    """Folder of the attempts' claims, `<n>.json`."""
    checkpoints = _Below("checkpoints")
    """Folder of checkpoints, committed and half-written ones."""
    evaluation_request = _Below("evaluation", "request.json")
    """The exports that the evaluation job is asked to score."""
    sharding = _Below("sharding")
    """Folder of the plans of sharding jobs and of what they have done; it goes when the shards are written."""
    encoded_parts = _Below("sharding", "parts")
    """Folder of what leads to the parts that a sharding job has encoded."""
    drift = _Below("drift.json")
    """The changes since the dataset before; not there where nothing was compared."""
    unmeasured = _Below("evaluation", "unmeasured.json")
    """The reason why the champion could not be scored; not there where it was."""
    reference_set = _Below("evaluation", "reference.json")
    """The dataset that was the reference set; not there where there is none."""

    @classmethod
    def of(cls, storage_root: str, run_id: str) -> RunPaths:
        """Build the paths of a run below a storage root; creates nothing."""
        return cls(storage.join(storage_root, "runs", run_id))

    @property
    def run_id(self) -> str:
        """The last part of the folder's URI."""
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def storage_root(self) -> str:
        """URI below which runs, shards and schedules lie."""
        return self.uri.rstrip("/").rsplit("/", 2)[0]

    def job_config(self, config_digest: str) -> str:
        """Return the URI of the configuration that one job was started for."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}.yaml")

    def share(self, config_digest: str, rank: int) -> str:
        """Return the URI of what one process of the sharding job with this configuration is to do."""
        return storage.join(self.sharding, config_digest[:16], f"{rank}.json")

    def config_before(self, config_digest: str) -> str:
        """Return the URI of the configuration whose place the one with this digest took."""
        return storage.join(self.uri, "configs", f"{config_digest[:16]}-before.yaml")

    def attempt(self, number: int) -> str:
        """Return the URI of the claim of one attempt."""
        return storage.join(self.attempts, f"{number}.json")

    def export(self, checkpoint_digest: str) -> str:
        """Return the folder of the export of one checkpoint."""
        return storage.join(self.uri, "export", checkpoint_digest[:16])

    def evaluation(self, checkpoint_digest: str, evaluation_digest: str) -> str:
        """Return the folder of one evaluation: `metrics.json` and `statistics.npz`."""
        return storage.join(self.uri, "evaluation", checkpoint_digest[:16], evaluation_digest[:16])
