"""The layouts of `transformers` in which mixtures of experts are exported, and what each of them can hold.

A choice that none of them holds is refused when the model is built, not when it is exported. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from kftrain.errors import ConfigError
from kftrain.models import sizes

Layout = Literal["mixtral", "qwen3_moe", "dots1"]

MULTIPLE = 8
"""Widths of experts are multiples of it: grouped products take rows of 16 bytes, which are 8 numbers in bf16."""


def of_mixture_of_experts(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    num_experts: int,
    experts_per_token: int,
    expert_dim: int,
    num_shared_experts: int,
    first_dense_layers: int,
    scores: Literal["softmax", "sigmoid"],
    renormalize: bool,
    num_groups: int,
    groups_per_token: int,
    scaling_factor: float,
    balance_rate: float,
    qk_norm: bool,
) -> Layout:
    """Return the layout of the export. Raises ConfigError for sizes that do not fit, or a choice that none holds."""
    sizes.of_transformer(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for name, width in (("dim", dim), ("expert_dim", expert_dim)):
        if width % MULTIPLE:
            below, above = width // MULTIPLE * MULTIPLE, -(-width // MULTIPLE) * MULTIPLE
            numbers = " or ".join(str(number) for number in (below, above) if number)
            raise _refuse(name, f"experts need a width that is a multiple of {MULTIPLE}", width, f"use {numbers}")
    if first_dense_layers >= num_layers:
        raise _refuse("first_dense_layers", "leaves no layer with experts", first_dense_layers, "use fewer")
    if num_groups > 1:
        _require_groups(num_experts, num_groups, groups_per_token)
    reachable = num_experts // num_groups * groups_per_token
    if experts_per_token > reachable:
        raise _refuse("experts_per_token", f"a token reaches {reachable} experts", experts_per_token, "use fewer")
    if scores == "sigmoid":
        return _require_dots1(qk_norm, num_shared_experts, num_experts)
    only_dots1 = {
        "num_shared_experts": num_shared_experts > 0,
        "num_groups": num_groups > 1,
        "scaling_factor": scaling_factor != 1.0,
        "balance_rate": balance_rate != 0.0,
    }
    for name, is_set in only_dots1.items():
        if is_set:
            raise _refuse(name, "no layout of transformers has it with scores by softmax", None, "use scores: sigmoid")
    if qk_norm:
        return "qwen3_moe"
    if not renormalize or first_dense_layers:
        name = "first_dense_layers" if renormalize else "renormalize"
        raise _refuse(name, "Mixtral, the layout without qk_norm, has no such choice", None, "set qk_norm: true")
    return "mixtral"


def _require_groups(num_experts: int, num_groups: int, groups_per_token: int) -> None:
    """Raises ConfigError for groups that have fewer than two experts each, or of which a token reaches too many."""
    if num_experts % num_groups or num_experts // num_groups < 2:
        fix = "use a divisor, so that each group has two experts or more"
        raise _refuse("num_groups", f"{num_experts} experts have no such groups", num_groups, fix)
    if groups_per_token > num_groups:
        raise _refuse("groups_per_token", f"there are {num_groups} groups", groups_per_token, "use fewer")


def _require_dots1(qk_norm: bool, num_shared_experts: int, num_experts: int) -> Layout:
    """Raises ConfigError for what the layout of Dots1 cannot leave out."""
    because = "Dots1, the layout for scores by sigmoid, always has it"
    if not qk_norm:
        raise _refuse("qk_norm", because, False, "set it to true, or use scores: softmax")
    if num_shared_experts < 1:
        raise _refuse("num_shared_experts", because, 0, "use 1 or more, or use scores: softmax")
    if num_experts < 2:
        raise _refuse("num_experts", "Dots1 chooses groups by their best two experts", num_experts, "use 2 or more")
    return "dots1"


def _refuse(option: str, what: str, value: object, fix: str) -> ConfigError:
    return ConfigError(what, where=f"model.{option}", value=value, fix=fix)
