"""Decoder-only transformer with the shape, parameter names and configuration of `transformers`' Llama.

Pre-norm blocks with RMSNorm, rotary position embedding (RoPE) in the half-rotation layout, grouped-query
attention and SwiGLU; no biases. A state dict saved beside `export_config` as `config.json` loads into
`transformers.LlamaForCausalLM` as it is.

There is no state besides the parameters: the rotary tables are computed once per forward pass (`[T,
head_dim]`, well under a thousandth of its work), so nothing is lost when a model is built on the meta device,
sharded and only then given memory.

Attention is causal and no operation crosses rows, so a row's logits depend on that row alone, and a token's
on what precedes it; with `attention: documents` on what precedes it in its own document, as if that were a row.

Shapes are written with B rows, T tokens, D dim, H query heads, K key-value heads and E head_dim.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from pydantic import Field
from torch import Tensor, nn

from kftrain.errors import ConfigError
from kftrain.models import sizes
from kftrain.models.attention import CausalAttention, locate_documents
from kftrain.models.base import ModelPiece, draw_weights, run_pieces
from kftrain.settings.section import Amount, Count

Positive = Annotated[float, Field(gt=0.0)]
RotaryTables = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """Decoder that turns tokens `[B, T]` int64 into logits `[B, T, vocab_size]`.

    Args:
        vocab_size: Number of token ids; from the task.
        sequence_length: Longest input that training uses; from the task. Longer inputs work, with unseen
            positions.
        document_token: Id that starts a document; from the task.
        attention: `rows` or `documents`; from the task: whether tokens attend to other documents of their row, and
            whether positions begin anew with each document.
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Query heads; they divide `dim` into an even head dim.
        num_kv_heads: Key and value heads; 0: as many as query heads. Must divide `num_heads`.
        ffn_dim: Inner width of the feed-forward part; 0: 8/3 of `dim`, rounded up to a multiple of 64.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Number added to the mean square in RMSNorm.
        tie_embeddings: Use the embedding matrix as the output matrix too. The state dict then has no `lm_head.weight`,
            like the files that `transformers` saves.

    Raises ConfigError for sizes that do not divide each other.
    """

    def __init__(
        self,
        *,
        vocab_size: Count,
        sequence_length: Count = 2048,
        document_token: Amount | None = None,
        attention: Literal["rows", "documents"] = "rows",
        dim: Count = 192,
        num_layers: Count = 4,
        num_heads: Count = 6,
        num_kv_heads: Amount = 0,
        ffn_dim: Amount = 0,
        rope_theta: Positive = 10_000.0,
        norm_eps: Positive = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = sizes.of_transformer(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        num_kv_heads = num_kv_heads or num_heads
        ffn_dim = ffn_dim or sizes.default_ffn_dim(dim)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.ffn_dim = ffn_dim
        self.sequence_length = sequence_length
        self.document_token = document_token
        self.attention = attention
        if attention == "documents" and document_token is None:
            raise ConfigError("needs the id that starts a document", where="model.document_token", fix="name it")
        self.rope_theta = rope_theta
        self.norm_eps = norm_eps
        self.initial_std = dim**-0.5
        self.model = _Decoder(
            (TiedEmbedding if tie_embeddings else nn.Embedding)(vocab_size, dim),
            nn.ModuleList(TransformerBlock(dim, num_heads, num_kv_heads, ffn_dim, norm_eps) for _ in range(num_layers)),
            nn.RMSNorm(dim, eps=norm_eps),
        )
        self.rotary = RotaryEmbedding(self.head_dim, rope_theta)
        self.lm_head = None if tie_embeddings else nn.Linear(dim, vocab_size, bias=False)
        draw_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits `[B, T, vocab_size]` of the token after each of `tokens` `[B, T]`."""
        logits: Tensor = run_pieces(self, self.stages(), None, (tokens,))
        return logits

    def stages(self) -> list[ModelPiece]:
        """Return the pieces of the forward pass: the embedding, each block, the head behind its norm."""
        head = self.output_layer()
        blocks = [ModelPiece(functools.partial(self._run_piece, block), (block,)) for block in self.model.layers]
        first = ModelPiece(lambda _, inputs: self.model.embed_tokens(inputs.tokens), (self.model.embed_tokens,))
        last = ModelPiece(lambda hidden, _: head(self.model.norm(hidden)), (self.model.norm, head))
        return [first, *blocks, last]

    def output_layer(self) -> nn.Module:
        """Return the layer that makes logits of hidden states; the embedding where both are tied."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def stage_inputs(self, tokens: Tensor) -> TransformerInputs:
        """Find the places of `tokens` `[B, T]` in their rows or documents, which all blocks need."""
        return TransformerInputs(self, tokens)

    def _run_piece(self, block: nn.Module, hidden: Tensor, inputs: TransformerInputs) -> Tensor:
        """Run one block on `[B, T, D]`; a kind of model whose blocks return more takes that here."""
        output: Tensor = block(hidden, inputs.rotary(hidden), *inputs.starts)
        return output

    def init_weights(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialise one parameter in place.

        Matrices are normal with deviation 1 / sqrt(dim), which keeps the variance of what passes through them; those
        that write into the residual stream are divided by sqrt(2 * num_layers), or it would grow with depth (GPT-2).
        """
        if parameter.dim() < 2:
            nn.init.ones_(parameter)
            return
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = self.initial_std / math.sqrt(2 * len(self.model.layers)) if writes_residual else self.initial_std
        nn.init.normal_(parameter, std=std, generator=generator)

    def blocks(self) -> list[nn.Module]:
        """Return the repeated modules: each is sharded, and may be recomputed, as one unit."""
        return list(self.model.layers)

    def tensor_plan(self) -> dict[str, str]:
        """Map modules to the way in which their matrices are split: see `parallel/tensor_plan.py`."""
        attention, feed_forward = "model.layers.*.self_attn", "model.layers.*.mlp"
        return {
            "model.embed_tokens": "vocabulary",
            "model.layers.*layernorm": "sequence",
            f"{attention}.[qkv]_proj": "column",
            f"{attention}.o_proj": "row",
            attention: "gather",
            f"{feed_forward}.gate_proj": "column",
            f"{feed_forward}.up_proj": "column",
            f"{feed_forward}.down_proj": "row",
            feed_forward: "gather",
            "model.norm": "sequence",
            **({} if self.lm_head is None else {"lm_head": "logits"}),
        }

    def tensor_sizes(self) -> dict[str, int]:
        """Return the sizes that the number of processes along the axis `tensor` must divide, by option."""
        return sizes.splits_of_transformer(
            dim=self.model.embed_tokens.embedding_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            ffn_dim=self.ffn_dim,
            sequence_length=self.sequence_length,
        )

    def context_plan(self) -> dict[str, str]:
        """Map modules to what cuts their sequences: see `parallel/context.py`."""
        return {"model.embed_tokens": "cut", "rotary": "cut/-1", "model.layers.*.self_attn.attention": "attention"}

    def num_flops(self, num_rows: int) -> int:
        """Count the floating-point operations of a forward and backward pass over rows of `sequence_length` tokens.

        6 per parameter and token, and 12 * layers * heads * head_dim * T for attention (PaLM,
        arXiv:2204.02311, appendix B). The embedding is a look-up and does not count.
        """
        matrices = sum(parameter.numel() for parameter in self.parameters())
        embedding = self.model.embed_tokens
        matrices -= 0 if self.lm_head is None else embedding.weight.numel()
        attention = 12 * len(self.model.layers) * embedding.embedding_dim * self.sequence_length
        return num_rows * self.sequence_length * (6 * matrices + attention)

    def export_config(self) -> dict[str, Any]:
        """Return the `config.json` with which `transformers` builds the same network."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.model.embed_tokens.num_embeddings,
            "hidden_size": self.model.embed_tokens.embedding_dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": len(self.model.layers),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.sequence_length,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": self.lm_head is None,
            "initializer_range": self.initial_std,
            "bos_token_id": self.document_token,
            "eos_token_id": self.document_token,
            "pad_token_id": None,
            "torch_dtype": "float32",
            "use_cache": True,
        }


class TransformerInputs:
    """Tokens with their rotary tables and the starts of their documents, computed once for all blocks of a stage."""

    def __init__(self, model: Transformer, tokens: Tensor) -> None:
        self.tokens = tokens
        self.starts: tuple[Tensor, ...] = ()  # none rather than None, which an engine would look at in each call
        self._positions = torch.arange(tokens.shape[1], device=tokens.device)
        if model.attention == "documents" and model.document_token is not None:
            self._positions, first_places = locate_documents(tokens, model.document_token)
            self.starts = (first_places,)
        self._make_tables = model.rotary
        self._tables: RotaryTables | None = None

    def rotary(self, like: Tensor) -> RotaryTables:
        """Return the rotary tables of the tokens, in the dtype that `like` had when they were first asked for."""
        if self._tables is None:
            self._tables = self._make_tables(self._positions, like)
        return self._tables


class _Decoder(nn.Module):
    """Container of what Llama's state dict keeps below `model.`; `Transformer.forward` runs it."""

    def __init__(self, embed_tokens: nn.Embedding, layers: nn.ModuleList, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm


class TiedEmbedding(nn.Embedding):
    """Matrix for both ends (Press and Wolf 2017, arXiv:1608.05859): tokens to vectors, vectors to logits."""

    def forward(self, values: Tensor) -> Tensor:
        """Map `[B, T]` int64 to `[B, T, D]`, or `[B, T, D]` to `[B, T, vocab_size]`."""
        return F.linear(values, self.weight) if values.is_floating_point() else super().forward(values)


class TransformerBlock(nn.Module):
    """Attention and feed-forward part, each added to the residual stream `[B, T, D]` behind its norm."""

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, ffn_dim: int, norm_eps: float, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim, eps=norm_eps)
        self.self_attn = Attention(dim, num_heads, num_kv_heads, norm_eps if qk_norm else None)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = FeedForward(dim, ffn_dim)

    def forward(self, hidden: Tensor, rotary: RotaryTables, starts: Tensor | None = None) -> Tensor:
        """Map `[B, T, D]` to the same shape. `starts`: see `CausalAttention`."""
        attended: Tensor = hidden + self.self_attn(self.input_layernorm(hidden), rotary, starts)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


class Attention(nn.Module):
    """Causal grouped-query attention: each of K key-value heads serves H / K query heads.

    `norm_eps`: of the norms of each head's query and key, as Qwen3 has them; None: there are none.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.attention = CausalAttention()
        has_norms = norm_eps is not None
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if has_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if has_norms else nn.Identity()

    def forward(self, hidden: Tensor, rotary: RotaryTables, starts: Tensor | None = None) -> Tensor:
        """Map `[B, T, D]` to the same shape. `starts`: see `CausalAttention`."""
        query = rotate(self.q_norm(self._split_heads(self.q_proj(hidden))), rotary)
        key = rotate(self.k_norm(self._split_heads(self.k_proj(hidden))), rotary)
        value = self._split_heads(self.v_proj(hidden))
        attended = self.attention(query, key, value, *(() if starts is None else (starts,)))
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Split `[B, T, heads * E]` into `[B, heads, T, E]`."""
        batch, num_tokens, width = projected.shape
        return projected.view(batch, num_tokens, width // self.head_dim, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[B, T, D]` to the same shape."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class RotaryEmbedding(nn.Module):
    """Turns positions into cosines and sines of the rotation angles. A module, so that `context_plan` can name it."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor, like: Tensor) -> RotaryTables:
        """Return tables `[..., T, E]` at positions `[..., T]`, in the dtype of `like`."""
        # Angles are computed in fp32: bf16 cannot tell neighbouring positions of a long sequence apart.
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=torch.float32) / self.head_dim
        angles = (positions.float().unsqueeze(-1) * (1.0 / self.theta**exponents)).repeat(*[1] * positions.dim(), 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotate `[B, heads, T, E]` by position; element i pairs with i + E/2, as in Hugging Face checkpoints."""
    cosines, sines = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
