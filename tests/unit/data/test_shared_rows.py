"""Memory that is shared with data workers, as the kernel counts it."""

import gc
import os

from kftrain.data.shared_rows import SPARE_SLOTS, Slots, make_memory

NUM_ROWS, ROW = 4, 1 << 18


def test_the_memory_of_steps_that_are_ahead_no_more_goes_back_and_can_be_taken_again():
    descriptor = make_memory()
    slots, other = (Slots(descriptor, [("x", "<f4", [ROW])], NUM_ROWS) for _ in range(2))
    taken = [slots.take() for _ in range(12)]
    for number in range(12):
        other.view(number)["x"][:] = number + 1
    assert all((arrays["x"] == number + 1).all() for number, arrays in taken)
    step_bytes = 4 * NUM_ROWS * ROW
    assert os.fstat(descriptor).st_blocks * 512 >= 12 * step_bytes
    del taken
    gc.collect()
    assert os.fstat(descriptor).st_blocks * 512 < (SPARE_SLOTS + 0.5) * step_bytes
    for number, arrays in [slots.take() for _ in range(12)]:
        other.view(number)["x"][:] = number + 7
        assert (arrays["x"] == number + 7).all()
    assert slots.num_slots == 12
    os.close(descriptor)
