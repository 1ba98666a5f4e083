"""What launchers and people leave on a job."""

DIGEST_ANNOTATION = "kftrain.io/spec-digest"
"""Digest of the specification as we built it: webhooks change the stored one."""

STATE_ANNOTATION = "kftrain.io/state"
"""The state and its reasons, as the launcher prints them."""

PROGRESS_ANNOTATION = "kftrain.io/progress"
"""The last line that the job has printed about a step."""

LAUNCH_ANNOTATION = "kftrain.io/launch"
"""Mark of the launch that holds the job: a random number by which a launcher knows its own job."""

SEEN_ANNOTATION = "kftrain.io/seen"
"""Time at which a launcher last looked at the job."""

SUSPENDED_ANNOTATION = "kftrain.io/suspended"
"""Time of `kftrain suspend`; removed by `kftrain unsuspend`."""
