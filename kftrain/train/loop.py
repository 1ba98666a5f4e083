"""The training loop: from a committed checkpoint, or from nothing, to the last step.

While a step is computed there is one small exchange: how many loss terms the next step has, whether anybody was told to
stop, whether anybody's checkpoint is still being written or it is time for one. From it all processes take the same
decision at the same step, so that none enters a collective alone. What a step has measured is looked at after the next
one was asked for, so that an accelerator never waits for the host; or at once, where it is recorded or a checkpoint
follows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kftrain.checkpoint import load
from kftrain.checkpoint.save import CheckpointWriter
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.data.decoding import BadSample
from kftrain.data.expanded import ValidationRows
from kftrain.data.loader import StepBatch, TrainLoader
from kftrain.errors import DataError, DivergedError, FailureClass, Preempted, error_from_dict
from kftrain.evaluate.score import total_metrics
from kftrain.parallel.world import World
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run.advice import make_fix
from kftrain.tasks.user_metrics import metrics_of
from kftrain.train import loss_scale
from kftrain.train.best import BestCheckpoint
from kftrain.train.engine import Engine, StepNumbers
from kftrain.train.recorder import Recorder
from kftrain.train.saves import Saves
from kftrain.train.settings import OptimizerConfig
from kftrain.train.step import ask_metrics, seed_step
from kftrain.train.usage import DataMetrics


@dataclass(frozen=True)
class NextStep:
    """The next step's batch, and what all processes have agreed on: a flag is set where it is set on any of them."""

    batch: StepBatch | None
    """This process's batch; None after the last step, on all processes."""
    num_terms: int
    """Number of its loss terms, over all processes of an island."""
    stops: bool = False
    """True where the attempt ends before it."""
    is_saving: bool = True
    """True while a checkpoint is being written, or may be: islands that are apart do not know."""
    is_overdue: bool = False
    """True where that takes longer than it may."""
    is_due: bool = False
    """True when the clock says that it is time for a checkpoint."""


class Loop:
    """Takes the steps of one attempt, with their records, evaluations and checkpoints. Every method is collective."""

    def __init__(
        self,
        config: Config,
        world: World,
        engine: Engine,
        loader: TrainLoader,
        validation: ValidationRows,
        writer: CheckpointWriter,
        recorder: Recorder,
        stop: StopRequest,
        liveness: Liveness,
    ) -> None:
        self._config = config
        self._world = world
        self._engine = engine
        self._loader = loader
        self._validation = validation
        self._recorder = recorder
        self._stop = stop
        self.best = BestCheckpoint(config, world, engine.task.loss_metric if config.checkpoint.keep_best else "")
        self._sizes = config.train.batch_sizes
        self._saves = Saves(writer, config.checkpoint, self._sizes.count_samples, world.is_main, self.best.forget)
        self._liveness = liveness
        self._has_quorum = config.train.outer.quorum > 0
        self._bad_samples: list[BadSample] = []
        """Those of this process that the others do not know of yet."""
        self._left_out = LeftOutSamples(world, config.data.max_bad_samples)
        # The writer reads these when it commits: the set itself, which grows, and the selection of that moment.
        writer.bad_samples = self._left_out.numbers
        writer.keep_every = config.checkpoint.keep_every
        writer.selected = lambda: self.best.selection
        self._data_metrics = DataMetrics(loader.counters, world, config.data.cache_dir)
        # As the device has it, in fp32: 0.1 is a little larger there, and would never be reached.
        self._least_scale = float(np.float32(config.precision.loss_scale.minimum))
        self._num_nonfinite = 0
        self._problem: dict[str, Any] | None = None
        """The error of this island, which training has not ended with yet."""
        self._last_recorded = 0
        self._pending: tuple[int, StepNumbers] | None = None
        """Number of the last step, and its numbers on their way to the host; None once they were looked at."""
        self._local_loss = 0.0
        self._gradient_norm = 0.0
        self._step_metrics: dict[str, float] = {}

    def resume(self, loaded: load.Loaded | None) -> int:
        """Restore the engine's state; return the number of steps that are done. Raises CheckpointError."""
        if loaded is None:
            return 0
        # Parts first: reading would fill what both have and leave the rest as it was. Tensors are filled in place, in
        # the layout of now, so that the checkpoint may come from any other one.
        parts = loaded.manifest.parts
        self._engine.state.require_same(parts, loaded.uri)
        missing, dropped = self._engine.state.list_missing(parts), self._engine.state.list_dispensable(parts)
        if missing and self._world.is_main:
            to_log(f"the checkpoint has no {', '.join(missing)}, which begins anew")
        if dropped and self._world.is_main:
            to_log(f"the checkpoint's {', '.join(dropped)} are left out")
        state = {name: part for name, part in self._engine.state.save().items() if name not in missing}
        load.load_into(state, loaded.uri, loaded.manifest.files)
        self._engine.state.load(state)
        self._engine.state.begin(missing, loaded.manifest.step)
        self._left_out.resume(loaded.manifest.bad_samples)
        self.best.resume(loaded.manifest.selection)
        return loaded.manifest.step

    def run(self, first_step: int) -> int:
        """Take all steps from `first_step` on; return the number of steps that are done, the last one committed.

        Fewer than all of them where there was no improvement for long enough (`best.is_enough`).

        Raises Preempted after a commit when a stop was requested, DivergedError when the loss stays non-finite,
        RetryableError when too many checkpoints in a row cannot be written.
        """
        with self._liveness.mark_watched():
            return self._take_steps(first_step)

    def _take_steps(self, first_step: int) -> int:
        self._last_recorded = done = first_step
        if self.best.is_enough:
            self.best.print_result(done)
            return done
        with contextlib.closing(self._loader.steps(first_step, self._config.train.steps - first_step)) as batches:
            upcoming, _ = self._look_ahead(batches, [])
            while upcoming.batch is not None:
                if upcoming.stops:
                    with self._liveness.mark_resting():
                        self._stop_after_commit(done)
                upcoming = self._take_step(done, upcoming.batch, upcoming.num_terms, batches)
                done += 1
                if upcoming.batch is not None:  # the last save of the attempt settles the one before by itself
                    self._saves.go_on(upcoming.is_saving, upcoming.is_overdue)
                self._finish_step(done, upcoming)
                if self.best.is_enough:
                    break
        self.best.print_result(done)
        return done

    def _look_ahead(self, batches: Iterator[StepBatch], values: list[float]) -> tuple[NextStep, list[float]]:
        """Agree on the next step with all processes; return it, and the sums of `values` over them."""
        # One exchange for everything: as a sum a flag is set for all where one has set it. Every decision that could
        # differ (a signal, a clock, a thread's end) is read here once, and nowhere else in the step.
        batch, mesh = next(batches, None), self._engine.mesh
        num_terms = batch.num_terms if batch is not None and mesh.counts_rows else 0
        self._bad_samples += [] if batch is None else batch.bad_samples
        if self._has_quorum:
            (terms, *sums), _ = mesh.sum_both([num_terms, *values, *self._list_flags()], [])
            self._ask_to_meet(sums[len(values) :])
            return NextStep(batch, int(terms)), sums[: len(values)]
        (terms, *sums), flags = mesh.sum_both([num_terms, *values], self._list_flags())
        return self._decide(NextStep(batch, int(terms)), flags), sums

    def _ask_to_meet(self, flags: list[float]) -> None:
        """Want to meet all islands where they have to decide together. `flags`: of this island, summed."""
        stops, _, _, is_due, has_bad_samples = flags
        assert self._engine.islands is not None
        self._engine.islands.wants_meeting = stops + is_due + has_bad_samples > 0

    def _list_flags(self) -> list[float]:
        """List what this process wants or knows, for `_decide`."""
        saves = self._saves
        return [*map(float, (self._stop.requested, saves.busy, saves.overdue, saves.due, bool(self._bad_samples)))]

    def _decide(self, upcoming: NextStep, flags: list[float]) -> NextStep:
        """Return the next step with what is set by the flags of all processes, summed. Collective."""
        stops, is_saving, is_overdue, is_due, has_bad_samples = (flag > 0 for flag in flags)
        if has_bad_samples:
            self._left_out.take(self._bad_samples)
            self._bad_samples = []
        return replace(upcoming, stops=stops, is_saving=is_saving, is_overdue=is_overdue, is_due=is_due)

    def _take_step(self, step: int, batch: StepBatch, num_terms: int, batches: Iterator[StepBatch]) -> NextStep:
        """Ask for one step, look at the numbers of the one before, and return what was agreed for the next."""
        answers: list[NextStep] = []

        def agree(values: list[float]) -> list[float]:
            upcoming, sums = self._look_ahead(batches, values)
            answers.append(upcoming)
            return sums

        mesh = self._engine.mesh
        seed_step(self._config.run.seed, step, mesh.data_rank, mesh.world.device)
        self._engine.set_learning_rate(self._find_rate(step))
        result = self._engine.step(batch, num_terms, agree)
        self._note_last_step()  # the step before this one: the device has this one to go on with while the host reads
        self._pending = step + 1, StepNumbers(result)
        (upcoming,) = answers
        if self._has_quorum and self._engine.islands is not None and self._engine.islands.has_met:
            upcoming = self._decide(upcoming, self._world.sum(self._list_flags()))
        return upcoming

    def _find_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. It is computed anew for each, and is no state."""
        optimizer = self._config.optimizer
        rate = compute_learning_rate(optimizer, step, self._config.train.steps)
        if optimizer.reference_batch_size is not None:
            rate *= compute_batch_factor(optimizer, self._sizes.find_size(step))
        return rate

    def _read_last_step(self) -> None:
        """Read what the last step has measured. Raises DivergedError on all processes."""
        self._note_last_step()
        if self._engine.mesh.shape.islands > 1:
            problem = next(filter(None, self._world.gather(self._problem)), None)
            if problem is not None:
                raise error_from_dict(problem)

    def _note_last_step(self) -> None:
        """Read what the last step has measured.

        Raises DivergedError where all processes share the norm. Islands have norms of their own, and tell each other
        where all of them stop for something else.
        """
        if self._pending is None:
            return
        done, measured = self._pending
        self._pending = None
        self._local_loss, self._gradient_norm, self._step_metrics = measured.read()
        minimum = self._least_scale
        scale = self._step_metrics.get(loss_scale.PART, 0.0)
        if math.isfinite(self._gradient_norm):
            self._num_nonfinite = 0
        elif scale <= minimum:  # above it the scale was too large, and is halved by now
            self._num_nonfinite += 1
        if self._num_nonfinite > self._config.train.max_nonfinite_steps:
            at = f" at the least loss scale, {minimum:g}," if scale else ""
            error = DivergedError(
                f"the gradient norm of step {done}{at} is not finite",
                value=self._gradient_norm,
                fix=make_fix(FailureClass.DIVERGED),
            )
            if self._engine.mesh.shape.islands == 1:
                raise error
            self._problem = error.to_dict()

    def _finish_step(self, done: int, upcoming: NextStep) -> None:
        config = self._config
        # First the record, then the evaluation, then the checkpoint, which holds both: so a resume has them, too.
        last = done == config.train.steps
        if last or done % config.train.log_interval_steps == 0:
            self._read_last_step()
            if last and self._step_metrics.get(loss_scale.NUM_SKIPPED) == done and self._world.is_main:
                to_log(f"warning: all {done} steps were skipped in fp16: the weights are those of the beginning")
            self._record(done)
        improved = False
        if config.evaluate.interval_steps and (done % config.evaluate.interval_steps == 0 or last):
            improved = self._validate(done)
        last = last or self.best.is_enough
        checkpoint = config.checkpoint
        stays = checkpoint.keep_every and done % checkpoint.keep_every == 0
        due = done % checkpoint.interval_steps == 0 or (upcoming.is_due and not upcoming.is_saving)
        if last or improved or stays or due:
            self._read_last_step()  # a training that diverges saves nothing more
            with self._liveness.mark_resting():  # storage may be slow
                if stays:  # it is not left out because the one before is being written
                    self._saves.settle()
                self._save(done, last, upcoming.is_saving and not improved and not stays)

    def _record(self, done: int) -> None:
        mesh, norm = self._engine.mesh, self._gradient_norm
        (loss,) = mesh.sum_of_losses([self._local_loss])
        if mesh.shape.islands > 1:  # means over islands, which have losses and norms of their own
            loss /= mesh.shape.islands
            (norm,) = self._world.sum([norm / self._world.size])
        values = {"loss": loss, "learning_rate": self._find_rate(done - 1), "gradient_norm": norm}
        values |= self._step_metrics
        if self._left_out.numbers:
            values["bad_samples"] = len(self._left_out.numbers)
        data = self._data_metrics.collect()
        if self._world.is_main:
            num_steps, count = done - self._last_recorded, self._sizes.count_samples
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            costs = {**data, **ask_metrics(self._engine.model)}
            if self._engine.rows is not None:
                costs |= self._engine.rows.collect_metrics()
            if self._has_quorum and self._engine.islands is not None:
                costs |= self._engine.islands.collect_metrics()
            self._recorder.record(done, finite, num_steps, count(done) - count(self._last_recorded), costs)
        self._last_recorded = done

    def _validate(self, done: int) -> bool:
        """Evaluate; tell whether this is the best so far, whose checkpoint is kept: then no save is in flight."""
        evaluate = self._config.evaluate
        statistics = self._engine.evaluate(
            self._validation, evaluate.batch_size, evaluate.max_interval_samples, self._liveness.note_progress
        )
        metrics: dict[str, float] | None = None
        if statistics is not None:
            with self._liveness.mark_resting():  # the user's metrics of all samples
                metrics = total_metrics(metrics_of(self._engine.task, evaluate.metrics), statistics)
                if done < self._config.train.steps:  # after the last one nothing is saved by it, and the gate asks
                    self._config.registry.require_metric(metrics)
                self._recorder.record_validation(done, metrics)
        return self.best.is_wanted and self._take_evaluation(done, metrics)

    def _take_evaluation(self, done: int, metrics: dict[str, float] | None) -> bool:
        value = self.best.agree(metrics)
        improved = self.best.would_improve(value)
        if improved:
            with self._liveness.mark_resting():
                self._saves.settle()  # the best one before is written by now, or was never one
        self.best.take(done, value)
        return improved

    def _save(self, done: int, last: bool, busy: bool) -> None:
        if last:
            self._commit(done)
        elif busy:
            self._saves.skip(done)
        else:
            self._saves.save(self._engine.state.save(), self._recorder.history, done)

    def _stop_after_commit(self, done: int) -> None:
        self._read_last_step()
        self._commit(done)
        raise Preempted(f"stopped at step {done} of {self._config.train.steps}; everything up to it is committed")

    def _commit(self, done: int) -> None:
        """Commit what is done since the last checkpoint, if anything."""
        if done > self._saves.settle():
            self._saves.finish(self._engine.state.save(), self._recorder.history, done)


TIMES_DECAYED = 10
"""Divisor of the steps: `warmup_stable_decay` falls over the last tenth, unless the configuration says how many."""


def compute_learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, of `num_steps`: it is no state, and never saved."""
    peak, schedule = config.learning_rate, config.schedule
    if schedule == "constant":
        return peak
    warmup_steps = min(config.warmup_steps, num_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "warmup_constant":
        return peak
    if schedule == "warmup_inverse_sqrt":  # Vaswani et al. 2017, arXiv:1706.03762, section 5.3
        return peak * math.sqrt(max(1, warmup_steps) / (step + 1))
    first, floor = warmup_steps, config.final_learning_rate_fraction
    if schedule == "warmup_stable_decay":  # Hu et al. 2024, arXiv:2404.06395; the decay is linear
        decay_steps = min(config.decay_steps or math.ceil(num_steps / TIMES_DECAYED), num_steps - warmup_steps)
        first = num_steps - decay_steps - 1  # the last one before the fall
    progress = min(1.0, max(0, step - first) / max(1, num_steps - 1 - first))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "warmup_cosine" else 1.0 - progress
    return peak * (floor + (1.0 - floor) * left)


EXPONENTS = {"none": 0.0, "linear": 1.0, "square_root": 0.5}
"""Rule -> exponent of the batch size in the learning rate. Linear: Goyal et al. 2017, arXiv:1706.02677; square root:
Krizhevsky 2014, arXiv:1404.5997, and for Adam Malladi et al. 2022, arXiv:2205.10287."""


def compute_batch_factor(config: OptimizerConfig, batch_size: int) -> float:
    """Return the factor on the learning rate of a step with so many samples over all processes."""
    reference = config.reference_batch_size or batch_size
    return float((batch_size / reference) ** EXPONENTS[config.scale_learning_rate])


class LeftOutSamples:
    """Samples that cannot be decoded and are left out, over all processes and attempts; the same on all processes."""

    def __init__(self, world: World, max_samples: int) -> None:
        """Begin without any. `max_samples`: a larger number ends the run."""
        self._world = world
        self._max_samples = max_samples
        self.numbers: set[int] = set()
        """Their numbers in stored order; a sample counts once, however often it was met."""

    def resume(self, numbers: Iterable[int]) -> None:
        """Take over those that were left out before the checkpoint."""
        self.numbers.update(numbers)

    def take(self, own: list[BadSample]) -> None:
        """Count the bad samples of a step, of which this process has met its `own`. Collective.

        Raises DataError on all processes where there are too many now.
        """
        # In stored order, and by what all have met: so all processes count alike, and raise at the same sample.
        met = {sample.number: sample for part in self._world.gather(own) for sample in part}
        for number in sorted(met.keys() - self.numbers):
            self.numbers.add(number)
            line = met[number].error.line
            if len(self.numbers) > self._max_samples:
                raise DataError(
                    f"{len(self.numbers)} samples cannot be decoded, one more than may be left out; this one: {line}",
                    where="data.max_bad_samples",
                    value=self._max_samples,
                    fix="mend the data, or allow more",
                )
            if self._world.is_main:
                to_log(f"warning: left out, {len(self.numbers)} of at most {self._max_samples}: {line}")
