"""The case in float8: a network whose layers torchao itself has replaced, in a bare loop in bf16."""

from helpers.parity.oracle import BASE, VOCABULARY, Case
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from kftrain.models.transformer import Transformer


def wide_transformer():
    """kftrain's own, with sizes that 16 divides."""
    return Transformer(vocab_size=VOCABULARY, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48)


def network():
    """The layers of the blocks compute in float8; the embedding and the head do not."""

    def is_within(_module, name):
        return "layers" in name

    return convert_to_float8_training(
        wide_transformer(), module_filter_fn=is_within, config=Float8LinearConfig(emulate=True)
    )


SIZES = ("model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=48")
FLOAT8 = Case("float8", ("precision.compute=float8", *SIZES), network, base=BASE, bf16=True)
BF16 = Case("bf16", ("precision.compute=float8", *SIZES), wide_transformer, base=BASE, bf16=True)
"""What would come of it without float8."""
