"""The section `server`: tables of rows by key on servers beside the workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.settings.section import Amount, ChangesTraining, Count, Effect, KeepsTraining, Section, Value

ChangesSince03 = Annotated[Value, Effect(changes_training=True, added="0.3")]

Scale = Annotated[float, Field(ge=0.0)]


class TableConfig(Section):
    """A table, whose rows come into being by the run's seed, its name and the key alone."""

    name: ChangesTraining[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]]
    """Name, as the model's `SparseEmbedding` has it; new rows follow from it."""
    dim: ChangesTraining[Count]
    """Weights of a row."""
    optimizer: ChangesTraining[Literal["sgd", "adagrad", "row_wise_adagrad", "sparse_adam", "adam"]] = (
        "row_wise_adagrad"
    )
    """Update of a row. `sgd`, `adagrad` and `sparse_adam` are torch's; `row_wise_adagrad` keeps one number a row;
    `adam` is `sparse_adam` whose moments also decay by the updates that a row has missed."""
    learning_rate: ChangesTraining[Annotated[float, Field(gt=0.0)]] = 0.05
    """Learning rate of all steps; `optimizer.schedule` is of the dense part alone."""
    initial: ChangesTraining[Literal["normal", "uniform"]] = "normal"
    """Distribution of a new row's weights."""
    initial_scale: ChangesTraining[Scale] = 0.01
    """Standard deviation of `normal`, half width of `uniform`."""
    num_sightings: ChangesTraining[Count] = 1
    """Updates for a key after which it has a row; what those before bring is dropped."""
    expiry_steps: ChangesTraining[Amount] = 0
    """Updates of the table without one for a row after which the row is removed; 0 keeps all."""


class ServerConfig(Section):
    """Parameter servers: for tables that no worker need hold, and for islands that do not wait for each other."""

    num_servers: KeepsTraining[Amount] = 0
    """Processes beside the workers that share the rows of all tables, or through which the islands of
    `parallel.islands` exchange. A checkpoint goes on with any other number."""
    copies: KeepsTraining[Literal[1, 2]] = 1
    """Servers that have each row in memory. With 2, each also holds what its neighbour holds; an update is acknowledged
    when both have it, and the first server that dies costs no step. Local launches alone."""
    consistency: ChangesSince03[Literal["bsp", "ssp", "asp"]] = "bsp"
    """Weights that a worker reads. `bsp`: with all updates of the steps before, the sum over all workers in one update;
    `ssp`: with those of steps that lie more than `max_steps_ahead` back; `asp`: whatever is there. The last two apply
    each worker's gradients by themselves, in the order in which they come."""
    encoding: ChangesSince03[Literal["fp32", "bf16", "int8"]] = "fp32"
    """Numbers of rows and of their gradients on the wire; servers keep and sum float32. `bf16` rounds both to the
    nearest. `int8`, a byte a number and one a row, does so with weights; gradients are rounded up or down at random,
    so that their mean is right, by the run's seed and the step."""
    max_steps_ahead: ChangesSince03[Amount] = 0
    """Steps that a worker may be ahead of the slowest one, with `ssp`."""
    tables: ChangesSince03[tuple[TableConfig, ...]] = ()
    """The tables."""

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> ServerConfig:
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError(f"two tables have one name: {', '.join(sorted(names))}")
        if self.tables and not self.num_servers:
            raise ValueError("servers hold tables: num_servers must be at least 1 with tables")
        if self.copies > 1 and self.num_servers < 2:
            raise ValueError("copies lie on other servers: num_servers must be at least 2 with copies: 2")
        if (self.consistency == "ssp") != bool(self.max_steps_ahead):
            raise ValueError("max_steps_ahead is of consistency ssp, which needs at least 1")
        return self

    @property
    def max_ahead(self) -> int | None:
        """The clock rule's: see `kftrain.server.clock`."""
        return {"bsp": 0, "ssp": self.max_steps_ahead, "asp": None}[self.consistency]
