"""Keyed pseudo-random permutations of `range(n)` in O(1) memory: where element i goes, without a table of all elements.

Construction: the generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002, method 3). For a domain of n elements take a = ceil(sqrt(n)) and b = ceil(n / a), write
x = right * a + left, and alternate

    left  = (left  + F(right)) mod a
    right = (right + F(left))  mod b

Every round is undone by a subtraction, so the network permutes `range(a * b)`, whatever F is. Results beyond
n go through it again ("cycle walking"): the cycle of an element of the domain returns to the domain, so this
ends and keeps the bijection. As a * b - n < a, about one element in sqrt(n) walks. F is the output mix of
SplitMix64 (Stafford's variant 13). This shuffles well; it is no protection against an adversary.

All functions take and give uint64 arrays and use integer arithmetic only: the same numbers on every machine
and numpy version.
"""

from __future__ import annotations

import hashlib

import numpy as np

NUM_ROUNDS = 6

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive_key(text: str) -> np.ndarray:
    """Derive a 64-bit key, uint64 `[1]`, from any text."""
    return np.array([int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")], np.uint64)


def mix(values: np.ndarray) -> np.ndarray:
    """Hash each uint64 bijectively: neighbouring inputs give unrelated outputs."""
    mixed: np.ndarray = values ^ (values >> np.uint64(30))
    mixed *= _MIX_1  # in place: new memory for each step takes longer than the arithmetic
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derive_subkeys(key: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Derive an independent key for each index, uint64, broadcast."""
    counted = indices + np.uint64(1)
    counted *= _GOLDEN_GAMMA
    return mix(key + counted)


def permute(elements: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Send `elements[i]` through the permutation of `range(sizes[i])` under `keys[i]`; uint64 `[k]` each."""
    side = np.floor(np.sqrt((sizes - np.uint64(1)).astype(np.float64))).astype(np.uint64) + np.uint64(1)
    other_side = (sizes + side - np.uint64(1)) // side
    result = _apply_network(elements, side, other_side, keys)
    walking = np.flatnonzero(result >= sizes)
    while walking.size:
        result[walking] = _apply_network(result[walking], side[walking], other_side[walking], keys[walking])
        walking = walking[result[walking] >= sizes[walking]]
    return result


def shuffle(size: int, key: np.ndarray) -> np.ndarray:
    """Make a keyed permutation of `range(size)` as a table, int64: indices sorted by their hash.

    No two hashes are equal, so that every way of sorting gives the same table.
    """
    return np.argsort(derive_subkeys(key, np.arange(size, dtype=np.uint64)))


def shuffle_groups(groups: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Make a table of the indices of `groups`, int64 `[k]` each, by group, each group's in keyed random order.

    The upper bits sort by group, then a hash does; the lowest are the index, so that no two keys are equal.
    """
    indices = np.arange(len(groups), dtype=np.uint64)
    index_bits, lower_bits = (len(groups) - 1).bit_length(), 64 - int(groups.max()).bit_length()
    keys = derive_subkeys(key, indices)
    keys &= np.uint64((1 << lower_bits) - (1 << index_bits))
    keys |= indices
    if lower_bits < 64:  # numpy leaves a shift by all bits open
        keys |= groups.astype(np.uint64) << np.uint64(lower_bits)
    return np.argsort(keys)


def _apply_network(elements: np.ndarray, side: np.ndarray, other_side: np.ndarray, keys: np.ndarray) -> np.ndarray:
    right = elements // side
    left = elements - right * side
    for round_index in range(0, NUM_ROUNDS, 2):
        left = (left + _round(right, keys, round_index) % side) % side
        right = (right + _round(left, keys, round_index + 1) % other_side) % other_side
    result: np.ndarray = right * side + left
    return result


def _round(half: np.ndarray, keys: np.ndarray, round_index: int) -> np.ndarray:
    constant = np.uint64((round_index + 1) * int(_GOLDEN_GAMMA) % 2**64)
    return mix(half * _MIX_2 + keys + constant)
