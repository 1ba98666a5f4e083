"""Spreads a model and a batch over processes; knows no configuration file, no task and no checkpoint."""
