"""What a plan makes of a model's traffic, by hand."""

import pytest
from helpers.tensor_traffic import traffic_of

from kftrain.errors import ConfigError
from kftrain.models.transformer import Transformer
from kftrain.models.vision_transformer import VisionTransformer

DIM, LAYERS, VOCABULARY = 32, 3, 64
MATRICES = 4 * DIM * DIM + 3 * DIM * 64
NORMS = (2 * LAYERS + 1) * DIM
NAMES = [f"model.layers.{number}" for number in range(LAYERS)]


def transformer(**options):
    sizes = {"dim": DIM, "num_layers": LAYERS, "num_heads": 4, "ffn_dim": 64, "sequence_length": 8}
    return Transformer(vocab_size=VOCABULARY, **sizes, **options)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize(
    ("recomputed", "again"), [([], 0.0), (NAMES[:1], {True: 1.5, False: 1.0}), (NAMES, {True: 4.5, False: 3.0})]
)
def test_each_block_of_a_transformer_exchanges_four_times_its_width(in_parts, recomputed, again):
    traffic = traffic_of(transformer(), 2, in_parts, True, recomputed)
    more = again[in_parts] if again else 0.0
    assert traffic.split.num_features == (4 * LAYERS + 2 + more) * DIM
    assert (traffic.split.num_sums, traffic.split.num_copied, traffic.split.num_moved) == (3, NORMS, 0)
    assert traffic.num_parameters == traffic.num_trained == (LAYERS * MATRICES + 2 * VOCABULARY * DIM) // 2 + NORMS
    assert traffic.num_places == 8


def test_tied_embeddings_exchange_as_two_matrices_and_are_one():
    traffic = traffic_of(transformer(tie_embeddings=True), 4, True, True)
    assert traffic.split.num_features == (4 * LAYERS + 2) * DIM and traffic.split.num_sums == 3
    assert traffic.num_parameters == (LAYERS * MATRICES + VOCABULARY * DIM) // 4 + NORMS


def test_whole_logits_are_gathered_instead_of_summed_up():
    traffic = traffic_of(transformer(), 2, True, False)
    assert traffic.split.num_features == (4 * LAYERS + 2) * DIM + VOCABULARY / 2 and traffic.split.num_sums == 0


def test_frozen_parameters_are_gathered_and_have_no_gradient_to_sum():
    model = transformer()
    model.model.norm.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    traffic = traffic_of(model, 2, True, True)
    assert traffic.split.num_copied == NORMS - DIM
    assert traffic.num_parameters - traffic.num_trained == DIM + VOCABULARY * DIM // 2


def test_a_vision_transformer_sends_parts_of_its_fused_matrices():
    model = VisionTransformer(image_size=8, num_classes=3, dim=DIM, num_heads=4, num_layers=2)
    traffic = traffic_of(model, 2, True, False)
    assert traffic.split.num_features == (4 * 2 + 1) * DIM and traffic.split.num_sums == 0 and traffic.num_places == 16
    assert traffic.split.num_moved == 2 * 2 * (DIM // 2) * (DIM + 1), "half of one of three matrices, there and back"
    assert traffic_of(model, 2, False, False).split.num_features == 4 * 2 * DIM


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match="num_heads: has no 8 equal parts"):
        traffic_of(transformer(), 8, True, True)
