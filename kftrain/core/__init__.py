"""What every folder may use: storage, outages, plugins, progress, credentials. It imports `settings` at most."""
