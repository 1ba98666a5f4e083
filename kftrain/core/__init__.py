"""Storage, outages, plugins, progress, credentials: every folder may use them; they import `settings` at most."""
