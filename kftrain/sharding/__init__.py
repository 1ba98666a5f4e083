"""From raw data to shards: sources, parts, adopted shards, mixtures, drift. `kftrain.data` reads them."""
