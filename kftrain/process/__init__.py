"""One process of the operating system: signals, parents, liveness, what it says when it ends."""
