"""Weights of a mixture as whole numbers of slots: the shortest round in which every component has exactly its share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

MAX_ROUND_SLOTS = 1 << 20
"""Most slots of a round, which is a table: what weights of six digits come to."""


def compute_slots(weights: Sequence[float]) -> list[int]:
    """Compute the slots of each component in a round, from weights of at least 0.

    Raises ValueError where all are 0, or where the round would be too long for a table.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    if not any(exact):
        raise ValueError("one of the weights of a mixture is above 0")
    total = sum(exact)
    shares = [weight / total for weight in exact]
    num_slots = math.lcm(*(share.denominator for share in shares))
    if num_slots > MAX_ROUND_SLOTS:
        raise ValueError("the weights of a mixture have too many digits: use whole numbers, or at most six digits each")
    return [int(share * num_slots) for share in shares]
