"""A loader chooses its settings by what it measures: on recorded traces, with a virtual clock, against fixed settings.

The traces are those of a real loader on an S3 server that was slowed down: `helpers/record_traces.py`.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import simulated_loader
from helpers.simulated_loader import Simulated, Trace, list_grid, run_fixed
from hypothesis import given
from hypothesis import strategies as st

from kftrain.data.counters import Counters
from kftrain.data.settings import DataConfig
from kftrain.data.tuning import Limits, Tuner, Tuning, choose_tuning
from kftrain.train import reading
from kftrain.train.reading import choose_tunings

TRACES = Path(simulated_loader.__file__).parent / "traces"
NAMES = ["constant", "bursty", "slow_start", "slow_store", "slow_decode"]


def automatic(kind="threads", max_bytes=1 << 30):
    """The first settings, and their limits, where everything is left to the loader on a machine with 16 processors."""
    first, most = choose_tunings(DataConfig(worker_kind=kind), True, 15)
    return first, Limits(most, 1, max_bytes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_on_each_trace_the_loader_comes_within_5_percent_of_the_best_fixed_setting(name):
    trace = Trace.read(TRACES / f"{name}.json")
    first, limits = automatic()
    simulated = Simulated(trace, first, limits)
    best = min(run_fixed(trace, tuning) for tuning in list_grid(trace, limits))
    assert simulated.run() <= 1.05 * best
    assert len(simulated.lines) <= 12, "it comes to rest"
    assert simulated.tuning.kind == "threads"
    assert run_fixed(trace, first) > 1.2 * best or name == "constant", "a trace that needs no tuning shows nothing"


def test_workers_that_hold_the_lock_become_processes_where_they_may():
    trace = replace(Trace.read(TRACES / "slow_decode.json"), gil_share=0.9)
    first, limits = automatic("auto")
    simulated = Simulated(trace, first, limits)
    best = min(run_fixed(trace, tuning) for tuning in list_grid(trace, limits))
    assert simulated.run() <= best + 2.0 and simulated.tuning.kind == "processes", "they start once, in a second"
    threads = Simulated(trace, *automatic())
    assert threads.run() > 2 * best and threads.tuning.kind == "threads" and threads.tuning.workers <= 3


@pytest.mark.parametrize(("workers", "num_cpus", "most"), [(4, 16, 15), ("auto", 3, 2), ("auto", 16, 2)])
def test_workers_that_hold_the_lock_become_processes_also_where_their_number_cannot_grow(workers, num_cpus, most):
    trace = replace(Trace.read(TRACES / "slow_decode.json"), gil_share=0.9, num_cpus=num_cpus)
    first, most = choose_tunings(DataConfig(worker_kind="auto", workers=workers), True, most)
    simulated = Simulated(trace, first, Limits(most))
    simulated.run()
    assert first.kind == "threads" and simulated.tuning.kind == "processes"


def test_no_more_is_read_ahead_while_the_first_ones_start_than_is_needed_later():
    trace = Trace.read(TRACES / "slow_decode.json")
    first, limits = automatic("processes")
    simulated = Simulated(trace, first, limits)
    simulated.run()
    assert first.kind == "processes" and len(simulated.lines) <= 4 and simulated.tuning.steps <= 40


def test_workers_that_wait_for_processors_or_for_something_else_stay_threads():
    trace = replace(Trace.read(TRACES / "slow_decode.json"), num_cpus=1)
    first, most = choose_tunings(DataConfig(worker_kind="auto"), True, 4)
    simulated = Simulated(trace, first, Limits(most))
    simulated.run()
    assert simulated.tuning.kind == "threads" and simulated.tuning.workers == 4
    waiting = Counters(decode_seconds=40.0, busy_seconds=1.0, num_made=40, num_steps=40, seconds=40.0, stall_seconds=30)
    chosen = choose_tuning(first, waiting, Limits(most), 1, 0.25)
    assert chosen.kind == "threads" and chosen.workers == 4, "other threads do not make them wait for a second"
    locked = replace(waiting, busy_seconds=20.0)
    assert choose_tuning(first, locked, Limits(most), 1, 0.25).kind == "processes"
    fast = replace(locked, decode_seconds=4.0, busy_seconds=2.0, read_seconds=30.0)
    assert choose_tuning(first, fast, Limits(most), 1, 0.25).kind == "threads", "reading is what is waited for"


def test_steps_ahead_stay_within_the_budget_and_a_quarter_of_the_free_memory():
    trace = Trace.read(TRACES / "slow_store.json")
    first, limits = automatic(max_bytes=5 * trace.step_bytes)
    simulated = Simulated(trace, first, limits)
    simulated.run()
    assert simulated.tuning.steps == 5
    now, counters = Tuning(40, 2, 1), Counters(num_steps=100, seconds=10.0)
    assert choose_tuning(now, counters, Limits(now, 1, 5 << 20), 1 << 20, 0.1) == replace(now, steps=5)
    assert choose_tuning(now, counters, Limits(now, 40, 5 << 20), 1 << 20, 0.1) == now, "40 were asked for"
    counters = Counters(num_made=100)
    tuner = Tuner(now, Limits(now, 1), counters, lambda: 40 << 20)
    tuner.take(1 << 20)
    counters.num_steps, counters.seconds = 64, 10.0
    tuner.computed.append(0.1)
    assert tuner.take(1 << 20).startswith("data: steps 40 -> 20; 0% "), "a quarter of 40 MiB, and of the 40 that it has"


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_steps_ahead_come_to_rest_while_free_memory_moves(noise):
    chance, counters, step_bytes = random.Random(1), Counters(), 4 << 20
    limits = Limits(Tuning(256, 0, 32))

    def measure_free_bytes():
        return (3e9 - tuner.now.steps * step_bytes) * (1 + chance.uniform(-noise, noise))

    tuner, choices = Tuner(Tuning(2), limits, counters, measure_free_bytes), []
    for number in range(6400):
        waited = 0.2 if number % 16 == 0 else 0.0
        cost = Counters(step_bytes, 0.05, 0.05, num_made=1, seconds=0.1 + waited, stall_seconds=waited)
        counters.add(cost)
        tuner.computed.append(0.1)
        if tuner.take(step_bytes):
            choices.append(tuner.now.steps)
        counters.num_steps += 1
    assert len(choices) <= 16 and choices == sorted(choices), choices
    assert 0.23 <= choices[-1] * step_bytes / 3e9 <= 0.3


def test_an_evaluation_after_every_20_steps_hides_no_need_of_workers():
    counters, most = Counters(), Tuning(256, 16, 32)
    tuner = Tuner(Tuning(2, 2, 1), Limits(most), counters, lambda: 1e11)
    for number in range(600):  # decoding takes 0.4 s a step, the training 0.05 s, an evaluation 30 s
        wait, pause = max(0.0, 0.4 / tuner.now.workers - 0.05), 30.0 if number % 20 == 0 else 0.0
        counters.add(Counters(100, 0.001, 0.001, 0.4, 0.4, num_made=1, seconds=wait, stall_seconds=wait))
        tuner.take(1000)
        counters.num_steps += 1
        counters.seconds += 0.05 + pause
        tuner.computed.append(0.05 + pause)
    assert tuner.now.workers >= 8


def test_a_fixed_number_of_workers_reads_at_once_and_requests_count_without_workers():
    first, most = choose_tunings(DataConfig(workers=8), True, 15)
    assert first.workers == most.workers == 8 and first.requests == 8
    first, most = choose_tunings(DataConfig(workers=0, requests=8), True, 15)
    assert first.requests == most.requests == 8 and first.workers == most.workers == 0
    assert choose_tunings(DataConfig(), False, 15) == (Tuning(2), Tuning(256, 0, 32))


def test_workers_that_are_processes_fit_into_a_quarter_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(reading, "num_cpus", lambda: 12)
    monkeypatch.setattr(reading, "read_available_bytes", lambda: 8e9)
    assert [reading.count_usual_workers(kind) for kind in ("threads", "processes", "auto")] == [11, 6, 6]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [reading.count_usual_workers(kind) for kind in ("threads", "processes", "auto")] == [2, 1, 1]
    monkeypatch.setattr(reading, "read_available_bytes", lambda: math.inf)
    assert reading.count_usual_workers("processes") == 2


seconds = st.floats(0, 10)
tunings = st.builds(Tuning, st.integers(1, 300), st.integers(0, 20), st.integers(1, 40))
counters = st.builds(
    Counters,
    read_seconds=seconds,
    slowest_seconds=seconds,
    decode_seconds=seconds,
    busy_seconds=seconds,
    num_made=st.integers(0, 100),
    num_steps=st.integers(1, 100),
    seconds=st.floats(1e-3, 100),
    stall_seconds=seconds,
)


@given(tunings, tunings, counters, st.integers(1, 1 << 34), st.floats(0, 1e12), seconds)
def test_a_choice_is_never_beyond_its_limits_and_never_less_but_for_memory(
    now, most, measured, step_bytes, free, compute
):
    measured.stall_seconds = min(measured.stall_seconds, measured.seconds)
    most = Tuning(*(max(own, bound) for own, bound in zip(vars(now).values(), vars(most).values(), strict=True)))
    chosen = choose_tuning(now, measured, Limits(most, 1, free), step_bytes, compute)
    for name in ("steps", "workers", "requests"):
        own, found, bound = (getattr(tuning, name) for tuning in (now, chosen, most))
        assert (found >= own or name == "steps") and found <= bound
        assert found <= own or measured.stall_seconds >= 0.01 * measured.seconds
    fits = max(1, int(free // step_bytes))
    assert chosen.steps <= max(fits, now.steps) and (
        chosen.steps >= now.steps or chosen.steps == fits < 0.8 * now.steps
    )
    assert choose_tuning(now, measured, Limits(now, now.steps), step_bytes, compute) == now, "what is fixed stays"


def test_a_choice_is_told_on_one_line_with_what_it_is_based_on():
    counters = Counters()
    tuner = Tuner(*automatic(), counters, lambda: math.inf)
    assert tuner.take(1 << 20) == "", "nothing is known yet"
    counters.add(Counters(0, 2.0, 0.3, 0.5, 0.5, num_made=10, num_steps=10, seconds=2.0, stall_seconds=1.0))
    tuner.computed.append(0.1)
    assert tuner.take(1 << 20) == (
        "data: steps 2 -> 5, requests 1 -> 3; 50% of 2 s was waiting; a step has 1,048,576 bytes and takes 0.2 s to "
        "read, 0.05 s to decode, 0.1 s to compute"
    )
    assert tuner.now == Tuning(math.ceil(0.35 / 0.1) + 1, 2, math.ceil(0.3 / 0.1))
    assert tuner.take(1 << 20) == ""
