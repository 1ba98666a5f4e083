"""Checkpoints that exist only when they are whole: commit protocol, saving, loading, export, retention."""
