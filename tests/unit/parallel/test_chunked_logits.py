"""Losses by chunks against torch's cross-entropy of whole logits."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn

from kftrain.errors import ConfigError, UserCodeError
from kftrain.models.output import ModelOutput
from kftrain.parallel.chunked_logits import ChunkedLogits, compute_within, end_forward, find_output_layer

ROWS, PLACES, DIM, CLASSES, PADDING = 3, 11, 8, 37, 5


def inputs(dtype=torch.float32, with_bias=False):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, PLACES, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, DIM, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES, generator=generator).to(dtype).requires_grad_() if with_bias else None
    targets = torch.randint(0, CLASSES, (ROWS, PLACES), generator=generator)
    targets[0, 4:] = PADDING
    return [hidden, weight, *([bias] if with_bias else [])], targets


def gradients_of(loss, tensors):
    return torch.autograd.grad(loss / 7, tensors)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 33, 100])
def test_sums_and_their_gradients_are_those_of_whole_logits(num_tokens, with_bias):
    tensors, targets = inputs(with_bias=with_bias)
    logits = F.linear(*tensors)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    chunked = ChunkedLogits(*tensors[:2], tensors[2] if with_bias else None, num_tokens)
    found = chunked.sum_cross_entropy(targets, PADDING)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)
    for mine, wanted in zip(gradients_of(found, tensors), gradients_of(whole, tensors), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("error")  # torch warns where it takes all logits at once
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_targets_of_any_integers_are_summed_by_chunks(dtype):
    tensors, targets = inputs()
    chunked = ChunkedLogits(*tensors, None, 4)
    assert torch.equal(
        chunked.sum_cross_entropy(targets.to(dtype), PADDING), chunked.sum_cross_entropy(targets, PADDING)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_can_be_weighted_and_are_fp32(dtype):
    tensors, targets = inputs(dtype)
    weights = torch.linspace(0.0, 2.0, ROWS * PLACES).view(ROWS, PLACES)
    logits = F.linear(*tensors).float()
    whole = (F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none") * weights).sum()
    terms = ChunkedLogits(*tensors, None, 4).cross_entropy(targets)
    assert terms.dtype == torch.float32 and terms.shape == targets.shape
    torch.testing.assert_close((terms * weights).sum(), whole, rtol=1e-6, atol=0)
    mine, wanted = (gradients_of(loss, tensors) for loss in ((terms * weights).sum(), whole))
    tolerance = 1e-6 if dtype == torch.float32 else 0.01  # each chunk's gradient of the matrix is rounded to bf16
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_sum_over_bf16_is_not_rounded_to_it():
    tensors, targets = inputs(torch.bfloat16)
    whole = F.cross_entropy(F.linear(*tensors).float().flatten(0, 1), targets.flatten(), reduction="sum")
    found = ChunkedLogits(*tensors, None, 4).sum_cross_entropy(targets, -100)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)


def test_scores_are_those_of_whole_logits():
    tensors, targets = inputs()
    losses, guesses = ChunkedLogits(*tensors, None, 4).score(targets)
    logits = F.linear(*tensors)
    torch.testing.assert_close(losses, F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none"))
    assert torch.equal(guesses, logits.argmax(-1))


class Tempered(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) / 3


class Headed(nn.Module):
    """A model whose output layer is `head`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)

    def output_layer(self):
        return self.head


def test_a_hook_that_would_see_the_loss_in_place_of_logits_is_refused():
    model = Headed()
    assert find_output_layer(model, []) is model.head
    model.register_forward_hook(lambda module, inputs, logits: logits.tanh())
    with pytest.raises(ConfigError, match=r"train\.loss_chunk_tokens: a forward hook of Headed would be given"):
        find_output_layer(model, [])


class Returning(torch.nn.Module):
    """A model that always returns the same."""

    def __init__(self, returned):
        super().__init__()
        self.returned = returned
        end_forward(self)

    def forward(self):
        return self.returned


@pytest.mark.parametrize("wrap", [lambda logits: logits, ModelOutput], ids=["plain", "with an auxiliary loss"])
def test_a_model_that_makes_logits_beside_its_output_layer_is_refused(wrap):
    whole, by_chunks = Returning(wrap(torch.ones(2, 3))), Returning(wrap(ChunkedLogits(*inputs()[0], None, 4)))
    assert compute_within(by_chunks, (), lambda returned: 7) == 7
    with pytest.raises(UserCodeError, match=r"model\.forward: forward makes logits without calling its output_layer"):
        compute_within(whole, (), lambda returned: 7)
    assert whole() is whole.returned  # who calls the model by itself is given whole logits, after an error too
