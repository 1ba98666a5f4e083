"""Rows out of several memories: the oracle slices each of them with Python's own slices."""

import ctypes
import mmap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.shards.gather import RowPlaces, choose_pieces, copy_strings, find_address

MEMORIES = [np.random.default_rng(seed).bytes(size) for seed, size in ((1, 30_000), (2, 17_001), (3, 70_000))]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=40), st.sampled_from([1, 7, 4096, 8192, 12_288])
)
def test_strings_of_several_memories_are_copied_whatever_their_order(chosen, num_bytes):
    places = [(memory, int(share * (len(MEMORIES[memory]) - num_bytes))) for memory, share in chosen]
    addresses = np.array([find_address(MEMORIES[memory]) + start for memory, start in places], np.int64)
    copied = copy_strings(addresses, num_bytes)
    assert copied.dtype == f"V{num_bytes}"
    assert [bytes(string) for string in copied] == [
        MEMORIES[memory][start : start + num_bytes] for memory, start in places
    ]


@pytest.mark.parametrize(("num_bytes", "near"), [(200_003, 1 << 42), (1 << 20, 1 << 43)])
def test_strings_of_memories_that_lie_far_apart_are_copied(num_bytes, near):
    low, high = _map_near(near, 2 * num_bytes), _map_near(near + (1 << 46), 2 * num_bytes)
    assert high - low >= 1 << 44
    contents = [MEMORIES[number % 3][:17_001] * (num_bytes // 17_001 + 1) for number in range(4)]
    addresses = np.array([low, high, low + num_bytes, high + num_bytes], np.int64)
    for address, content in zip(addresses.tolist(), contents, strict=True):
        ctypes.memmove(address, content, num_bytes)
    copied = copy_strings(addresses, num_bytes)
    assert [bytes(string) for string in copied] == [content[:num_bytes] for content in contents]


def _map_near(address, num_bytes):
    """Memory at an address that the kernel is asked for, as it is by others for a heap and for files."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return library.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


@given(st.integers(1, 2000), st.integers(1, 1 << 20))
def test_pieces_are_equal_and_only_as_many_as_release_the_lock(num_strings, num_bytes):
    pieces = choose_pieces(num_strings, num_bytes)
    assert num_bytes % pieces == 0 and (pieces == 1 or num_strings * pieces // 2 < 512)
    assert pieces == 1 or num_bytes >= 4096


def test_rows_of_two_fields_lie_where_they_were_chosen_and_their_memory_lives_until_then():
    places = RowPlaces({"number": np.dtype("<i8"), "file": np.dtype(object)}, 4)
    for number in range(4):
        content = np.full(1 << 16, number, np.int64)  # nobody else keeps it
        places.put(np.array([3 - number]), "number", np.array([find_address(content)]), content)
        file = np.empty(1, object)
        file[0] = f"file {number}".encode()
        places.put(np.array([3 - number]), "file", file, None)
    del content
    copied = places.copy()
    assert copied["number"].tolist() == [3, 2, 1, 0]
    assert copied["file"].tolist() == [b"file 3", b"file 2", b"file 1", b"file 0"]


@pytest.mark.timeout(120)
def test_other_threads_run_while_few_long_strings_are_copied():
    memory = np.zeros(64 << 20, np.uint8)
    addresses = np.full(8, find_address(memory), np.int64)
    counted, done = 0, threading.Event()

    def copy():
        copy_strings(addresses, len(memory))
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    assert counted > 10, "half a GiB takes a hundred milliseconds"
