"""Buckets of gradients under ddp: sums over the processes, which travel in the format of `precision.reduce`."""

from types import SimpleNamespace

import pytest
import torch

from kftrain.parallel import replicas


class Done:
    """Three processes with the same gradients have exchanged them."""

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bucket_is_the_sum_of_what_was_sent_in_the_format_of_the_exchange(monkeypatch, dtype):
    sent = []

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        assert op == torch.distributed.ReduceOp.SUM
        sent.append(tensor.dtype)
        tensor.mul_(3)
        return Done()

    monkeypatch.setattr(replicas.dist, "all_reduce", all_reduce)
    gradients = torch.tensor([1.0, -0.25, 1.0 + 2**-12])
    expected = (gradients.to(dtype) * 3).float()
    total = replicas._sum_bucket(SimpleNamespace(buffer=gradients.clone), None, dtype, None).wait()
    assert sent == [dtype] and total.dtype == torch.float32 and torch.equal(total, expected)
