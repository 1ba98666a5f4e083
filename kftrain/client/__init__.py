"""Actions that people start, from the command line or from Python: run here, submit, compile, read a run."""
