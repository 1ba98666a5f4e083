"""Parts of a source: each is encoded by itself, by several processes, and kept for the next dataset that has it."""
