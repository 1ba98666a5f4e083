"""The promises that hold whoever starts the processes: the columns of the matrix in docs/launchers.md."""

PROMISES = {
    "trains": "a job, of two nodes where there are several, trains to COMPLETE.json and leaves nothing",
    "request": "the request that is shown is the one that the scheduler takes",
    "found": "somebody who did not start it sees its state, workers and progress",
    "waits": "why it waits is said in the scheduler's own words within seconds, and waiting ends",
    "logs": "`logs -f` goes on through a replaced worker",
    "cancel": "cancel commits within the grace, says so, and leaves nothing",
    "suspend": "suspended it has no processes; unsuspended it goes on from the commit",
    "adopted": "the launcher is killed; the next one adopts the job, which never stopped",
    "two launchers": "of two launchers one runs the job, the other one says who does",
    "worker killed": "a worker that is killed costs one attempt and no committed step",
    "preempted": "a worker that is told to go commits, and its successor goes on after that step",
    "storage away": "an outage of storage costs no attempt",
    "user error": "an error of the user's code ends it at once with exit code 16",
    "diverged": "a loss that is not finite ends it at once with exit code 19",
    "retries end": "a failure that comes back ends it after the budget of restarts",
    "servers": "a role of servers runs beside the workers",
    "garbage": "a job that nobody follows is taken away",
    "controller away": "the scheduler's controller is away for two minutes: nothing is lost",
    "node lost": "a node dies: its worker is replaced on another one",
}
"""Short name of a promise -> what it says."""
