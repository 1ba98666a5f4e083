"""The kinds of job, one file each."""
