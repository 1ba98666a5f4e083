"""The gradient noise scale of a bare loop: gradients of each part by themselves, and averages over all steps so far."""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers.parity import oracle
from helpers.parity.oracle import STEPS, Case, Curve, same_llama

DECAY = 0.99
NOISE = ("train.noise_scale=true",)


@dataclass(frozen=True)
class NoisyCurve(Curve):
    noise_scales: list[float]
    """Of each step; nan where the estimate of the gradient's size is negative."""


def loop(case, first_weights, parts, path, num_noted):
    """As `oracle.run`. `num_noted`: parts whose gradients are small batches; the first ones."""
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    optimizer, data, losses, norms, scales = case.optimizer(network), case.data(), [], [], []
    count, num_rows, signals, noises = len(parts), len(next(iter(data.values()))), [], []
    for step in range(STEPS):
        places = (np.arange(case.batch) + step * case.batch) % num_rows
        batch = {name: rows[places] for name, rows in data.items()}
        made, total = [], 0.0
        path.enter(network, step)
        for part in parts:
            network.zero_grad()
            rows = {name: rows[list(part)] for name, rows in batch.items()}
            total += oracle.backward(case, network, rows, case.terms(batch))
            made.append([parameter.grad.clone() for parameter in network.parameters()])
        mean_of_parts = np.mean([square(gradients) * count**2 for gradients in made[:num_noted]])
        whole = [sum(gradients) for gradients in zip(*made, strict=True)]
        small, large = case.batch / count, case.batch
        signals.append((large * square(whole) - small * mean_of_parts) / (large - small))
        noises.append((mean_of_parts - square(whole)) / (1 / small - 1 / large))
        shares = DECAY ** np.arange(step, -1, -1)
        signal, noise = np.dot(shares, signals), np.dot(shares, noises)
        scales.append(noise / signal if signal > 0 else math.nan)
        norms.append(math.sqrt(square(whole)))
        for parameter, gradient in zip(network.parameters(), whole, strict=True):
            parameter.grad = gradient * min(1.0, case.clip / (norms[-1] + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = case.rate(step)
        optimizer.step()
        losses.append(total)
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    return NoisyCurve(losses, norms, [case.rate(step) for step in range(STEPS)], weights, scales)


def square(gradients):
    return sum(float(gradient.double().square().sum()) for gradient in gradients)


def case_of(num_noted, **others):
    """`num_noted`: 1 on one process, which measures its first micro batch; else the number of processes."""
    case = Case(f"noise of {num_noted}", loop=functools.partial(loop, num_noted=num_noted), loop_follows=True)
    return replace(case, **others)


def bf16(num_noted):
    return case_of(
        num_noted,
        name=f"noise of {num_noted} in bf16",
        overrides=("precision.compute=bf16",),
        network=same_llama,
        bf16=True,
    )
