"""A model whose parameters have no memory, from a constructor that may need some meanwhile."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable

from torch import nn

from kftrain.core.progress import to_log
from kftrain.errors import UserCodeError
from kftrain.parallel import initialize


def built_empty(construct: Callable[[], nn.Module], says_so: bool = False) -> nn.Module:
    """The model without memory for its parameters. Where its constructor needs their values it has them meanwhile.

    `says_so`: that is told.
    """
    said = io.StringIO()
    try:
        with initialize.without_memory(), contextlib.redirect_stderr(said):
            model = construct()
    except UserCodeError:
        model = construct()
        if says_so:
            to_log("the model's constructor reads its weights: each process holds all of them while it builds it")
        initialize.empty_parameters(initialize.places_of(model))
        return model
    sys.stderr.write(said.getvalue())
    return model
