"""Shards: written once, named by their digest, read by position."""
