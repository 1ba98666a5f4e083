import torch

from kftrain.train.optimizer import build_optimizer
from kftrain.train.settings import OptimizerConfig


def test_an_update_equals_torchs_adamw_with_decay_on_matrices_only():
    torch.manual_seed(0)
    ours = torch.nn.Linear(4, 3)
    theirs = torch.nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    mine = build_optimizer(ours, config)
    other = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.5}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for _ in range(5):
        data = torch.randn(8, 4)
        for model, optimizer in ((ours, mine), (theirs, other)):
            model.zero_grad()
            model(data).square().mean().backward()
            optimizer.step(*([torch.zeros(())] if optimizer is mine else []))
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_the_rate_is_set_on_every_group():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimizerConfig())
    optimizer.set_learning_rate(0.25)
    assert [group["lr"] for group in optimizer.members[0].param_groups] == [0.25, 0.25]
