"""Fewer bytes for gradients on their way between processes, and what they lose on it."""
