"""Real processes, no torch: what they print reaches the console in whole lines and the files byte by byte."""

import os
import re
import subprocess
import sys
import time

import pytest

from kftrain.core import progress
from kftrain.process import output
from kftrain.process.output import OUTPUT_ENV, Output
from kftrain.run.log_size import MIDDLE, shorten_log

LIMIT_SECONDS = 200
"""For what takes a moment on a machine that does not pause."""

CHATTER = """
import os, sys
from kftrain.process import output
output.redirect_output()
rank = os.environ["LOCAL_RANK"]
for index in range(3000):
    print("line", index, "of", rank)
    if index % 10 == 0:
        sys.stderr.write(f"warning {index} of {rank}\\n")
os.write(2, f"from C {rank}\\n".encode())
print("kftrain| step 3/20 loss 1")
print("no newline", end="")
"""


def run(folder, ranks, source=CHATTER, named=True, **environment):
    """Runs a process per rank under one Output; returns rank -> its log."""
    with Output(folder, [f"rank-{rank}" for rank in ranks], named) as made:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", source],
                env={**os.environ, OUTPUT_ENV: str(folder), "LOCAL_RANK": str(local_rank), **environment},
            )
            for local_rank in range(len(ranks))
        ]
        assert [process.wait(timeout=LIMIT_SECONDS) for process in processes] == [0] * len(ranks)
    return {rank: made.logs[f"rank-{rank}"].read_bytes() for rank in ranks}


def expected(local_rank):
    """What a process of CHATTER prints, in its order."""
    for index in range(3000):
        yield f"line {index} of {local_rank}"
        if index % 10 == 0:
            yield f"warning {index} of {local_rank}"
    yield from (f"from C {local_rank}", "kftrain| step 3/20 loss 1", "no newline")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_every_line_is_whole_named_and_in_order_and_the_files_hold_every_byte(tmp_path, capfd, unbuffered):
    logs = run(tmp_path, range(4, 6), PYTHONUNBUFFERED=unbuffered)
    lines = capfd.readouterr().out.splitlines()
    for local_rank, rank in enumerate((4, 5)):
        printed = list(expected(local_rank))
        assert logs[rank].decode() == "\n".join(printed)
        assert [line.removeprefix(f"[rank {rank}] ") for line in lines if f"[rank {rank}] " in line] == printed
    assert all(re.match(r"\[rank [45]\] ", line) for line in lines)


def test_a_line_that_is_written_in_pieces_is_shown_in_one(tmp_path, capfd):
    source = """
import os, time
from kftrain.process import output
output.redirect_output()
for part in (b"kftrain| st", b"ep 3/20 lo", b"ss 1\\n"):
    os.write(1, part)
    time.sleep(0.3)
"""
    run(tmp_path, range(2), source)
    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == ["[rank 0] kftrain| step 3/20 loss 1", "[rank 1] kftrain| step 3/20 loss 1"]


def test_what_is_still_in_the_pipe_at_the_end_is_read(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(output, "READ_BYTES", 16)  # the process is through long before the reader
    source = "from kftrain.process import output; output.redirect_output(); print('x' * 60_000)"
    assert run(tmp_path, range(1), source) == {0: b"x" * 60_000 + b"\n"}
    assert capfd.readouterr().out.count("x") == 60_000


def test_lines_of_ours_are_recognised_behind_the_name(tmp_path, capfd):
    run(tmp_path, range(2))
    marked = [progress.strip_mark(line) for line in capfd.readouterr().out.splitlines()]
    assert [text for text in marked if text] == ["step 3/20 loss 1"] * 2


def test_a_single_process_needs_no_name(tmp_path, capfd):
    run(tmp_path, range(1), "from kftrain.process import output; output.redirect_output(); print('alone')", named=False)
    assert capfd.readouterr().out == "alone\n"


def test_a_line_is_shown_at_once(tmp_path, capfd):
    source = "import sys; from kftrain.process import output; output.redirect_output(); print('now'); sys.stdin.read()"
    environment = {**os.environ, OUTPUT_ENV: str(tmp_path), "LOCAL_RANK": "0"}
    shown = ""
    with Output(tmp_path, ["rank-0"], named=True):
        process = subprocess.Popen([sys.executable, "-c", source], env=environment, stdin=subprocess.PIPE)
        while not shown and process.poll() is None:
            shown = capfd.readouterr().out
            time.sleep(0.05)
        process.communicate(timeout=LIMIT_SECONDS)  # it ends when it is told to, not before the line was seen
    assert shown == "[rank 0] now\n"


def test_what_a_killed_process_printed_is_there(tmp_path, capfd):
    source = """
import os, signal
from kftrain.process import output
output.redirect_output()
print("before", 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Output(tmp_path, ["rank-0"], named=True) as made:
        environment = {**os.environ, OUTPUT_ENV: str(tmp_path), "LOCAL_RANK": "0"}
        assert subprocess.run([sys.executable, "-c", source], env=environment, check=False).returncode == -9
    assert made.logs["rank-0"].read_text() == "before 1\n"
    assert capfd.readouterr().out == "[rank 0] before 1\n"


def test_the_end_does_not_wait_for_what_outlives_the_process(tmp_path, capfd):
    source = """
import subprocess
from kftrain.process import output
output.redirect_output()
subprocess.Popen(["sleep", "600"])
print("done")
"""
    start = time.monotonic()
    assert run(tmp_path, range(1), source) == {0: b"done\n"}
    assert time.monotonic() - start < 400


def test_a_line_without_an_end_is_shown_in_pieces(tmp_path, capfd):
    source = "from kftrain.process import output; output.redirect_output(); print('x' * 100_000)"
    assert run(tmp_path, range(1), source) == {0: b"x" * 100_000 + b"\n"}
    shown = capfd.readouterr().out
    assert shown.count("x") == 100_000 and shown.count("[rank 0] ") == shown.count("\n") > 1


def test_a_full_disk_costs_the_file_and_not_the_training(tmp_path, capfd):
    with Output(tmp_path, ["rank-0"], named=False) as made:
        made._sources[0]._log._stream.close()
        made._sources[0]._log._stream = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        environment = {**os.environ, OUTPUT_ENV: str(tmp_path), "LOCAL_RANK": "0"}
        subprocess.run([sys.executable, "-c", CHATTER], env=environment, check=True)
    shown = capfd.readouterr().out
    assert shown.count("rank-0.log ends here") == 1 and "No space left" in shown
    assert "line 2999 of 0" in shown


def test_a_log_that_grows_for_ever_keeps_its_beginning_and_its_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(output, "MAX_LOG_BYTES", 4000)
    monkeypatch.setattr(output.shorten_log, "__defaults__", (4000,))
    monkeypatch.setattr(output, "READ_BYTES", 512)
    (log,) = run(tmp_path, range(1)).values()
    assert len(log) <= 4000 and log.count(MIDDLE) == 1
    assert log.startswith(b"line 0 of 0\nwarning 0 of 0\nline 1 of 0\n") and log.endswith(b"no newline")


def test_what_is_short_enough_stays():
    assert shorten_log(b"x" * 100, 100) == b"x" * 100
    cut = shorten_log(b"a" * 50 + b"b" * 51, 100)
    assert cut == b"a" * 25 + MIDDLE + b"b" * 25
    assert shorten_log(cut + b"c" * 100, 100).count(MIDDLE) == 1


def test_a_console_that_went_away_does_not_stop_the_processes(tmp_path):
    """`kftrain train | head`: the processes must not wait for a reader that never comes."""
    source = f"""
import subprocess, sys
from pathlib import Path
from kftrain.process.output import Output
with Output(Path({str(tmp_path)!r}), ["rank-0"], named=False):
    subprocess.run([sys.executable, "-c", {CHATTER!r}], check=True)
"""
    environment = {**os.environ, OUTPUT_ENV: str(tmp_path), "LOCAL_RANK": "0"}
    process = subprocess.Popen([sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=LIMIT_SECONDS) == 0
    assert (tmp_path / "rank-0.log").read_text() == "\n".join(expected(0))


def test_a_console_that_nobody_reads_does_not_stop_the_processes(tmp_path):
    """Ctrl-S, a pager, a log driver that blocks."""
    source = f"""
import subprocess, sys
from pathlib import Path
from kftrain.process import output
output.MAX_WAITING_CHARACTERS = 10000
output.DRAIN_SECONDS = 60.0
with output.Output(Path({str(tmp_path)!r}), ["rank-0"], named=False):
    for again in range(3):
        subprocess.run([sys.executable, "-c", {CHATTER!r}], check=True)
    sys.stderr.write("ended\\n")
"""
    environment = {**os.environ, OUTPUT_ENV: str(tmp_path), "LOCAL_RANK": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", source], env=environment, **pipes)
    assert process.stderr.readline() == b"ended\n"
    shown = process.communicate(timeout=LIMIT_SECONDS)[0].decode().splitlines()
    log = (tmp_path / "rank-0.log").read_text()
    assert log == "\n".join(expected(0)) * 3
    left_out = [
        int(line[1:].split()[0]) for line in shown if line.endswith("are only in the log files: nobody read them here]")
    ]
    lines = [line for line in shown if "are only in" not in line]
    assert left_out and sum(left_out) + len(lines) == len(log.splitlines())
    rest = iter(log.splitlines())
    assert all(line in rest for line in lines), "in their order"


def test_without_a_supervisor_nothing_is_redirected(monkeypatch, capfd):
    monkeypatch.delenv(OUTPUT_ENV, raising=False)
    output.redirect_output()
    print("here")
    assert capfd.readouterr().out == "here\n"


def test_what_ranks_print_steers_no_terminal_and_is_kept_as_it_was(tmp_path, capfd):
    source = r"""
import os
from kftrain.process import output
output.redirect_output()
os.write(1, b"caf\xc3\xa9\x1b[2J\x1b]0;owned\x07 \x9b1A\r 50%\r100%\ttab\n\xff\n")
"""
    logs = run(tmp_path, range(1), source, named=False)
    shown = capfd.readouterr().out
    assert shown.startswith("caf\u00e9 ") and "100%\ttab\n" in shown and "owned" not in shown
    assert not set("\x1b\x07\r\x9b") & set(shown)
    assert b"\x1b[2J\x1b]0;owned\x07 \x9b1A\r 50%" in logs[0]
