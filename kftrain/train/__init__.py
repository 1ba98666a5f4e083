"""Training: optimizer, step, loop, and the processes that run them."""
