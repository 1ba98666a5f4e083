"""What a backend tells the suite about its real thing."""

from dataclasses import dataclass, field


@dataclass
class Site:
    """The real thing behind a backend, with the hands that the tests need there.

    `refused` maps a promise to a part of the error by which the backend refuses it: the test then demands that error.
    `not_run` maps a promise to the reason why it cannot be tried here; it is printed, and not counted as kept.
    """

    name: str
    settings: dict
    """Overrides of a small training there, by key: backend, storage, tracking, image."""
    nodes: int = 2
    small: dict = field(default_factory=dict)
    """Overrides of a job that finds room on what is left when a node is lost."""
    waiting: dict = field(default_factory=dict)
    """Case -> (overrides by which a job cannot start, the words that say why, seconds they may take)."""
    refused: dict = field(default_factory=dict)
    not_run: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    started: str = "-train in namespace"
    """What a launcher prints when the scheduler has its job."""
    suspended: str = "Queued: suspended"
    """What a launcher prints of a job that somebody has suspended."""
    waits_for_ever: bool = False
    """True where nothing ends a job that cannot start but somebody's order."""
    is_private: bool = False
    """True where nobody else uses the cluster: tests break it without being asked to."""
    dies_with_launcher: bool = False
    """True where a launcher that is killed takes its job along: nobody has to collect it."""
    where: tuple = ()
    """Further arguments of `kftrain status` and its like, such as a namespace."""
    store: object = None
    """The object store below the storage root, where it is not the one that all clusters share."""

    def mend(self):
        """Brings back to health what a failed test may have left unwell."""

    def list_alive(self, run_uri):
        """Names of what of a run's jobs still works: pods, processes."""
        raise NotImplementedError

    def list_left(self, run_uri):
        """Names of all that a run's jobs have left with the scheduler, ended or not."""
        raise NotImplementedError

    def kill_worker(self, run_uri, rank=0):
        """Ends a node's worker at once and without a word."""
        raise NotImplementedError

    def stop_worker(self, run_uri, rank=0):
        """Tells a node's worker to go, as a preemption does."""
        raise NotImplementedError

    def age_last_look(self, run_uri, days):
        """Lets the run's jobs look as if no launcher had looked at them for so long."""
        raise NotImplementedError

    def disturb_controller(self):
        """A context manager within which nobody works on the jobs."""
        raise NotImplementedError

    def lose_node(self, run_uri, rank, disturb):
        """Lets the node of a rank die, by `disturb(verb, …)` of the script of --disturb; `mend` brings it back."""
        raise NotImplementedError

    def check_request(self, text):
        """Asserts that the scheduler takes a request as `--dry-run` shows it."""
        raise NotImplementedError
