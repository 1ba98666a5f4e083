"""The training loop: from a committed checkpoint, or from nothing, to the last step.

Each step begins with one small exchange: how many loss terms there are, whether anybody was told to stop, whether
anybody's checkpoint is still being written. From it all processes take the same decision at the same step, so that none
enters a collective alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from kftrain.checkpoint import load
from kftrain.checkpoint.save import CheckpointWriter
from kftrain.checkpoint.staging import State
from kftrain.config import Config
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import StepBatch, TrainLoader
from kftrain.errors import DivergedError, Preempted
from kftrain.evaluate.score import total_metrics
from kftrain.parallel.world import World
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.train.optimizer import learning_rate, set_learning_rate
from kftrain.train.recorder import Recorder
from kftrain.train.saves import Saves
from kftrain.train.step import Stepper, seed_step


@dataclass(frozen=True)
class Control:
    """What all processes agree on before a step."""

    num_terms: int
    stop: bool
    busy: bool
    """Whether a checkpoint is being written."""
    overdue: bool
    """Whether that takes longer than it may."""


class Loop:
    """One attempt's steps. Every method is collective."""

    def __init__(
        self,
        config: Config,
        world: World,
        stepper: Stepper,
        loader: TrainLoader,
        validation: ShardedDataset,
        writer: CheckpointWriter,
        recorder: Recorder,
        stop: StopRequest,
        pulse: Liveness,
    ) -> None:
        self._config, self._world, self._stepper, self._loader = config, world, stepper, loader
        self._validation, self._recorder, self._stop = validation, recorder, stop
        self._saves = Saves(writer, config.checkpoint, config.train.global_batch_size, world.is_main)
        self._pulse = pulse
        self._num_nonfinite = self._last_recorded = 0
        self._gradient_norm = 0.0

    def resume(self, loaded: load.Loaded | None) -> int:
        """Restores model and optimizer; returns the number of steps that are done."""
        if loaded is None:
            return 0
        model, optimizer = self._stepper.model, self._stepper.optimizer
        state = self._state()
        load.load_into(state, loaded.uri, loaded.manifest.files)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        return loaded.manifest.step

    def run(self, first_step: int) -> int:
        """Takes all steps from `first_step` on; returns the number of steps that are done, the last one committed.

        Raises Preempted after a commit when a stop was requested, DivergedError when the loss stays non-finite,
        RetryableError when too many checkpoints in a row cannot be written.
        """
        with self._pulse.watched():
            return self._run(first_step)

    def _run(self, first_step: int) -> int:
        train = self._config.train
        self._last_recorded = done = first_step
        for step, batch in enumerate(self._loader.steps(first_step, train.steps - first_step), start=first_step):
            control = self._agree(batch)
            if control.stop:
                with self._pulse.resting():
                    self._stop_after_commit(step)
            self._saves.go_on(control.busy, control.overdue)
            loss = self._take(step, batch, control.num_terms)
            done = step + 1
            self._after_step(done, loss, control.busy)
        return done

    def _agree(self, batch: StepBatch) -> Control:
        saves = self._saves
        flags = (self._stop.requested, saves.busy, saves.overdue)
        own = self._stepper.count_terms(batch) if self._stepper.mesh.counts_loss else 0
        terms, stop, busy, overdue = self._world.sum([own, *map(float, flags)])
        return Control(int(terms), stop > 0, busy > 0, overdue > 0)

    def _take(self, step: int, batch: StepBatch, num_terms: int) -> torch.Tensor:
        seed_step(self._config.run.seed, step, self._stepper.mesh.data_rank)
        rate = learning_rate(self._config.optimizer, step, self._config.train.steps)
        set_learning_rate(self._stepper.optimizer, rate)
        result = self._stepper.run(batch, num_terms)
        self._gradient_norm = result.gradient_norm
        self._num_nonfinite = 0 if result.updated else self._num_nonfinite + 1
        if self._num_nonfinite > self._config.train.max_nonfinite_steps:
            raise DivergedError(
                f"the gradient norm of step {step + 1} is not finite",
                value=result.gradient_norm,
                fix="lower optimizer.learning_rate, or allow skips with train.max_nonfinite_steps",
            )
        return result.local_loss_sum

    def _after_step(self, done: int, local_loss_sum: torch.Tensor, busy: bool) -> None:
        config = self._config
        last = done == config.train.steps
        if last or done % config.train.log_interval_steps == 0:
            self._record(done, local_loss_sum)
        if config.evaluate.interval_steps and (done % config.evaluate.interval_steps == 0 or last):
            self._validate(done)
        if last or done % config.checkpoint.interval_steps == 0:
            with self._pulse.resting():  # storage may be slow
                self._save(done, last, busy)

    def _record(self, done: int, local_loss_sum: torch.Tensor) -> None:
        (loss,) = self._stepper.mesh.sum_of_losses([float(local_loss_sum)])
        rate = learning_rate(self._config.optimizer, done - 1, self._config.train.steps)
        values = {"loss": loss, "learning_rate": rate, "gradient_norm": self._gradient_norm}
        if self._world.is_main:
            num_steps = done - self._last_recorded
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            self._recorder.record(done, finite, num_steps, num_steps * self._config.train.global_batch_size)
        self._last_recorded = done

    def _validate(self, done: int) -> None:
        evaluate = self._config.evaluate
        statistics = self._stepper.evaluate(
            self._validation, evaluate.batch_size, evaluate.max_interval_samples, self._pulse.goes_on
        )
        if self._world.is_main:
            with self._pulse.resting():  # the user's metrics of all samples
                metrics = total_metrics(self._stepper.task, statistics)
                if done < self._config.train.steps:  # after the last one nothing is saved by it, and the gate asks
                    self._config.registry.require_metric(metrics)
                self._recorder.record_validation(done, metrics)

    def _save(self, done: int, last: bool, busy: bool) -> None:
        if last:
            self._commit(done)
        elif busy:
            self._saves.skip(done)
        else:
            self._saves.save(self._state(), self._recorder.history, done)

    def _stop_after_commit(self, done: int) -> None:
        self._commit(done)
        raise Preempted(f"stopped at step {done} of {self._config.train.steps}; everything up to it is committed")

    def _commit(self, done: int) -> None:
        """Commits what is done since the last checkpoint, if anything."""
        if done > self._saves.settle():
            self._saves.finish(self._state(), self._recorder.history, done)

    def _state(self) -> State:
        model, optimizer = get_state_dict(self._stepper.model, self._stepper.optimizer)
        return {"model": model, "optimizer": optimizer}
