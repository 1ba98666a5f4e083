"""How often the gate promotes a model that is no better: by the number of groups, and over a reign of 40 nights.

    python benchmarks/gate.py [trials]

Every model has the same quality. Its value on a group is drawn anew for each model; a group's own difficulty, which
all models share, is added. What is counted is whether the lower bound of `paired_improvement` lies above zero. With
2,000 trials (the default) it takes about six minutes on one core, and a share of 2.5 % is found within 0.7 points.
A reign ends with the first promotion; its validation data are new on every night, or always the same.
"""

from __future__ import annotations

import sys

import numpy as np

from kftrain.registry.gate import choose_confidence
from kftrain.registry.settings import RegistryConfig
from kftrain.statistics.bootstrap import paired_improvement

NUM_GROUPS = (1, 2, 3, 4, 5, 10, 20, 50, 200)
NIGHTS = 40
NUM_BOOTSTRAP = 1000
SETTINGS = RegistryConfig()

Sums = dict[str, np.ndarray]


def mean(sums: Sums) -> Sums:
    """The metric: a mean over groups."""
    return {"mean": sums["value"] / sums["count"]}


def model(difficulty: np.ndarray, generator: np.random.Generator) -> Sums:
    """The sums per group of one more model of the same quality."""
    num_groups = len(difficulty)
    keys = np.array([f"{number:04d}" for number in range(num_groups)])
    return {"value": difficulty + generator.normal(size=num_groups), "count": np.ones(num_groups), "keys": keys}


def is_promoted(challenger: Sums, champion: Sums, confidence: float = SETTINGS.confidence) -> bool:
    """Whether the gate would call the challenger better."""
    arguments = (NUM_BOOTSTRAP, confidence, 0)
    return paired_improvement(mean, "mean", "maximize", challenger, champion, *arguments).low > 0


def one_try(num_groups: int, generator: np.random.Generator) -> bool:
    """One challenger against one champion."""
    difficulty = generator.normal(size=num_groups)
    return is_promoted(model(difficulty, generator), model(difficulty, generator))


def is_lost(num_groups: int, generator: np.random.Generator, new_data: bool, settings: RegistryConfig) -> bool:
    """Whether one of `NIGHTS` challengers, none of them better, takes the champion's place."""
    difficulty = generator.normal(size=num_groups)
    champion = model(difficulty, generator)
    for number in range(1, NIGHTS + 1):
        if new_data:
            difficulty = generator.normal(size=num_groups)
            champion = model(difficulty, generator)
        if is_promoted(model(difficulty, generator), champion, choose_confidence(settings, number)):
            return True
    return False


def main() -> None:
    """Prints both tables."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    generator = np.random.default_rng(0)
    print("groups  promoted although no better")
    for num_groups in NUM_GROUPS:
        share = sum(one_try(num_groups, generator) for _ in range(trials)) / trials
        print(f"{num_groups:6}  {share:.1%}")
    print(f"reigns of {NIGHTS} nights, 50 groups, that end with a model that is no better")
    for corrected in (False, True):
        settings = SETTINGS.model_copy(update={"correct_repeated_tries": corrected})
        for new_data in (True, False):
            share = np.mean([is_lost(50, generator, new_data, settings) for _ in range(max(1, trials // 10))])
            data = "new every night" if new_data else "always the same"
            print(f"  {'corrected' if corrected else 'uncorrected'}, validation data {data}: {share:.1%}")


if __name__ == "__main__":
    main()
