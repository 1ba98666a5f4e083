"""Sources of raw data, one file a kind."""
