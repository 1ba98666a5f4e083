"""Bytes that autograd keeps between a forward and a backward pass: counted by allocation, not by what the process has.

A dispatch mode sees each tensor that an operation makes, and remembers its memory (its storage) as long as it lives.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the memory that operations within the block have made, and that is still there."""

    def __init__(self):
        super().__init__()
        self._bytes = {}
        """Number of a storage -> its bytes, while it lives."""
        self.peak = 0

    @property
    def live(self):
        return sum(self._bytes.values())

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        made = operation(*arguments, **(keywords or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((arguments, keywords)) if is_plain(leaf)}
        for leaf in tree_leaves(made):
            if is_plain(leaf) and leaf.untyped_storage()._cdata not in given:
                self._remember(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _remember(self, storage):
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes()
            weakref.finalize(storage, self._bytes.pop, key, None)


def is_plain(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.layout == torch.strided
