import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kftrain.errors import ConfigError
from kftrain.models.attention import attend_by_kernels, list_spans
from kftrain.models.sizes import default_ffn_dim
from kftrain.models.transformer import Transformer

SIZES = {"vocab_size": 320, "sequence_length": 64, "document_token": 256, "dim": 48, "num_layers": 3, "num_heads": 6}


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Transformer(**{**SIZES, **options})


def tokens(rows, length, seed=1):
    return torch.randint(0, 258, (rows, length), generator=torch.Generator().manual_seed(seed))


def load_as_llama(model, folder):
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.export_config()))
    return transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "tie_embeddings": True},
        {"rope_theta": 500.0, "norm_eps": 1e-3, "ffn_dim": 40},
    ],
    ids=["heads", "grouped", "tied", "theta"],
)
def test_transformers_llama_loads_the_export_and_gives_equal_logits(options, tmp_path):
    model = build(**options)
    with torch.no_grad():  # a deviation of 0.02 would hide differences in attention
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    llama, info = load_as_llama(model, tmp_path)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    inputs = tokens(3, 64)
    with torch.no_grad():
        expected = llama(inputs).logits
        assert expected.abs().max() > 1
        torch.testing.assert_close(model(inputs), expected, atol=1e-5, rtol=1e-5)


def test_the_state_dict_has_the_names_and_shapes_of_llama():
    model = build(num_kv_heads=2)
    config = transformers.LlamaConfig(**model.export_config())
    llama = transformers.LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in llama.state_dict().items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes


@pytest.mark.parametrize("num_kv_heads", [6, 2])
def test_a_row_does_not_depend_on_the_rest_of_its_batch(num_kv_heads):
    model = build(num_kv_heads=num_kv_heads)
    inputs = tokens(8, 64)
    with torch.no_grad():
        together = model(inputs)
        alone = torch.cat([model(row[None]) for row in inputs])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_a_logit_does_not_depend_on_later_tokens():
    model = build()
    inputs = tokens(2, 64)
    changed = inputs.clone()
    changed[:, 40:] = tokens(2, 24, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs)[:, :40], model(changed)[:, :40], atol=1e-6, rtol=1e-5)


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not():
    first, second, other = build(seed=5), build(seed=5), build(seed=6)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_what_writes_into_the_residual_stream_starts_smaller_by_depth():
    layer = build(dim=192, num_layers=8).requires_grad_(False).model.layers[0]
    assert layer.mlp.up_proj.weight.std() / layer.mlp.down_proj.weight.std() == pytest.approx(4, rel=0.05)
    assert layer.self_attn.q_proj.weight.std() / layer.self_attn.o_proj.weight.std() == pytest.approx(4, rel=0.05)


def test_tied_embeddings_are_one_parameter():
    untied, tied = build(), build(tie_embeddings=True)
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"lm_head.weight"}
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    inputs = tokens(2, 16)
    assert torch.equal(tied(inputs), untied(inputs))


def test_blocks_are_the_layers_in_order():
    model = build()
    assert [id(block) for block in model.blocks()] == [id(layer) for layer in model.model.layers]


def test_flops_are_those_of_the_matrix_products():
    model = build(num_kv_heads=2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens(2, 64)).sum().backward()
    assert model.num_flops(2) == pytest.approx(counter.get_total_flops(), rel=0.15)


def test_the_derived_feed_forward_width_is_a_multiple_of_64_from_8_thirds_of_dim_up():
    assert [default_ffn_dim(dim) for dim in (24, 192, 193, 4096)] == [64, 512, 576, 10944]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"dim": 50}, "model.num_heads"),
        ({"num_kv_heads": 4}, "model.num_kv_heads"),
        ({"dim": 54}, "model.dim"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(options, where):
    with pytest.raises(ConfigError) as raised:
        build(**options)
    assert raised.value.where == where


def test_attention_inside_documents_gives_each_document_the_logits_that_it_has_alone():
    torch.manual_seed(0)
    start, sizes = 250, [5, 1, 9, 6]
    model = Transformer(
        vocab_size=256, document_token=start, attention="documents", dim=32, num_layers=2, num_heads=4, num_kv_heads=2
    ).double()
    documents = [torch.cat([torch.tensor([start]), torch.randint(0, 250, (size,))]) for size in sizes]
    tail = torch.randint(0, 250, (4,))  # of a document that began in the row before
    rows = torch.stack([torch.cat([tail, *documents]), torch.cat([*reversed(documents), tail])])
    with torch.no_grad():
        packed = model(rows)
        alone = [model(document[None])[0] for document in documents]
        plain = Transformer(vocab_size=256, document_token=start, dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(plain.double()(documents[2][None])[0], alone[2])
        assert not torch.allclose(plain(rows)[0, 4:10], alone[0])
        torch.testing.assert_close(packed[0, :4], model(tail[None])[0])
    torch.testing.assert_close(packed[0, 4:], torch.cat(alone))
    torch.testing.assert_close(packed[1, : -len(tail) - len(documents[0])], torch.cat(alone[:0:-1]))


@pytest.mark.parametrize(
    ("device", "attention", "dtype", "num_key_heads"),
    [
        ("meta", "rows", torch.bfloat16, 2),
        ("meta", "rows", torch.float32, 4),
        ("meta", "documents", torch.bfloat16, 2),
        ("meta", "documents", torch.float32, 4),
        ("cpu", "documents", torch.float32, 2),
    ],
)
def test_heads_are_grouped_only_where_the_devices_kernels_take_groups(
    monkeypatch, device, attention, dtype, num_key_heads
):
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, *mask, **options):
        calls.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return attend(query, key, value, *mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    if attention == "rows":
        build(num_heads=4, num_kv_heads=2, num_layers=1).to(device, dtype)(tokens(2, 8).to(device))
    else:
        heads = (torch.zeros(1, number, 8, 4, device=device, dtype=dtype) for number in (4, 2, 2))
        attend_by_kernels(*heads, list_spans(1, [range(8)], [[0, 8]]))
    assert calls == [(num_key_heads, num_key_heads, num_key_heads == 2)]


def test_attention_inside_documents_needs_to_know_what_starts_one():
    with pytest.raises(ConfigError, match="starts a document"):
        Transformer(vocab_size=8, attention="documents", dim=8, num_heads=2)
