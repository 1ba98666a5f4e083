"""A Llama of Hugging Face's own class, made from scratch: what the script trains and kftrain evaluates."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class TinyLlama(nn.Module):
    """Tokens `[rows, sequence_length]` -> logits `[rows, sequence_length, vocab_size]`."""

    def __init__(self, vocab_size: int, sequence_length: int, document_token: int = 0) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=sequence_length, use_cache=False, **sizes)
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens).logits
        return logits
