"""The table of parity as the page about parallelism shows it: what each layout was proven with, and how nearly."""

import importlib.util
import math
from pathlib import Path

from helpers.parity.oracle import STEPS

FOLDER = Path(__file__).parents[2] / "distributed"
PARTS = "", "_pipeline", "_context", "_experts", "_precision", "_averages", "_batches", "_memory", "_compile", "_noise"
PARTS += "_eight_bit", "_float8", "_rounding"
TESTS = [FOLDER / f"test_parity{part}.py" for part in PARTS]
"""Files of tests, each with a `TABLE` of rows, and what is `REFUSED`."""

CUT_AXES = ("context", "tensor", "pipeline")
"""Axes along which processes read the same samples."""

OPTIONS = {
    "train.micro_batch_size": {"auto": "micro batches that were found"},
    "train.activation_checkpointing": {
        "blocks": "recomputed blocks",
        "selective": "selective recomputation",
        "offload": "activations on the host",
    },
    "train.checkpointed_blocks": "chosen blocks",
    "train.loss_chunk_tokens": "losses by chunks",
    "train.compile": "compiled blocks",
    "train.noise_scale": "noise scale",
    "parallel.exchange": "exchange of each micro batch",
    "parallel.sequence_parallel": "whole sequences",
}
"""Override -> what it, or each value of it, is called among the things that a layout was proven with."""


def table():
    """Two tables in Markdown."""
    modules = [load(path) for path in TESTS]
    table, refused = ([row for module in modules for row in getattr(module, name)] for name in ("TABLE", "REFUSED"))
    lines = ["| layout | processes | beside the plain case | losses and norms | weights |", "|---|---|---|---|---|"]
    for layout, rows in by_layout(table).items():
        exact = [row for row in rows if is_exact(row)]
        sizes = ", ".join(map(str, sorted({row.processes for row in rows})))
        figures = (f"{max(row.tolerance for row in exact):g}", f"{max(row.weight_tolerance for row in exact):g}")
        lines.append(f"| {layout} | {sizes} | {', '.join(proven(rows)) or '-'} | {' | '.join(figures)} |")
    lines += ["", "| refused | the error says |", "|---|---|"]
    lines += [f"| {row.name} | {row.message.replace('.*', '…')} |" for row in refused]
    return "\n".join(lines) + "\n"


def is_exact(row):
    """Whether no step of the row rounds to a format in which curves part."""
    return not row.case.bf16 and row.case.loop is None and row.compared_steps == STEPS


def load(path):
    spec = importlib.util.spec_from_file_location(f"parity_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_layout(rows):
    """Name of a layout -> its rows, those of one process first."""
    found = {}
    for row in rows:
        found.setdefault(name_of(row), []).append(row)
    return dict(sorted(found.items(), key=lambda each: (min(row.processes for row in each[1]), " x " in each[0])))


def name_of(row):
    settings = settings_of(row)
    if row.processes == 1:
        return "one process"
    strategy = settings.get("parallel.strategy", "fsdp")
    cut = {axis: int(settings.get(f"parallel.{axis}", 1)) for axis in (*CUT_AXES, "expert")}
    if settings.get("parallel.reshard_after_forward") == "false":
        strategy = "zero1"
    if settings.get("parallel.replicate", "1") != "1":
        strategy = f"hybrid {strategy}"
    axes = " x ".join(axis for axis, size in cut.items() if size > 1)
    if math.prod(cut.values()) == row.processes and strategy == "fsdp":
        return axes
    return f"{strategy} x {axes}" if axes else strategy


def proven(rows):
    """What rows have beside the plain case of a language model."""
    options = {name_option(*setting) for row in rows for setting in settings_of(row).items() if setting[0] in OPTIONS}
    options |= {schedule for row in rows if (schedule := settings_of(row).get("parallel.schedule"))}
    cases = {row.case.name for row in rows if row.case.name != "llama"}
    uneven = {"uneven shares" for row in rows if row.case.batch % data_ranks(row)}
    return [*sorted(options | uneven), *sorted(cases)]


def name_option(key, value):
    name = OPTIONS[key]
    return name.get(value, "micro batches") if isinstance(name, dict) else name


def data_ranks(row):
    return row.processes // math.prod(int(settings_of(row).get(f"parallel.{axis}", 1)) for axis in CUT_AXES)


def settings_of(row):
    return dict(override.partition("=")[::2] for override in row.layout)
