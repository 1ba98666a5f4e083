"""Decoder whose feed-forward parts are experts, of which each token reaches a few: a mixture of experts.

Names, shapes and mathematics are those of `transformers`: of Qwen3Moe or Mixtral where scores are a softmax, of Dots1
where they are sigmoids, with groups, shared experts and biases (DeepSeek-V3, arXiv:2412.19437). The experts of a layer
are stacked in two tensors, `[experts, out, in]`, as `transformers` keeps them; their products are grouped, one after
the other.

What is counted follows from each row by itself: the choices of its tokens, the auxiliary loss, the tokens that a full
expert drops. So neither the layout nor micro batches change it. Blocks return the counts, and the pieces around them,
which are never recomputed, add them up; a step's sum over all processes moves the biases.

Shapes are written as in `transformer`, with N tokens of all rows, X experts, and C experts per token.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from pydantic import Field
from torch import Tensor, nn

from kftrain.errors import ConfigError
from kftrain.models.base import ModelPiece, draw_weights
from kftrain.models.expert_layouts import of_mixture_of_experts
from kftrain.models.output import ModelOutput
from kftrain.models.transformer import (
    Attention,
    FeedForward,
    RotaryTables,
    Transformer,
    TransformerBlock,
    TransformerInputs,
)
from kftrain.settings.section import Amount, Count

Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Numbers that a block with experts returns beside its output, for each of its rows."""

    choices: Tensor
    """`[B, X]` int64: how often the tokens of each row have chosen each expert."""
    num_dropped: Tensor
    """`[B]` int64: choices of each row that a full expert has not computed."""
    auxiliary: Tensor
    """`[B]` fp32: loss of each row for unequal loads."""


class MixtureOfExperts(Transformer):
    """Decoder that turns tokens `[B, T]` int64 into logits `[B, T, vocab_size]`, by some of its experts each.

    Args:
        vocab_size, sequence_length, document_token, attention, dim, num_layers, num_heads, num_kv_heads, rope_theta,
            norm_eps, tie_embeddings: As those of `Transformer`.
        ffn_dim: Inner width of the first dense layers; 0: 8/3 of `dim`, rounded up to a multiple of 64.
        num_experts: Experts of a layer.
        experts_per_token: Experts that each token reaches.
        expert_dim: Inner width of an expert, a multiple of 8, as is `dim`.
        num_shared_experts: Experts that every token reaches, as one of their joint width.
        first_dense_layers: Layers at the beginning that have one feed-forward part instead of experts.
        scores: Scores of the experts: a `softmax` over them, or a `sigmoid` of each.
        renormalize: Divide the weights of a token's experts by their sum.
        num_groups: Groups of experts; a token chooses among the groups first, by the sum of the best two scores.
        groups_per_token: Groups that each token reaches.
        scaling_factor: Factor of the weights.
        balance_rate: Change of an expert's bias after each step, towards equal loads (Wang et al. 2024,
            arXiv:2408.15664). The bias takes part in the choice only.
        balance_loss: Factor of the auxiliary loss for unequal loads within each row, summed over layers.
        capacity_factor: Limit of an expert's load within a row, in even shares; in training the choices above it, the
            last ones of the row, are dropped. 0: no limit.
        qk_norm: Norm queries and keys of each head.

    Raises ConfigError for sizes that do not fit, and for a choice that no layout of `transformers` holds.
    """

    expert_choices: Tensor
    num_dropped: Tensor
    buffer_reductions = {"expert_choices": "places", "num_dropped": "places"}  # noqa: RUF012 - as the protocol has it

    tensor_plan = None  # type: ignore[assignment]  # no plan splits the matrices of experts

    def __init__(
        self,
        *,
        vocab_size: Count,
        sequence_length: Count = 2048,
        document_token: Amount | None = None,
        attention: Literal["rows", "documents"] = "rows",
        dim: Count = 192,
        num_layers: Count = 4,
        num_heads: Count = 6,
        num_kv_heads: Amount = 0,
        ffn_dim: Amount = 0,
        rope_theta: Positive = 10_000.0,
        norm_eps: Positive = 1e-5,
        tie_embeddings: bool = False,
        num_experts: Count = 8,
        experts_per_token: Count = 2,
        expert_dim: Count = 128,
        num_shared_experts: Amount = 0,
        first_dense_layers: Amount = 0,
        scores: Scores = "softmax",
        renormalize: bool = True,
        num_groups: Count = 1,
        groups_per_token: Count = 1,
        scaling_factor: Positive = 1.0,
        balance_rate: NonNegative = 0.0,
        balance_loss: NonNegative = 0.0,
        capacity_factor: NonNegative = 0.0,
        qk_norm: bool = True,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**{**_choose_parameters(Transformer, options), "num_layers": 0})
        self.layout = of_mixture_of_experts(**_choose_parameters(of_mixture_of_experts, options))
        self.num_dense = first_dense_layers
        self.balance_rate = balance_rate
        self.balance_loss = balance_loss
        self.has_capacity = capacity_factor > 0
        sizes, groups = (dim, self.num_heads, self.num_kv_heads), (num_groups, groups_per_token)
        for _ in range(first_dense_layers):
            self.model.layers.append(TransformerBlock(*sizes, self.ffn_dim, norm_eps, qk_norm))
        for _ in range(num_layers - first_dense_layers):
            router = Router(dim, num_experts, experts_per_token, scores, renormalize, scaling_factor, *groups)
            shared = FeedForward(dim, expert_dim * num_shared_experts) if num_shared_experts else None
            sparse = SparseFeedForward(router, Experts(num_experts, dim, expert_dim), shared, capacity_factor)
            self.model.layers.append(SparseBlock(Attention(*sizes, norm_eps if qk_norm else None), sparse, norm_eps))
        self._begin_counting(num_layers - first_dense_layers, num_experts)
        draw_weights(self)

    def _begin_counting(self, num_layers: int, num_experts: int) -> None:
        # Not persistent: both begin anew with each step, and an export of them would be strange to other programs.
        counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.register_buffer("expert_choices", counts, persistent=False)
        self.register_buffer("num_dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.last_choices = torch.zeros_like(counts)
        """Choices of the last step over all processes, `[layers, X]`."""
        self.last_dropped = torch.zeros((), dtype=torch.int64)
        """Number of those that were dropped."""
        self._row_weights: Tensor | None = None

    def forward(self, tokens: Tensor) -> Any:
        """Compute logits `[B, T, vocab_size]`; in training a ModelOutput where there is an auxiliary loss."""
        output = super().forward(tokens)
        self._row_weights = None  # they are of this pass only
        return output

    def stages(self) -> list[ModelPiece]:
        """Return the pieces of `Transformer`; between them an auxiliary loss travels beside the hidden state."""
        first, *blocks, last = super().stages()
        pairs = zip(blocks[self.num_dense :], self._sparse_blocks(), strict=True)
        sparse = [replace(piece, num_idle=block.mlp.num_idle) for piece, block in pairs]
        last = ModelPiece(functools.partial(self._run_last, last), last.modules)
        return [first, *blocks[: self.num_dense], *sparse, last]

    def _run_piece(self, block: nn.Module, passed: Any, inputs: TransformerInputs) -> Any:
        """Run one block, and count what it tells of its experts: here, since a block may be recomputed."""
        hidden, *auxiliary = passed if isinstance(passed, tuple) else (passed,)
        answer = block(hidden, inputs.rotary(hidden), *inputs.starts)
        if isinstance(answer, Tensor):
            return answer
        hidden, routing = answer
        if not self.training:
            return hidden
        self._count(list(self.model.layers).index(block) - self.num_dense, routing)
        return (hidden, sum(auxiliary, routing.auxiliary)) if self.balance_loss else hidden

    def _run_last(self, head: ModelPiece, passed: Any, inputs: TransformerInputs) -> Any:
        if not isinstance(passed, tuple):
            return head.call(passed, inputs)
        hidden, auxiliary = passed
        return ModelOutput(head.call(hidden, inputs), self.balance_loss * auxiliary)

    def take_row_weights(self, weights: Tensor) -> None:
        """Take the weights of the rows that are computed next, `[B]`: those of weight 0 are not counted."""
        self._row_weights = weights

    @torch.no_grad()
    def _count(self, layer: int, routing: Routing) -> None:
        choices, dropped, weights = routing.choices, routing.num_dropped, self._row_weights
        if weights is not None:
            choices, dropped = choices * (weights > 0)[:, None], dropped * (weights > 0)
        self.expert_choices[layer] += choices.sum(0)
        self.num_dropped += dropped.sum()

    def after_step(self) -> None:
        """Move the biases by what all processes have counted in the step, and begin to count anew."""
        # A step that the optimizer skips has no such call: it counts with the next one.
        self.last_choices, self.last_dropped = self.expert_choices.clone(), self.num_dropped.clone()
        if self.balance_rate:
            for counts, block in zip(self.expert_choices.double(), self._sparse_blocks(), strict=True):
                # By the sign alone, so that a few tokens more or less do not matter (arXiv:2408.15664, algorithm 1).
                block.mlp.gate.bias.add_(self.balance_rate * torch.sign(counts.mean() - counts))
        self.expert_choices.zero_()
        self.num_dropped.zero_()

    def step_metrics(self) -> dict[str, float]:
        """Return the loads of the last step, 1 where it is even: of each expert over all layers, and the largest."""
        choices = self.last_choices.double()
        num_choices = choices.sum().clamp(min=1)
        loads = (choices.sum(0) * choices.shape[1] / num_choices).tolist()
        largest = (choices / choices.mean(1, keepdim=True).clamp(min=1e-9)).max()
        return {
            "experts/largest_load": float(largest),
            "experts/dropped_share": float(self.last_dropped / num_choices),
            **{f"experts/load_{number}": load for number, load in enumerate(loads)},
        }

    def _sparse_blocks(self) -> list[Any]:
        return list(self.model.layers)[self.num_dense :]

    def init_weights(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialise one parameter in place, as `Transformer` does; the stacks of experts have no `.weight`."""
        super().init_weights(name + ".weight" if parameter.dim() == 3 else name, parameter, generator)

    def expert_plan(self) -> list[str]:
        """Name the modules whose parameters hold one expert after the other: see `parallel/expert.py`."""
        return ["model.layers.*.mlp.experts"]

    def context_plan(self) -> dict[str, str]:
        """Map modules as `Transformer` does. Raises ConfigError for a capacity, which is of whole rows."""
        if self.has_capacity:
            fix = "set it to 0, or parallel.context to 1"
            raise ConfigError("an expert's limit is of whole rows", where="model.capacity_factor", fix=fix)
        return super().context_plan()

    def num_flops(self, num_rows: int) -> int:
        """Count the floating-point operations as `Transformer` does, of the experts that a token reaches only."""
        num_idle = sum(block.mlp.num_idle for block in self._sparse_blocks())
        num_flops: int = super().num_flops(num_rows) - 6 * num_idle * num_rows * self.sequence_length
        return num_flops

    def export_config(self) -> dict[str, Any]:
        """Return the `config.json` with which `transformers` (5 or newer) builds the same network."""
        sparse = self._sparse_blocks()[0].mlp
        gate, num_layers = sparse.gate, len(self.model.layers)
        expert_dim = sparse.experts.down_proj.shape[2]
        common = super().export_config() | {
            "model_type": self.layout,
            "num_experts_per_tok": gate.experts_per_token,
            "norm_topk_prob": gate.renormalize,
            "moe_intermediate_size": expert_dim,
            "sliding_window": None,
            "output_router_logits": False,
            "router_aux_loss_coef": self.balance_loss,
        }
        if self.layout == "mixtral":
            own: dict[str, Any] = {"num_local_experts": gate.num_experts, "intermediate_size": expert_dim}
            return common | own | {"architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.0}
        if self.layout == "qwen3_moe":
            own = {"num_experts": gate.num_experts, "mlp_only_layers": list(range(self.num_dense))}
            return common | own | {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1}
        return common | {
            "architectures": ["Dots1ForCausalLM"],
            "n_routed_experts": gate.num_experts,
            "n_shared_experts": sparse.shared_experts.down_proj.in_features // expert_dim,
            "n_group": gate.num_groups,
            "topk_group": gate.groups_per_token,
            "first_k_dense_replace": self.num_dense,
            "routed_scaling_factor": gate.scaling_factor,
            "max_window_layers": num_layers,
        }


def _choose_parameters(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that a function takes."""
    return {name: options[name] for name in inspect.signature(function).parameters if name in options}


class SparseBlock(nn.Module):
    """Attention and experts, each added to the residual stream `[B, T, D]` behind its norm."""

    def __init__(self, attention: Attention, sparse: SparseFeedForward, norm_eps: float) -> None:
        super().__init__()
        dim = attention.o_proj.out_features
        self.input_layernorm = nn.RMSNorm(dim, eps=norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = sparse

    def forward(self, hidden: Tensor, rotary: RotaryTables, starts: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Map `[B, T, D]` to the same shape, with what was counted on the way."""
        attended: Tensor = hidden + self.self_attn(self.input_layernorm(hidden), rotary, starts)
        output, routing = self.mlp(self.post_attention_layernorm(attended))
        return attended + output, routing


class Router(nn.Module):
    """Chooses each token's experts, and their weights, in fp32 whatever the format of the rest."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        experts_per_token: int,
        scores: Scores,
        renormalize: bool,
        scaling_factor: float,
        num_groups: int,
        groups_per_token: int,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.is_softmax = scores == "softmax"
        self.renormalize = renormalize
        self.num_groups = num_groups
        self.groups_per_token = groups_per_token
        self.scaling_factor = scaling_factor
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        bias = None if self.is_softmax else torch.zeros(num_experts)
        self.register_buffer("e_score_correction_bias", bias)

    @property
    def bias(self) -> Tensor | None:
        """Biases of the choice, `[X]`, under the name that Dots1 has for them; None where scores are a softmax."""
        bias: Tensor | None = self._buffers["e_score_correction_bias"]
        return bias

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map `[N, D]` to chosen experts and their weights, both `[N, C]`, and all scores `[N, X]`."""
        # In fp32: a rounding of the products would choose other experts, and part the curves of two layouts.
        logits = F.linear(rows.float(), self.weight.float())
        scores = logits.softmax(-1) if self.is_softmax else logits.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        if self.num_groups > 1:
            ranked = self._mask_other_groups(ranked)
        choices = ranked.topk(self.experts_per_token, -1).indices
        weights = scores.gather(-1, choices)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as Dots1 has it; no sum is so small
        return choices, weights * self.scaling_factor, scores

    def _mask_other_groups(self, ranked: Tensor) -> Tensor:
        """Leave the scores of the groups whose best two have the largest sums; the others are minus infinity."""
        grouped = ranked.view(len(ranked), self.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(self.groups_per_token, -1).indices
        is_left = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        masked: Tensor = grouped.masked_fill(~is_left.unsqueeze(-1), -math.inf)
        return masked.flatten(1)


class Experts(nn.Module):
    """SwiGLU of each expert: `down(silu(gate(x)) * up(x))`, gate and up one below the other."""

    def __init__(self, num_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, expert_dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows `[n, D]` to the same shape: the first `counts[0]` of them by the first expert, and so on.

        `counts` `[X]` int64, whose sum is n.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class SparseFeedForward(nn.Module):
    """Router, experts, and the shared experts that every token reaches."""

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None, capacity_factor: float) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared
        num_of_each = sum(stack[0].numel() for stack in experts.parameters())
        self.num_idle = num_of_each * (router.num_experts - router.experts_per_token)
        """Numbers of the experts that a token does not reach."""
        self.capacity_factor = capacity_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routing]:
        """Map `[B, T, D]` to the same shape."""
        num_rows, num_tokens, dim = hidden.shape
        tokens = hidden.reshape(-1, dim)
        choices, weights, scores = self.gate(tokens)
        chosen = choices.view(num_rows, -1)
        counts = chosen.new_zeros(num_rows, scores.shape[1]).scatter_add_(1, chosen, torch.ones_like(chosen))
        capacity = self._find_capacity(chosen.shape[1])
        kept = counts if capacity is None else counts.clamp(max=capacity)
        dropped = (counts - kept).sum(1)
        experts = choices.flatten() if kept is counts else _mark_dropped(chosen, counts, kept)
        # Stable: within an expert tokens stay in their order, so that every layout adds them up alike.
        order = experts.argsort(stable=True)
        if kept is not counts:
            order = order[: int(kept.sum())]  # dropped ones come last
        computed = self.experts(tokens.index_select(0, order // choices.shape[1]), kept.sum(0))
        # 0 for a choice that was dropped. Copied, not added: each choice has a place of its own, and bmm sums them.
        results = computed.new_zeros(len(experts), dim).index_copy_(0, order, computed).view(*choices.shape, dim)
        output = torch.bmm(weights.to(hidden.dtype).unsqueeze(1), results).view_as(hidden)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden)
        return output, Routing(counts, dropped, measure_imbalance(scores.view(num_rows, num_tokens, -1), counts))

    def _find_capacity(self, num_choices: int) -> int | None:
        """Return the most choices of one row that an expert takes; None: all of them."""
        if not self.training or not self.capacity_factor:
            return None
        return math.ceil(self.capacity_factor * num_choices / self.gate.num_experts)


def _mark_dropped(chosen: Tensor, counts: Tensor, kept: Tensor) -> Tensor:
    """Return the expert of each choice, `[N * C]`; of a choice that is dropped a number above all of them.

    `chosen` `[B, T * C]`: experts; `counts`, `kept` `[B, X]`: how often they are chosen, and may be.
    """
    # A choice's place among those of its row and expert, in the order of the tokens, says whether it is kept.
    numbers = torch.arange(chosen.numel(), device=chosen.device)
    keys = (numbers[: len(counts)].unsqueeze(1) * counts.shape[1] + chosen).flatten()
    order = keys.argsort(stable=True)
    firsts = counts.flatten().cumsum(0) - counts.flatten()
    places = torch.empty_like(order).scatter_(0, order, numbers - firsts[keys[order]])
    return torch.where(places < kept.flatten()[keys], chosen.flatten(), counts.shape[1])


def measure_imbalance(scores: Tensor, counts: Tensor) -> Tensor:
    """Return a number for each row, `[B]`, 1 where loads are even (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20).

    `scores` `[B, T, X]`; `counts` `[B, X]`: choices.
    """
    shares = counts * (counts.shape[1] / counts.sum(1, keepdim=True))
    means = (scores / scores.sum(-1, keepdim=True)).mean(1)
    return (shares * means).sum(1)
