"""The optimizer of a training: one or two of torch's kind, over groups of parameters that patterns of names choose."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.expert import read_expert_plan
from kftrain.parallel.sharded import ALONE, Team
from kftrain.train.eight_bit import AdamW8bit
from kftrain.train.optimizer_kinds import MATCHING, Adafactor, AdamW, Group, Lamb, Muon, Sgd, SkippingOptimizer
from kftrain.train.rounding import RoundedAdamW
from kftrain.train.settings import OptimizerConfig, ParameterGroup

NUM_SHOWN = 3
"""Number of names of parameters that an error about a pattern proposes."""

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that wrappers put into the names of a model's parameters."""

OTHERS = ParameterGroup(pattern="*")
"""The group of the parameters that no pattern fits."""


def list_parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter once, in the model's order, with all its names: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        names.setdefault(parameter, []).append(name)
    return names


def assign_groups(
    model: nn.Module, groups: Sequence[ParameterGroup], is_part: bool = False
) -> dict[nn.Parameter, ParameterGroup]:
    """Give each parameter its group: the first whose pattern fits any of the parameter's names, or `OTHERS`.

    Raises ConfigError for a pattern that fits no name, unless the model `is_part` of one: a stage has not all names.
    """
    names = list_parameter_names(model)
    all_names = [name for several in names.values() for name in several]
    for number, group in enumerate(groups):
        if not is_part and not any(fnmatchcase(name, group.pattern) for name in all_names):
            near = difflib.get_close_matches(group.pattern, all_names, n=NUM_SHOWN, cutoff=0.0)
            raise ConfigError(
                "the pattern fits no parameter of the model",
                where=f"optimizer.groups.{number}.pattern",
                value=group.pattern,
                fix=f"names are like {', '.join(near)}",
            )
    return {parameter: _find_first_group(several, groups) for parameter, several in names.items()}


def _find_first_group(names: Sequence[str], groups: Sequence[ParameterGroup]) -> ParameterGroup:
    fitting = (group for group in groups if any(fnmatchcase(name, group.pattern) for name in names))
    return next(fitting, OTHERS)


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Let the parameters that the configuration freezes have no gradient; call it before the model is distributed.

    Raises ConfigError where nothing is left to train, and for a pattern that fits no name.
    """
    for parameter, group in assign_groups(model, groups).items():
        if group.frozen:
            parameter.requires_grad_(False)
    if any(group.frozen for group in groups) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("all parameters are frozen: nothing is trained", where="optimizer.groups")


class Optimizer:
    """Optimizers of torch's kind as one, each with parameters of its own."""

    def __init__(self, members: Mapping[SkippingOptimizer, list[float]]) -> None:
        """Join `members`: each with the learning rates of its groups as multiples of the training's."""
        self.members = list(members)
        self._scales = list(members.values())
        groups = [group for member in self.members for group in member.param_groups]
        self._parameters = [parameter for group in groups for parameter in group["params"]]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps that follow."""
        for member, scales in zip(self.members, self._scales, strict=True):
            for group, scale in zip(member.param_groups, scales, strict=True):
                group["lr"] = rate * scale

    def step(self, found_inf: torch.Tensor, position: int = 0) -> None:
        """Update the parameters and forget the gradients; only the latter where `found_inf` is 1. Collective.

        `position`: the number of samples before this step.
        """
        with torch.no_grad():  # once for all of them, and without torch's wrapper: both take time in a small step
            for member in self.members:
                member.found_inf, member.position = found_inf, position
                member.advance()
        for parameter in self._parameters:  # None, not 0: what the next step does not use is then left alone
            parameter.grad = None


def seed_rounding(optimizer: Optimizer, model: nn.Module, seed: int) -> None:
    """Tell the members that round by chance the seed of the run, and the names of the model's parameters."""
    for member in optimizer.members:
        if isinstance(member, RoundedAdamW):
            member.seed = seed
            member.names = {parameter: names[0] for parameter, names in list_parameter_names(model).items()}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    blocks: Collection[str] = (),
    compute: torch.dtype = torch.float32,
    replicas: Team = ALONE,
    is_part: bool = False,
) -> Optimizer:
    """Build the optimizer of the model's parameters that are trained.

    Weight decay is on tensors of two and more dims only, where a group of the configuration does not say otherwise.
    `blocks`: names of the modules whose matrices are Muon's; `compute`: the format of the computation;
    `replicas`: the processes that have the same of what is not spread. `is_part`: this process has a stage of a model.
    Raises ConfigError.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError("sparse gradients are not trained with", where=f"model {name}", fix="leave sparse out")
    assigned = assign_groups(model, config.groups, is_part)
    groups = {weight: group for weight, group in assigned.items() if weight.requires_grad}
    if not groups:  # a stage whose parameters are all frozen
        return Optimizer({})
    if config.kind != "muon":
        return Optimizer(dict([_build_member(config.kind, groups, config, compute, replicas)]))
    if not is_part:
        require_matrices(model, config, blocks)
    chosen = _choose_for_muon(model, groups, blocks)
    others = {weight: group for weight, group in groups.items() if weight not in chosen}
    kinds = {"muon": chosen, "adamw": others}
    return Optimizer(dict(_build_member(kind, of, config, compute, replicas) for kind, of in kinds.items() if of))


def require_matrices(model: nn.Module, config: OptimizerConfig, blocks: Collection[str]) -> None:
    """Raises ConfigError where Muon is to update a model without matrices within its blocks."""
    if config.kind == "muon" and not _choose_for_muon(model, assign_groups(model, config.groups), blocks):
        raise ConfigError(
            "the model has no matrices within blocks, which Muon could update",
            where="optimizer.kind",
            value="muon",
            fix="name blocks in a method blocks() of the model, or set muon in optimizer.groups",
        )


def _choose_for_muon(
    model: nn.Module, groups: Mapping[nn.Parameter, ParameterGroup], blocks: Collection[str]
) -> dict[nn.Parameter, ParameterGroup]:
    """Choose the matrices between layers: embeddings, the head and vectors are AdamW's, as in Jordan et al."""
    hidden, stacks = _list_hidden(model, blocks), _list_stacks(model)
    return {
        weight: group
        for weight, group in groups.items()
        if weight.requires_grad
        and (weight.dim() == 2 or weight in stacks)
        and (weight in hidden if group.muon is None else group.muon)
    }


def _list_hidden(model: nn.Module, blocks: Collection[str]) -> set[nn.Parameter]:
    """Return the parameters of blocks, but for embeddings."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    begins = tuple(f"{name}." for name in blocks)
    return {
        weight
        for weight, names in list_parameter_names(model).items()
        if weight not in embeddings and any(name.startswith(begins) for name in names)
    }


def _list_stacks(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that hold the matrices of experts, one after the other."""
    patterns, names_of = read_expert_plan(model), list_parameter_names(model)
    return {
        weight
        for weight, names in names_of.items()
        if weight.dim() == 3
        and any(fnmatchcase(name.rpartition(".")[0], pattern) for name in names for pattern in patterns)
    }


def _build_member(
    kind: str, of: Mapping[nn.Parameter, ParameterGroup], config: OptimizerConfig, compute: torch.dtype, replicas: Team
) -> tuple[SkippingOptimizer, list[float]]:
    """Build an optimizer of these parameters; return it with the multiples of the learning rate of its groups."""
    groups: list[Group] = []
    scales: list[float] = []
    # In the order of the configuration, and within a group in that of the model: all processes build the same groups.
    for group in [*config.groups, OTHERS]:
        parameters = [parameter for parameter, own in of.items() if own is group]
        for decay, members in _split_by_decay(parameters, group, config):
            if members:
                groups.append({"params": members, "weight_decay": decay, "lr": config.learning_rate})
                scales.append(group.learning_rate_scale)
    return _build_kind(kind, groups, config, compute, replicas), scales


def _split_by_decay(
    parameters: list[nn.Parameter], group: ParameterGroup, config: OptimizerConfig
) -> Iterable[tuple[float, list[nn.Parameter]]]:
    if group.weight_decay is not None:
        return [(group.weight_decay, parameters)]
    return [
        (config.weight_decay, [parameter for parameter in parameters if parameter.dim() >= 2]),
        (0.0, [parameter for parameter in parameters if parameter.dim() < 2]),
    ]


def _build_kind(
    kind: str, groups: list[Group], config: OptimizerConfig, compute: torch.dtype, replicas: Team
) -> SkippingOptimizer:
    rate = config.learning_rate
    if kind == "sgd":
        return Sgd(groups, rate, 0.9 if config.momentum is None else config.momentum, bool(config.nesterov))
    if kind == "muon":
        momentum = 0.95 if config.momentum is None else config.momentum
        scale = config.muon_scale or MATCHING
        return Muon(groups, rate, momentum, config.nesterov is not False, scale, compute, replicas)
    if kind == "adafactor":
        return Adafactor(groups, rate)
    is_narrow = any(parameter.dtype == torch.bfloat16 for group in groups for parameter in group["params"])
    adamw = RoundedAdamW if is_narrow else AdamW8bit if config.state == "8bit" else AdamW
    chosen = Lamb if kind == "lamb" else adamw
    return chosen(groups, rate, (config.beta1, config.beta2), config.epsilon)
