"""Optimizers and schedules for the table of parity: torch's own, over a network on one process."""

from typing import Any

import torch
from helpers.parity.oracle import STEPS, Case, warmup_cosine

BETAS, EPSILON = (0.8, 0.9), 1e-3


def by_dims(network, decay):
    """Matrices decay, vectors do not."""
    parameters = [each for each in network.parameters() if each.requires_grad]
    matrices, vectors = ([each for each in parameters if (each.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def sgd(network):
    return torch.optim.SGD(by_dims(network, 0.01), lr=1.0, momentum=0.9)


def nesterov(network):
    return torch.optim.SGD(by_dims(network, 0.01), lr=1.0, momentum=0.8, nesterov=True)


def plain_sgd(network):
    return torch.optim.SGD(by_dims(network, 0.01), lr=1.0)


def adafactor(network):
    return torch.optim.Adafactor(by_dims(network, 0.3), lr=1.0)


class Lamb(torch.optim.Optimizer):
    """The formula of the paper over whole parameters."""

    def __init__(self, network):
        super().__init__(by_dims(network, 0.3), {"lr": 1.0})
        self.steps = 0
        self.moments = {}

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                first, second = self.moments.get(each, (torch.zeros_like(each), torch.zeros_like(each)))
                first = BETAS[0] * first + (1 - BETAS[0]) * each.grad
                second = BETAS[1] * second + (1 - BETAS[1]) * each.grad**2
                self.moments[each] = first, second
                scale = (second / (1 - BETAS[1] ** self.steps)).sqrt() + EPSILON
                update = first / (1 - BETAS[0] ** self.steps) / scale + group["weight_decay"] * each
                norms = each.norm(), update.norm()
                each -= group["lr"] * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * update


class Muon:
    """By hand, since torch's own iterates in bf16; `test_optimizer_members.py` compares the two."""

    def __init__(self, matrices, adjust_lr_fn, momentum=0.95, nesterov=True):
        self.param_groups = [{"params": matrices}]
        self.scaled = adjust_lr_fn == "match_rms_adamw"
        self.momentum = momentum
        self.nesterov = nesterov
        self.means = [torch.zeros_like(each) for each in matrices]

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for matrix, mean in zip(group["params"], self.means, strict=True):
            mean *= self.momentum
            mean += (1 - self.momentum) * matrix.grad
            update = self.momentum * mean + (1 - self.momentum) * matrix.grad if self.nesterov else mean
            rows, columns = matrix.shape
            factor = 0.2 * max(rows, columns) ** 0.5 if self.scaled else max(1, rows / columns) ** 0.5
            matrix *= 1 - 0.3 * group["lr"]
            matrix -= group["lr"] * factor * orthogonal(update)

    def zero_grad(self):
        for matrix in self.param_groups[0]["params"]:
            matrix.grad = None


def orthogonal(matrix):
    """The quintic iteration, which acts on the singular values alone, so that it is theirs."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values @ right).float()


class Two:
    """Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(self, network, **options):
        hidden = [each for each in network.model.layers.parameters() if each.dim() == 2]
        rest = [each for each in network.parameters() if not any(each is one for one in hidden)]
        groups = [
            {"params": [each for each in rest if each.dim() > 1], "weight_decay": 0.3},
            {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPSILON)
        self.members: list[Any] = [Muon(hidden, **options), adamw]
        self.param_groups = [group for member in self.members for group in member.param_groups]

    def step(self):
        for member in self.members:
            member.step()

    def zero_grad(self):
        for member in self.members:
            member.zero_grad()


def muon(network):
    return Two(network, adjust_lr_fn="match_rms_adamw")


def original_muon(network):
    return Two(network, adjust_lr_fn="original", momentum=0.9, nesterov=False)


def grouped(network):
    """What `GROUPS` asks for; the embedding is frozen."""
    network.model.embed_tokens.weight.requires_grad_(False)
    norms, up, rest = [], [], []
    for name, each in network.named_parameters():
        chosen = norms if "layernorm" in name else up if ".up_proj" in name else rest
        if each.requires_grad:
            chosen.append(each)
    groups = [
        {"params": norms, "weight_decay": 0.2, "factor": 0.1},
        {"params": up, "weight_decay": 0.0, "factor": 2.0},
        {"params": [each for each in rest if each.dim() > 1], "weight_decay": 0.3},
        {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPSILON)


GROUPS = """optimizer.groups=[{pattern: '*layernorm.weight', weight_decay: 0.2, learning_rate_scale: 0.1},
  {pattern: '*.up_proj.*', weight_decay: 0, learning_rate_scale: 2}, {pattern: '*embed_tokens*', frozen: true}]"""


def inverse_sqrt(step):
    number = step + 1
    return 0.02 * min(number**-0.5, number * 4**-1.5) / 4**-0.5


def stable_then_down(step):
    """Four steps up, then constant, then a line over the last six to a fifth."""
    up = min(1.0, (step + 1) / 4)
    return 0.02 * min(up, 1.0 - 0.8 * max(0, step - (STEPS - 7)) / 6)


def chosen(kind, *more):
    return tuple(f"optimizer.{each}" for each in (f"kind={kind}", *more))


SGD = Case("sgd", chosen("sgd", "weight_decay=0.01"), optimizer=sgd)
NESTEROV = Case("nesterov", chosen("sgd", "weight_decay=0.01", "momentum=0.8", "nesterov=true"), optimizer=nesterov)
PLAIN_SGD = Case(
    "plain sgd",
    chosen("sgd", "weight_decay=0.01", "momentum=0", "schedule=wsd", "decay_steps=6"),
    optimizer=plain_sgd,
    rate=stable_then_down,
)
ADAFACTOR = Case("adafactor", chosen("adafactor"), optimizer=adafactor)
LAMB = Case("lamb", chosen("lamb", "learning_rate=0.005"), optimizer=Lamb, rate=lambda step: warmup_cosine(step) / 4)
MUON = Case("muon", chosen("muon"), optimizer=muon)
ORIGINAL_MUON = Case(
    "original muon",
    chosen("muon", "muon_scale=original", "momentum=0.9", "nesterov=false", "schedule=inverse_sqrt"),
    optimizer=original_muon,
    rate=inverse_sqrt,
)
GROUPED = Case("groups", (GROUPS,), optimizer=grouped)

CASES = [SGD, NESTEROV, PLAIN_SGD, ADAFACTOR, LAMB, MUON, ORIGINAL_MUON, GROUPED]
