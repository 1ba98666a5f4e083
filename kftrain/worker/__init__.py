"""What runs on each node of a job: supervisor, agent, ranks, watchdog, root cause."""
