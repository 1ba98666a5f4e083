"""Trains two islands by torchft.local_sgd.DiLoCo, each in a thread: python torchft_diloco.py first.npz last.npz H

It runs in an environment with torch, numpy, pydantic and torchft, and PYTHONPATH of the repository and its tests.
"""

import sys
import threading

import numpy as np
import torch
from helpers.parity.oracle import STEPS, Llama, adamw, text_loss, text_rows, text_terms, warmup_cosine
from torchft.local_sgd import DiLoCo

ISLANDS, BATCH, CLIP = 2, 8, 2.0


class Manager:
    """What DiLoCo asks of torchft's manager, among threads of one process."""

    _use_async_quorum = False
    slots = [torch.empty(0)] * ISLANDS
    meeting = threading.Barrier(ISLANDS)

    def __init__(self, island):
        self.island = island

    def allreduce(self, tensor, should_quantize=False):
        self.slots[self.island] = tensor
        self.meeting.wait()
        mean = sum(self.slots[1:], self.slots[0].clone()) / ISLANDS
        self.meeting.wait()
        tensor.copy_(mean)
        return self

    def wait(self):
        return True

    def should_commit(self):
        return True

    def current_step(self):
        return 0

    def start_quorum(self):
        pass

    def allow_state_dict_read(self):
        pass

    def disallow_state_dict_read(self):
        pass

    def register_state_dict_fn(self, *arguments):
        pass


def train(island, network, num_steps_alone):
    optimizer, data = adamw(network), text_rows()
    outer = torch.optim.SGD(network.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(Manager(island), [network], optimizer, outer, num_steps_alone):
        for step in range(STEPS):
            places = (np.arange(BATCH) + step * BATCH) % len(data["tokens"])
            rows = {name: values[np.split(places, ISLANDS)[island]] for name, values in data.items()}
            optimizer.zero_grad()
            (text_loss(network, rows) / text_terms(rows)).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step)
            optimizer.step()


def main(first, last, num_steps_alone):
    networks = [Llama() for _ in range(ISLANDS)]
    for network in networks:
        network.load_state_dict({name: torch.from_numpy(value) for name, value in np.load(first).items()})
    threads = [threading.Thread(target=train, args=(*pair, int(num_steps_alone))) for pair in enumerate(networks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.savez(last, **{name: value.numpy() for name, value in networks[0].state_dict().items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
