"""The processes on a node of a job: supervisor, agent, ranks; and the watchdog and the root cause of failures."""
