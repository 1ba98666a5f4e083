"""From raw data to the batches of a rank: sources, shards, manifest, training order, loader. No torch."""
