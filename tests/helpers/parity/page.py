"""The table of parity as the page about parallelism shows it: what each layout was proven with, and how nearly."""

import importlib.util
from pathlib import Path

TEST = Path(__file__).parents[2] / "distributed" / "test_parity.py"

OPTIONS = {
    "train.micro_batch_size": "micro batches",
    "train.activation_checkpointing": "recomputed blocks",
    "parallel.exchange": "exchange of each micro batch",
    "parallel.sequence_parallel": "whole sequences",
}
"""Override -> what it is called among the things that a layout was proven with."""


def table():
    """Two tables in Markdown."""
    spec = importlib.util.spec_from_file_location("parity_table", TEST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = ["| layout | processes | beside the plain case | losses and norms | weights |", "|---|---|---|---|---|"]
    for layout, rows in by_layout(module.TABLE).items():
        exact = [row for row in rows if not row.case.bf16]
        sizes = ", ".join(map(str, sorted({row.processes for row in rows})))
        figures = (f"{max(row.tolerance for row in exact):g}", f"{max(row.weight_tolerance for row in exact):g}")
        lines.append(f"| {layout} | {sizes} | {', '.join(proven(rows)) or '-'} | {' | '.join(figures)} |")
    lines += ["", "| refused | the error says |", "|---|---|"]
    lines += [f"| {row.name} | {row.message.replace('.*', '…')} |" for row in module.REFUSED]
    return "\n".join(lines) + "\n"


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
    tensor = int(settings.get("parallel.tensor", 1))
    if settings.get("parallel.reshard_after_forward") == "false":
        strategy = "zero1"
    if settings.get("parallel.replicate", "1") != "1":
        strategy = f"hybrid {strategy}"
    if tensor == row.processes:
        return "tensor"
    return f"{strategy} x tensor" if tensor > 1 else strategy


def proven(rows):
    """What rows have beside the plain case of a language model."""
    options = {OPTIONS[key] for row in rows for key in settings_of(row) if key in OPTIONS}
    cases = {row.case.name for row in rows if row.case.name != "llama"}
    uneven = {"uneven shares" for row in rows if row.case.batch % data_ranks(row)}
    return [*sorted(options | uneven), *sorted(cases)]


def data_ranks(row):
    return row.processes // int(settings_of(row).get("parallel.tensor", 1))


def settings_of(row):
    return dict(override.partition("=")[::2] for override in row.layout)
