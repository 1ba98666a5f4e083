"""Where raw data comes from, one file a kind."""
