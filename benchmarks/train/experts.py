"""A step of a mixture of experts against one of a dense model with the same active parameters, in turns.

    python benchmarks/train/experts.py [--processes 1] [--rounds 8] [--dim 512] [--tokens 4096]

Both are trained by our engine, with AdamW, on the same batch: on one process, or with `--processes 2` the mixture with
`expert: 2` and the dense model with `fsdp`. A token reaches 2 of 8 experts, whose widths add up to the dense one's;
that is all that differs, since neither norms queries and keys.
Times are of the process's CPU clock, to which others of a loaded machine add little; of two processes, which also wait
for each other, on the wall. Last line: `dense` -> seconds of a turn, `experts` -> its time over that; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from processes import LENGTH, SETTLING_ROUNDS, Clock, build_engine, measure_on_processes, sent, tokens

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World
from kftrain.tasks import build_task

TEXT = """
task: {kind: "processes:Tokens", sequence_length: 128}
model: {num_layers: 4, num_heads: 8}
"""


def measure(world: World, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a dense step, and what one of the mixture takes of that."""
    dim, clock = arguments.dim, Clock(world, time.process_time if world.size == 1 else time.perf_counter)
    options = ["kind=mixture_of_experts", "num_experts=8", "experts_per_token=2", f"expert_dim={dim}"]
    options += ["qk_norm=false"]
    models = {
        "dense": [f"model.dim={dim}", "model.kind=transformer", f"model.ffn_dim={2 * dim}"],
        "experts": [f"model.dim={dim}", *(f"model.{option}" for option in options), f"parallel.expert={world.size}"],
    }
    engines: dict[str, Any] = {}
    for name, overrides in models.items():
        resolved = config.parse(TEXT, overrides)
        task, mesh = build_task(resolved.task), Mesh(resolved.parallel.shape(world.size), world)
        batch = sent(task, tokens(mesh.data_rank, arguments.tokens // LENGTH))
        engines[name] = build_engine(resolved, task, batch, mesh)
        engines[name].set_learning_rate(1e-4)
    for _ in range(arguments.rounds + SETTLING_ROUNDS):
        for name, engine in engines.items():
            start = clock.begin()
            engine.step(batch, arguments.tokens * world.size, world.sum)
            clock.end(name, start)
    dense, experts = (clock.seconds[name][SETTLING_ROUNDS:] for name in models)
    ratios = [ours / theirs for ours, theirs in zip(experts, dense, strict=True)]
    return {"dense": statistics.median(dense), "experts": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="of a process and step")
    measure_on_processes(measure, parser.parse_args())


if __name__ == "__main__":
    main()
