"""A step of a pipeline in time: torch's own order of actions, with what each costs. Sending costs nothing."""

import types

from torch.distributed.pipelining.schedules import get_schedule_class

from kftrain.parallel import stages

COSTS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Of a forward pass, of a backward pass for inputs, for weights, and for both, of a stage that costs 1."""


def order_of(name, num_micro_batches, num_processes):
    """What each process does, in its order: (stage, kind, micro batch)."""
    count = stages.SCHEDULES[name].stages_per_process
    fakes = [
        types.SimpleNamespace(
            group_size=num_processes, group_rank=0, num_stages=count * num_processes, stage_index=number, submod=None
        )
        for number in stages.list_stages(name, 0, num_processes)
    ]
    schedule = get_schedule_class(stages.SCHEDULES[name].torch_name)(
        fakes[0] if count == 1 else fakes, num_micro_batches, scale_grads=False
    )
    return [flat(schedule.pipeline_order[rank]) for rank in range(num_processes)]


def flat(actions):
    found = [each for action in actions if action for each in action.sub_actions or (action,)]
    found = [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in found]
    # torch's picture of 1F1B gives the last stage's forward passes numbers from 1 on.
    shift = min(micro for _, kind, micro in found if kind == "F")
    return [(stage, kind, micro - shift * (kind == "F")) for stage, kind, micro in found if kind in COSTS]


def needs(action, last):
    """The actions that must have ended: any one of each tuple."""
    stage, kind, micro = action
    if kind == "F":
        return [((stage - 1, "F", micro),)] if stage else []
    if kind == "W":
        return [((stage, "I", micro),)]
    after = [((stage + 1, "B", micro), (stage + 1, "I", micro))] if stage < last else []
    return [((stage, "F", micro),), *after]


def simulate(orders, costs):
    """The time at which the last process ends, and how long each of them works. `costs`: of each stage."""
    ends, clocks, works, left = {}, [0.0] * len(orders), [0.0] * len(orders), [list(order) for order in orders]
    while any(left):
        before = sum(map(len, left))
        for process, actions in enumerate(left):
            while actions:
                alternatives = needs(actions[0], len(costs) - 1)
                if not all(any(other in ends for other in each) for each in alternatives):
                    break
                action = actions.pop(0)
                ready = max((ends[other] for each in alternatives for other in each if other in ends), default=0.0)
                cost = COSTS[action[1]] * costs[action[0]]
                ends[action] = clocks[process] = max(ready, clocks[process]) + cost
                works[process] += cost
        assert sum(map(len, left)) < before, "the processes wait for each other"
    return max(clocks), works
