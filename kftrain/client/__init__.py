"""What people start, for the command line and for `kftrain.api` alike: run here, submit, compile, read a run."""
