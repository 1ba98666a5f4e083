"""How a model and a batch are spread over processes; knows no configuration file, no task and no checkpoint."""
