"""The stages of a run, one function each: what the command line and the pipeline's components both call.

Every stage takes plain values, keeps its state in the run's folder, may run again at any time, and returns an
`Outcome`. Importing them needs neither torch nor kfp nor mlflow.
"""
