"""What a described model may become: not larger than the tensors that lie beside its description.

Whoever writes a description can name any sizes. A parameter is refused when it is made, before it is filled: memory
that nobody has written to takes no room.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kftrain.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

ENTRY_BYTES = 16
"""Counted for each parameter beside its numbers. Its entry in a file's header has more than three times as many."""


@contextlib.contextmanager
def limited_to(num_bytes: int, where: str) -> Iterator[None]:
    """Within the block this thread makes no more parameters than files of so many bytes hold. Raises CheckpointError.

    A number counts as one byte, so that a model of which the files hold two or more may also make a parameter and
    replace it.

    Args:
        num_bytes: Size of the files of tensors.
        where: The description, for the error.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    thread, left = threading.get_ident(), num_bytes
    seen: dict[int, weakref.ref[nn.Parameter]] = {}

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        known = seen.get(id(parameter))
        if parameter is None or threading.get_ident() != thread or (known is not None and known() is parameter):
            return
        seen[id(parameter)] = weakref.ref(parameter)
        left -= parameter.numel() + ENTRY_BYTES
        if left < 0:
            raise CheckpointError("the model that it describes is larger than its tensors", where=where)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
