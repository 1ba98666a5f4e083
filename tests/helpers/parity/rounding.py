"""Weights in bf16 alone: a bare loop that widens each number, updates it by torch's own AdamW, and rounds by a coin."""

import hashlib
import math

import numpy as np
import torch
from helpers.parity.defects import patched
from helpers.parity.oracle import STEPS, Case, Curve, backward, same_llama

from kftrain.train.rounding import RoundedAdamW

SEED = 3
OVERRIDES = ("precision.compute=bf16", "precision.master=bf16")


def rounded(value, generator):
    """To one of the two neighbours in bf16, in fp64: the chance of the one further from 0 is the share of the way."""
    steps = 2.0 ** (torch.frexp(value.double())[1].double() - 8)
    below = (value.double() / steps).trunc() * steps
    way = (value.double() - below).abs() / steps
    chance = torch.randint(0, 2**16, value.shape, dtype=torch.int32, generator=generator).double() / 2**16
    # The bits below those of bf16 are whole: with the largest chance that they leave, they carry.
    return (below + torch.where(way + chance >= 1, 1.0, 0.0) * steps * value.sign()).bfloat16()


def round_parts(values, text, num_parts):
    """Rounds some tensors of one shape, part by part along their rows, each by a generator of its own."""
    (shape,) = {value.shape for value in values}
    chunks, done = torch.arange(shape[0]).chunk(num_parts), []
    for rows in chunks:
        seed = hashlib.sha256(f"{text}/{(int(rows[0]), *(0,) * (len(shape) - 1))}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        done.append([rounded(value[rows], generator) for value in values])
    return [torch.cat(tensors) for tensors in zip(*done, strict=True)]


def loop(case, first_weights, parts, num_parts=1, after_step=lambda weights: None):
    """As `oracle.run`. `num_parts`: processes that each round a part of every weight.

    `after_step` is given the weights that each step has left.
    """
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    weights = {name: each.detach().bfloat16() for name, each in network.named_parameters()}
    moments = {}
    data, losses, norms = case.data(), [], []
    for number in range(STEPS):
        places = (np.arange(case.batch) + number * case.batch) % len(data["tokens"])
        batch = {name: rows[places] for name, rows in data.items()}
        for name, each in network.named_parameters():
            each.data = weights[name].float()
        given = [{key: rows[list(part)] for key, rows in batch.items()} for part in parts]
        losses.append(sum(backward(case, network, rows, case.terms(batch)) for rows in given))
        gradients = {name: each.grad.bfloat16() for name, each in network.named_parameters()}
        norms.append(math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values())))
        for name, each in network.named_parameters():
            limit = torch.tensor(min(1.0, case.clip / (norms[-1] + 1e-6)))
            each.grad = (gradients[name] * limit).float()
            optimizer = torch.optim.AdamW(
                [each], lr=case.rate(number), betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3 if each.dim() > 1 else 0.0
            )
            if name in moments:
                kept = {key: value.float() for key, value in moments[name].items()}
                optimizer.state[each] = {"step": torch.tensor(float(number)), **kept}
            optimizer.step()
            keys = ("exp_avg", "exp_avg_sq")
            wide = [each.detach(), *(optimizer.state[each][key] for key in keys)]
            weights[name], *kept = round_parts(wide, f"{SEED}/{number * case.batch}/{name}", num_parts)
            moments[name] = dict(zip(keys, kept, strict=True))
            each.grad = None
        after_step(dict(weights))
    return Curve(losses, norms, [case.rate(n) for n in range(STEPS)], weights)


ROUNDED = Case("weights in bf16", OVERRIDES, same_llama, bf16=True, loop=loop)


def same_coins():
    """Every step draws what the first one has drawn."""

    def update(optimizer, *others, before=RoundedAdamW.update):
        optimizer.position = 0
        before(optimizer, *others)

    return patched(RoundedAdamW, "update", update)
