"""Shards that others have written become a dataset without being copied."""
