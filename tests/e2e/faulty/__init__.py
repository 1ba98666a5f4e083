"""A language model that fails on purpose; copied into an image and named by `task.kind`."""
