"""Evaluation: exact on any number of processes, with confidence intervals."""
