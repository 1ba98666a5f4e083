"""What transforms register runs when and in the order that their places in a strategy say."""

import contextlib

from torch import nn

from kftrain.parallel.distributed import Agreement, Distributed


def registered(log):
    """Two transforms that register all there is, each under its name."""
    distributed = Distributed(nn.Linear(1, 1), None)
    for name, numbers in (("outer", [1.0]), ("inner", [2.0, 3.0])):

        @contextlib.contextmanager
        def around(name=name):
            log.append(f"{name} enters")
            yield
            log.append(f"{name} leaves")

        distributed.when_filled.append(lambda name=name: log.append(f"{name} begins"))
        distributed.around_step.append(around)
        distributed.before_micro_batch.append(lambda is_last, name=name: log.append((name, is_last)))
        distributed.after_backward.append(lambda name=name: log.append(f"{name} hands over"))
        distributed.agreements.append(
            Agreement(lambda numbers=numbers: numbers, lambda sums, name=name: log.append((name, sums)))
        )
    return distributed


def test_the_transform_that_came_last_stands_nearest_to_the_computation():
    log = []
    distributed = registered(log)
    distributed.begin()
    with distributed.computing():
        log.append("computes")
    distributed.hand_over()
    assert log == [
        *("outer begins", "inner begins", "outer enters", "inner enters", "computes", "inner leaves", "outer leaves"),
        *("inner hands over", "outer hands over"),
    ]


def test_a_transform_is_told_of_a_micro_batch_only_where_something_changes():
    log = []
    distributed = registered(log)
    for is_last in (False, False, True, True, False):
        distributed.accumulate(is_last)
    assert log == [(name, is_last) for is_last in (False, True, False) for name in ("outer", "inner")]


def test_the_numbers_of_all_transforms_travel_at_once_and_each_gets_its_sums():
    log, sent = [], []

    def double(values):
        sent.append(values)
        return [2 * value for value in values]

    registered(log).agree(double)
    Distributed(nn.Linear(1, 1), None).agree(double)
    assert sent == [[1.0, 2.0, 3.0], []], "the loop agrees in each step, whether or not a transform has numbers"
    assert log == [("outer", [2.0]), ("inner", [4.0, 6.0])]
