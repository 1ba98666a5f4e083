"""What launchers and people leave on a job."""

DIGEST_ANNOTATION = "kftrain.io/spec-digest"
"""Digest of the specification as we built it: webhooks change the stored one."""

STATE_ANNOTATION = "kftrain.io/state"
"""The state and its reasons, as the launcher prints them."""

PROGRESS_ANNOTATION = "kftrain.io/progress"
"""The last line about a step."""

LAUNCH_ANNOTATION = "kftrain.io/launch"
"""Who has created it: a number drawn by its launcher, which knows its own job by it."""

SEEN_ANNOTATION = "kftrain.io/seen"
"""When its launcher last looked at it."""

SUSPENDED_ANNOTATION = "kftrain.io/suspended"
"""Set by `kftrain suspend`, with the time; taken away by `kftrain unsuspend`."""
