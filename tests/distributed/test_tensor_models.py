"""Models of one's own whose matrices are split: what they come to, and what is refused before a weight has changed."""

import numpy as np
import pytest
from helpers.models.tensor import seven_tokens
from helpers.parity import rank as parity_rank
from helpers.parity.oracle import BASE, STEPS, text_rows

from kftrain.core.plain import load_yaml

MIXED = "\n".join(line for line in BASE.splitlines() if not line.startswith("model:"))


def answers(pools, processes, *settings, text=BASE, rows=text_rows):
    return pools.run(processes, parity_rank.train, parity_rank.Job(text, settings, rows))


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        (
            "Forgetful",
            [],
            "model model.norm.weight: with its matrices split the model computes another gradient than as a whole "
            "(got 'parallel.tensor: 2'); see tensor_plan(): name the module as sequence, or a dropout as random, where",
        ),
        (
            "Sizeless",
            ["task.sequence_length=7"],
            "parallel.tensor: a sequence of 7 places has no 2 equal parts (got 2)",
        ),
        ("Transformer", ["task.sequence_length=7"], "model sequence_length: has no 2 equal parts, as parallel.tensor"),
        ("Transformer", ["task.sequence_length=1"], "model sequence_length: has no 2 equal parts, as parallel.tensor"),
        (
            "Misspelt",
            [],
            "model.tensor_plan: names no module of the model (got 'model.layers.*.self_attention.q_proj')",
        ),
        ("Planless", [], "parallel.tensor: Planless has no plan of how to split its matrices (got 2)"),
        ("Transformer", ["model.num_kv_heads=1"], "model num_kv_heads: has no 2 equal parts, as parallel.tensor asks"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line_in_the_first_step(pools, kind, settings, line):
    rows = seven_tokens if kind == "Sizeless" else text_rows
    for answer in answers(
        pools, 2, "parallel.tensor=2", f"model.kind=helpers.models.tensor:{kind}", *settings, rows=rows
    ):
        assert answer.kind == "refused" and line in answer.value, answer.value


FLAWS = {
    "norm behind zeros": "layers.1.norms.1.weight: {} another gradient",
    "norm within heads": "layers.1.query_norm.weight: {} another gradient",
    "gain within heads": "layers.1.gain: {} another gradient",
    "places of a part": "layers.0.norms.0: {} another output",
    "mean over places": "norm: {} another output",
    "next place": "norm: {} another output",
    "shares of a part": ": {} another output",
    "mask of a part": "drop: {} another mask",
    "masks of one tensor": "layers.0.drop: {} another mask",
}


def flawed(flaw):
    return MIXED + f"\nmodel: {{kind: 'helpers.models.tensor:Flawed', flaw: '{flaw}'}}\n"


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_plan_that_changes_what_is_computed_is_refused_with_the_modules_name(pools, flaw):
    start = "ConfigError: model " + FLAWS[flaw].format("with its matrices split the model computes")
    layout = ["parallel.tensor=2", f"parallel.sequence_parallel={str(flaw != 'masks of one tensor').lower()}"]
    for answer in answers(pools, 2, *layout, text=flawed(flaw)):
        assert answer.kind == "refused" and answer.value.startswith(start.replace(" :", ":")), answer.value


def test_the_same_model_without_a_flaw_is_trained(pools):
    for layout in (["parallel.tensor=2"], ["parallel.tensor=2", "parallel.sequence_parallel=false"]):
        assert [answer.kind for answer in answers(pools, 2, *layout, text=flawed(""))] == ["done", "done"]


@pytest.mark.parametrize("layout", [["parallel.tensor=2"], ["parallel.tensor=2", "parallel.sequence_parallel=false"]])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_model_of_ones_own_gives_the_numbers_of_one_process_with_its_random_ones(pools, layout, dropout):
    model = f"\nmodel: {{kind: 'helpers.models.tensor:Mixed', dropout: {dropout}}}\n"
    (alone,) = answers(pools, 1, text=MIXED + model)
    split, _ = answers(pools, 2, *layout, text=MIXED + model)
    assert (alone.kind, split.kind) == ("done", "done"), (alone.value, split.value)
    for one, two in zip(alone.value.history, split.value.history, strict=True):
        assert one == pytest.approx({**two, **{k: v for k, v in one.items() if "second" in k}}, rel=1e-4), one["step"]
    for name, weights in alone.value.weights.items():
        np.testing.assert_allclose(split.value.weights[name], weights, rtol=0, atol=1e-4, err_msg=name)


def test_what_processes_see_of_the_same_samples_is_counted_once(pools):
    first, *_ = answers(pools, 4, "parallel.tensor=2", "model.kind=helpers.models.tensor:Counting")
    assert first.kind == "done", first.value
    settings = load_yaml(BASE, "BASE")
    seen = STEPS * settings["train"]["global_batch_size"] * settings["task"]["sequence_length"]
    assert first.value.weights["num_seen"] == seen
