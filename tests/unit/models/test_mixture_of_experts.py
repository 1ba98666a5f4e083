import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from kftrain.errors import ConfigError
from kftrain.models.mixture_of_experts import MixtureOfExperts, measure_imbalance
from kftrain.models.output import ModelOutput
from kftrain.models.settings import ModelConfig
from kftrain.models.signature import check_options

SIZES = {"vocab_size": 97, "sequence_length": 64, "dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 16}
SIGMOID = {
    "scores": "sigmoid",
    "num_groups": 4,
    "groups_per_token": 2,
    "num_shared_experts": 2,
    "scaling_factor": 2.5,
    "balance_rate": 0.01,
}


def build(**options):
    """A model whose biases are not all alike."""
    torch.manual_seed(1)
    model = MixtureOfExperts(**{**SIZES, **EXPERTS, **options})
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(std=0.1)
    return model


def tokens(rows=3, length=20):
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        ("Qwen3MoeForCausalLM", {"rope_theta": 700.0}),
        ("Qwen3MoeForCausalLM", {"renormalize": False, "first_dense_layers": 1, "tie_embeddings": True}),
        ("MixtralForCausalLM", {"qk_norm": False, "norm_eps": 1e-3}),
        ("Dots1ForCausalLM", SIGMOID),
        ("Dots1ForCausalLM", {"scores": "sigmoid", "num_shared_experts": 1, "first_dense_layers": 2}),
    ],
)
def test_transformers_loads_the_export_and_gives_equal_logits_and_gradients(theirs, options, tmp_path):
    model = build(**options).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(model.export_config()))
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32, experts_implementation="eager"
    )
    assert type(other).__name__ == theirs
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours, expected = model(tokens()), other(tokens()).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    ours.logsumexp(-1).sum().backward()
    expected.logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5, rtol=1e-4, msg=name)


def test_experts_are_those_of_deepseek_v3():
    """Whose attention is another one."""
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    ours, theirs = build(**SIGMOID).model.layers[0].mlp.eval(), DeepseekV3MoE(config).eval()
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    other = hidden.detach().clone().requires_grad_()
    found, expected = ours(hidden)[0], theirs(other)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(hidden.grad, other.grad, atol=1e-4, rtol=1e-4)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_the_router_computes_in_fp32_whatever_the_format_of_the_rest():
    router = build().model.layers[0].mlp.gate.bfloat16()
    rows = torch.randn(50, 32).bfloat16()
    _, weights, scores = router(rows)
    assert scores.dtype == weights.dtype == torch.float32
    expected = (rows.float() @ router.weight.float().T).softmax(-1)
    torch.testing.assert_close(scores, expected)


def test_a_row_of_weight_0_is_not_counted_and_evaluation_counts_nothing():
    model = build(capacity_factor=0.5)
    model.eval()(tokens())
    assert not model.expert_choices.any()
    model.train()
    model.take_row_weights(torch.tensor([1.0, 0.0, 1.0]))
    model(tokens())
    assert model.expert_choices.sum(1).tolist() == [2 * 20 * 2] * 3
    padded = model.expert_choices.clone(), model.num_dropped.clone()
    model.after_step()
    assert not model.expert_choices.any() and torch.equal(model.last_choices, padded[0])
    model(tokens()[[0, 2]])
    assert torch.equal(model.expert_choices, padded[0]) and torch.equal(model.num_dropped, padded[1]) and padded[1] > 0


def test_capacity_is_for_training_and_drops_the_last_choices_of_a_row():
    part = build(capacity_factor=1.0).model.layers[0].mlp
    hidden = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    limited, routing = part(hidden)
    part.capacity_factor = 0.0
    whole, unlimited = part(hidden)
    torch.testing.assert_close(part.eval()(hidden)[0], whole)
    assert torch.equal(routing.choices, unlimited.choices) and not unlimited.num_dropped.any()
    assert torch.equal(routing.num_dropped, (routing.choices - 3).clamp(min=0).sum(1)) and routing.num_dropped.any()
    # Three choices of each expert are an even share of 12 tokens, two experts each, over 8.
    choices = part.gate(hidden.flatten(0, 1))[0].view(2, 24)
    for row in range(2):
        num_met, is_whole = [0] * 8, [True] * 12
        for place, expert in enumerate(choices[row].tolist()):
            num_met[expert] += 1
            is_whole[place // 2] &= num_met[expert] <= 3
        same = torch.isclose(limited[row], whole[row], atol=1e-6).all(-1)
        assert same.tolist() == is_whole


def test_a_bias_moves_towards_even_loads_by_its_rate():
    model = build(**SIGMOID)
    gate = model.model.layers[1].mlp.gate
    before = gate.e_score_correction_bias.clone()
    model(tokens())
    counts = model.expert_choices[1].double()
    model.after_step()
    expected = before + 0.01 * (counts.mean() - counts).sign().float()
    torch.testing.assert_close(gate.e_score_correction_bias, expected)
    assert (gate.e_score_correction_bias != before).any()


def test_the_auxiliary_loss_is_1_for_each_layer_where_loads_are_even():
    scores = torch.full((2, 16, 8), 0.3)
    torch.testing.assert_close(measure_imbalance(scores, torch.full((2, 8), 4)), torch.ones(2))
    crowded = torch.zeros(2, 8, dtype=torch.int64)
    crowded[:, 0] = 32
    scores[..., 0] = 0.9
    torch.testing.assert_close(measure_imbalance(scores, crowded), torch.full((2,), 8 * 0.9 / 3.0))
    model = build(balance_loss=0.5)
    output = model(tokens())
    assert isinstance(output, ModelOutput) and output.auxiliary.shape == (3,) and (output.auxiliary > 0.5).all()
    assert isinstance(model.eval()(tokens()), torch.Tensor)


def test_an_expert_without_rows_has_a_gradient_of_0():
    experts = build().model.layers[0].mlp.experts
    rows = torch.randn(6, 32)
    experts(rows, torch.tensor([4, 0, 2, 0, 0, 0, 0, 0])).square().sum().backward()
    assert [bool(part.any()) for part in experts.gate_up_proj.grad] == [True, False, True, *[False] * 5]
    expected = []
    for expert in (0, 0, 0, 0, 2, 2):
        gate, up = (experts.gate_up_proj[expert] @ rows[len(expected)]).chunk(2)
        expected.append(experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(experts(rows, torch.tensor([4, 0, 2, 0, 0, 0, 0, 0])), torch.stack(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_dim": 12}, "model.expert_dim: experts need a width .* use 8 or 16"),
        ({"dim": 36, "num_heads": 2}, "model.dim: .* use 32 or 40"),
        ({"experts_per_token": 9}, "experts_per_token: a token reaches 8"),
        ({**SIGMOID, "experts_per_token": 5}, "experts_per_token: a token reaches 4"),
        ({**SIGMOID, "num_groups": 8}, "num_groups: 8 experts have no such groups"),
        ({**SIGMOID, "groups_per_token": 5}, "groups_per_token: there are 4"),
        ({"first_dense_layers": 3}, "first_dense_layers: leaves no layer"),
        ({"scaling_factor": 2.0}, "scaling_factor: no layout .* use scores: sigmoid"),
        ({"balance_rate": 0.1}, "balance_rate: no layout .* use scores: sigmoid"),
        ({"qk_norm": False, "renormalize": False}, "renormalize: Mixtral"),
        ({"qk_norm": False, "first_dense_layers": 1}, "first_dense_layers: Mixtral"),
        ({"scores": "sigmoid"}, "num_shared_experts: Dots1"),
        ({**SIGMOID, "qk_norm": False}, "qk_norm: Dots1"),
        ({"num_heads": 5}, "num_heads: 5 heads do not divide"),
    ],
)
def test_what_no_layout_holds_is_refused_when_it_is_built_and_by_the_first_look_at_the_configuration(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)
    named = {"kind": "mixture_of_experts", **{**SIZES, **EXPERTS, **options}}
    arguments = {name: named.pop(name) for name in ("vocab_size", "sequence_length")}
    arguments |= {"document_token": None, "attention": "rows"}
    with pytest.raises(ConfigError, match=message):
        check_options(ModelConfig.model_validate(named), arguments)


def test_operations_are_counted_of_the_experts_that_a_token_reaches():
    few, dense = build(), build(num_experts=2)
    gates = 6 * 3 * (8 - 2) * 32  # the router looks at all
    assert few.num_flops(1) - gates * 64 == dense.num_flops(1)
