"""Recurring runs: when they are due, what they are to be, what differs, and what has become of them."""
