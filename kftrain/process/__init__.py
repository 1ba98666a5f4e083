"""A process of the operating system: its signals, its parent, its liveness, its output and its last words."""
