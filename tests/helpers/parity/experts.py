"""A mixture of experts for the table of parity: a bare network that runs its experts one by one in a Python loop.

Routing is discrete: where two scores are nearly equal a rounding decides, and the curves part. So the network asserts
in each forward that the last chosen score and the next one are well apart; a case has a seed for which they are.
"""

import contextlib
import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from helpers.parity import optimizers
from helpers.parity import rank as parity_rank
from helpers.parity.defects import patched
from helpers.parity.oracle import BASE, PADDING, VOCABULARY, Case, LlamaLayer, rotated, text_loss
from torch import nn

from kftrain.models.mixture_of_experts import MixtureOfExperts, Router
from kftrain.parallel import buffers, tensor_exchange
from kftrain.parallel.buffers import CombinedBuffers
from kftrain.parallel.expert import AllToAll

DIM, HEADS, EXPERTS, CHOSEN, WIDTH = 16, 4, 4, 2, 8

MARGIN = 1e-4
"""Least distance of the last chosen score from the next one."""

MODEL = (
    "{kind: mixture_of_experts, dim: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, expert_dim: 8, "
    "num_experts: 4, experts_per_token: 2}"
)

TEXT = BASE.replace("{kind: transformer, dim: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 24}", MODEL)


COUNTS, DROPPED = [], []
"""Of each step: how often the tokens of a layer have chosen each expert; choices that were dropped."""


class Mixture(nn.Module):
    """The network of `MODEL`, written again; its parameters have the names of `transformers`' models."""

    def __init__(self, layers=2, experts=EXPERTS, dense=0, tied=False, **choices):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, DIM)
        made = [NormedLayer(DIM, HEADS, 2, 64) for _ in range(dense)]
        made += [SparseLayer(experts, **choices) for _ in range(layers - dense)]
        self.model.layers = nn.ModuleList(made)
        self.model.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x) @ self.lm_head.weight.T

    @property
    def sparse(self):
        return [layer.mlp for layer in self.model.layers if isinstance(layer, SparseLayer)]

    def after_step(self):
        COUNTS.append([part.counts.long().tolist() for part in self.sparse])
        DROPPED.append(sum(part.dropped for part in self.sparse))
        for part in self.sparse:
            part.move_bias()


class NormedLayer(LlamaLayer):
    """With norms of queries and keys."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        for name in ("q_norm", "k_norm"):
            self.self_attn.add_module(name, nn.RMSNorm(DIM // HEADS, eps=1e-5))

    def attend(self, x):
        rows, length, dim = x.shape
        part, each = self.self_attn, dim // self.heads
        query = rotated(part.q_norm(part.q_proj(x).view(rows, length, self.heads, each)))
        key = rotated(part.k_norm(part.k_proj(x).view(rows, length, self.kv_heads, each)))
        value = part.v_proj(x).view(rows, length, self.kv_heads, each)
        key, value = (heads.repeat_interleave(self.heads // self.kv_heads, 2) for heads in (key, value))
        scores = torch.einsum("bihe,bjhe->bhij", query, key) / math.sqrt(each)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = torch.softmax(scores.masked_fill(later, -math.inf).float(), -1)
        return part.o_proj(torch.einsum("bhij,bjhe->bihe", shares, value).reshape(rows, length, dim))


class SparseLayer(NormedLayer):
    def __init__(self, experts, **choices):
        super().__init__(DIM, HEADS, 2, 1)
        self.mlp = Sparse(experts, **choices)

    def forward(self, x):
        x = x + self.attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Sparse(nn.Module):
    """One token after the other, and one of its experts after the other."""

    def __init__(self, experts, shared=0, sigmoid=False, groups=1, reached=1, scale=1.0, rate=0.0, capacity=0.0):
        super().__init__()
        self.gate = nn.Linear(DIM, experts, bias=False)
        if sigmoid:
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * WIDTH, DIM))
        self.experts.down_proj = nn.Parameter(torch.empty(experts, DIM, WIDTH))
        if shared:
            self.shared_experts = nn.Module()
            for name, sizes in (("gate", (DIM, WIDTH * shared)), ("up", (DIM, WIDTH * shared))):
                self.shared_experts.add_module(f"{name}_proj", nn.Linear(*sizes, bias=False))
            self.shared_experts.down_proj = nn.Linear(WIDTH * shared, DIM, bias=False)
        self.sigmoid = sigmoid
        self.groups = groups
        self.reached = reached
        self.scale = scale
        self.rate = rate
        self.capacity = capacity
        self.counts = torch.zeros(experts)
        self.dropped = 0

    def forward(self, x):
        logits = x @ self.gate.weight.T
        scores = torch.sigmoid(logits) if self.sigmoid else torch.softmax(logits, -1)
        output = torch.zeros_like(x)
        self.imbalance = []
        for row in range(len(x)):
            loads = torch.zeros(len(self.counts))
            for token in range(x.shape[1]):
                chosen = self.choose(scores[row, token].detach())
                weights = scores[row, token, chosen]
                weights = self.scale * weights / weights.sum()
                for expert, weight in zip(chosen, weights, strict=True):
                    loads[expert] += 1
                    limit = math.ceil(self.capacity * x.shape[1] * CHOSEN / len(loads)) if self.capacity else math.inf
                    if loads[expert] > limit:
                        self.dropped += 1
                        continue
                    output[row, token] = output[row, token] + weight * self.compute(expert, x[row, token])
            self.counts += loads
            probabilities = (scores[row] / scores[row].sum(-1, keepdim=True)).mean(0)
            shares = loads * len(loads) / (CHOSEN * x.shape[1])
            self.imbalance.append((shares * probabilities).sum())
        if hasattr(self, "shared_experts"):
            part = self.shared_experts
            output = output + part.down_proj(F.silu(part.gate_proj(x)) * part.up_proj(x))
        return output

    def choose(self, scores):
        """The numbers of the experts of a token, by sorting."""
        ranked = scores + self.gate.e_score_correction_bias if self.sigmoid else scores
        experts, each = range(len(ranked)), len(ranked) // self.groups
        if self.groups > 1:
            sums = [
                float(ranked[group * each : (group + 1) * each].sort().values[-2:].sum())
                for group in range(self.groups)
            ]
            order = sorted(range(self.groups), key=lambda group: -sums[group])
            assert sums[order[self.reached - 1]] - sums[order[self.reached]] >= MARGIN, "another seed: groups"
            experts = [expert for expert in experts if expert // each in order[: self.reached]]
        order = sorted(experts, key=lambda expert: -float(ranked[expert]))
        if len(order) > CHOSEN:
            assert float(ranked[order[CHOSEN - 1]] - ranked[order[CHOSEN]]) >= MARGIN, "another seed: experts"
        return order[:CHOSEN]

    def compute(self, expert, x):
        gate, up = (self.experts.gate_up_proj[expert] @ x).chunk(2)
        return self.experts.down_proj[expert] @ (F.silu(gate) * up)

    def move_bias(self):
        if self.rate:
            for expert, count in enumerate(self.counts.tolist()):
                below = float(self.counts.mean()) - count
                self.gate.e_score_correction_bias[expert] += math.copysign(self.rate, below) if below else 0.0
        self.counts, self.dropped = torch.zeros_like(self.counts), 0


def balanced_loss(network, rows):
    """With 0.1 times the imbalance of each row's layers, for each of its terms."""
    loss = text_loss(network, rows)
    terms = torch.from_numpy((rows["tokens"][:, 1:] != PADDING).sum(1))
    return loss + 0.1 * sum((torch.stack(part.imbalance) * terms).sum() for part in network.sparse)


def dots1():
    return Mixture(3, 8, 1, sigmoid=True, groups=4, reached=2, scale=1.5, shared=2, rate=0.01)


def six():
    return Mixture(experts=6)


def crowded():
    return Mixture(capacity=0.75)


def same_mixture(**options):
    """kftrain's own: in bf16 every rounding counts."""
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "expert_dim": 8, "num_experts": 4}
    return MixtureOfExperts(vocab_size=VOCABULARY, **sizes, **options)


def same_balanced_mixture():
    return same_mixture(balance_loss=0.1)


def same_balanced_loss(network, rows):
    """With the model's own term for each row."""
    found = []

    def keep(tokens):
        found.append(network(tokens))
        return found[0].output

    loss = text_loss(keep, rows)
    return loss + (found[0].auxiliary * torch.from_numpy((rows["tokens"][:, 1:] != PADDING).sum(1))).sum()


class StackedMuon(optimizers.Muon):
    """Of a stack each matrix by itself."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for stack, mean in zip(group["params"], self.means, strict=True):
            mean.lerp_(stack.grad, 1 - self.momentum)
            update = torch.lerp(stack.grad, mean, self.momentum)
            stack *= 1 - 0.3 * group["lr"]
            for number in range(len(stack)):
                stack[number] -= group["lr"] * 0.2 * max(stack.shape[1:]) ** 0.5 * optimizers.orthogonal(update[number])


class Three(optimizers.Two):
    """Muon for the matrices of the layers and for the stacks of experts, AdamW for the rest."""

    def __init__(self, network):
        super().__init__(network, adjust_lr_fn="match_rms_adamw")
        stacks = [each for each in network.parameters() if each.dim() == 3]
        adamw = self.members[1]
        adamw.param_groups[0]["params"] = [each for each in adamw.param_groups[0]["params"] if each.dim() == 2]
        self.members.append(StackedMuon(stacks, "match_rms_adamw"))
        self.param_groups = [group for member in self.members for group in member.param_groups]


def case(name, network=Mixture, *overrides, seed=3, **others):
    return Case(name, (*overrides, f"run.seed={seed}"), network, base=TEXT, **others)


DOTS1_OPTIONS = (
    "model.scores=sigmoid",
    "model.num_layers=3",
    "model.num_experts=8",
    "model.first_dense_layers=1",
    "model.ffn_dim=64",
    "model.num_groups=4",
    "model.groups_per_token=2",
    "model.scaling_factor=1.5",
    "model.num_shared_experts=2",
    "model.balance_rate=0.01",
)

MIXTURE = case("experts")
EIGHT = case(
    "batches of eight", dots1, *DOTS1_OPTIONS, "train.global_batch_size=8", seed=10, batch=8, loop_follows=True
)
MUON = case("experts, muon", Mixture, *optimizers.MUON.overrides, seed=11, optimizer=Three)
LAMB = case(
    "experts, lamb", Mixture, *optimizers.LAMB.overrides, seed=5, optimizer=optimizers.Lamb, rate=optimizers.LAMB.rate
)
ADAFACTOR = case("experts, adafactor", Mixture, *optimizers.ADAFACTOR.overrides, seed=5, optimizer=optimizers.adafactor)
SIX = case("six experts", six, "model.num_experts=6", seed=4)
SIX_MUON = case("six experts, muon", six, "model.num_experts=6", *optimizers.MUON.overrides, seed=9, optimizer=Three)
BF16 = case("experts, bf16", same_mixture, "precision.compute=bf16", seed=4, bf16=True)
BALANCED_BF16 = case(
    "auxiliary loss, bf16",
    same_balanced_mixture,
    *BF16.overrides[:1],
    "model.balance_loss=0.1",
    seed=4,
    bf16=True,
    loss=same_balanced_loss,
)
NUMBERED = case("numbered", Mixture, "model.kind=helpers.parity.experts:Numbered")
BIASED = case("biases, groups, shared experts", dots1, *DOTS1_OPTIONS)
BALANCED = case("auxiliary loss", Mixture, "model.balance_loss=0.1", seed=5, loss=balanced_loss)
CROWDED = case("capacity", crowded, "model.capacity_factor=0.75")
FIVE = case("batches of five", Mixture, "train.global_batch_size=5", batch=5)


class Numbered(MixtureOfExperts):
    """It names its modules by numbers."""

    def expert_plan(self):
        return [0]


# -- what the model counts ---------------------------------------------------------------------------------------------


def train_and_count(world, job):
    """What each process has counted in each step; the numbers of the first process at the end."""
    counts, dropped, models = [], [], []

    def note(model, move=MixtureOfExperts.after_step):
        move(model)
        models.append(model)
        counts.append(model.last_choices.tolist())
        dropped.append(int(model.last_dropped))

    with patched(MixtureOfExperts, "after_step", note):
        trained = parity_rank.train(world, job)
    skipped = len(counts) - 20  # the dry runs
    return trained, counts[skipped:], dropped[skipped:], models[-1].step_metrics()


# -- defects -----------------------------------------------------------------------------------------------------------


def gradients_of_rows_doubled():
    """Each expert gets twice the gradient of the rows that have come to it."""

    def exchange(dispatcher, rows, sent, received):
        send = dispatcher._send
        return tensor_exchange.exchange(
            rows, lambda own: send(own, sent, received), lambda gradient: 2 * send(gradient, received, sent)
        )

    return patched(AllToAll, "_exchange", exchange)


@contextlib.contextmanager
def biases_by_rank():
    """Each process moves its biases by its own counts, and nobody looks whether they are the same."""
    with (
        patched(CombinedBuffers, "combine", lambda *_: None),
        patched(buffers, "require_equal", lambda model, world: None),
    ):
        yield


def counted_where_it_is_recomputed():
    """Counts are added up within the blocks."""

    def forward(router, rows, compute=Router.forward):
        answer = compute(router, rows)
        router.seen = getattr(router, "seen", 0) + answer[0].flatten().bincount(minlength=router.num_experts)
        return answer

    def move(model, after_step=MixtureOfExperts.after_step):
        routers = [block.mlp.gate for block in model._sparse_blocks()]
        model.expert_choices.copy_(torch.stack([router.seen for router in routers]))
        for router in routers:
            router.seen = 0
        after_step(model)

    defect = contextlib.ExitStack()
    defect.enter_context(patched(Router, "forward", forward))
    defect.enter_context(patched(MixtureOfExperts, "after_step", move))
    return defect
