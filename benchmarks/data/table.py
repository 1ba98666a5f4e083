"""The data plane against its bars: ours, the peers and the physical limit shuffled in one run, as a table in Markdown.

    python benchmarks/data/table.py [--rounds 5] [--scale 1.0] [--folder /dev/shm] [--peers PYTHON] [--rows A,B]

`--peers`: the interpreter of the environment that has webdataset, litdata and mosaicml-streaming (made by
`make bench-data`). Every contender runs in a process of its own; before the first round each shows that it wrote, or
read, the same content. Figures are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import content
import fresh_process
import ours
from fresh_process import Runs, median, ratio

HERE = Path(__file__).parent
SHARDS_AT_1X = 10


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    bar: str
    figure: str
    met: bool
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """One run of the table."""

    folder: Path
    rounds: int
    scale: float
    peers_python: str
    peers: list[str]

    def num_samples(self, kind: str) -> int:
        """Of that kind, in whole cycles of the different ones."""
        cycle = 4 * content.NUM_DISTINCT
        return max(1, round(content.NUM_SAMPLES[kind] * self.scale / cycle)) * cycle

    def command(self, script: str, work: str, num_samples: int, *options: str) -> list[str]:
        """One contender's."""
        python = sys.executable if script == "ours" else self.peers_python
        out = tempfile.mkdtemp(dir=self.folder)
        counted = ["--folder", str(self.folder), "--samples", str(num_samples), *options]
        inner = [python, str(HERE / f"{script}.py"), work, "--out", out, *counted]
        return ["sh", "-c", f'{shlex.join(inner)} "$@"; code=$?; rm -rf {out}/*; exit $code', "sh"]

    def contenders(self, work: str, kind: str, peers: tuple[str, ...] = ()) -> dict[str, list[str]]:
        """Ours, the limit, and those of the peers that are there, with equal content."""
        count = self.num_samples(kind)
        chosen = [peer for peer in self.peers if peer in peers]
        commands = {"ours": self.command("ours", work, count)}
        commands |= {peer: self.command("peers", f"{work}-{peer}", count) for peer in chosen}
        limits = ("limit", "hashed") if work.startswith("write") else ("limit",)
        return self.checked(commands) | {limit: self.command("ours", f"{work}-{limit}", count) for limit in limits}

    def checked(self, commands: dict[str, list[str]]) -> dict[str, list[str]]:
        """The commands, once their contents are found equal."""
        found = {name: fresh_process.last_line([*command, "--check"]) for name, command in commands.items()}
        if len(set(map(str, found.values()))) != 1:
            raise SystemExit(f"the contenders' contents differ: {found}")
        return commands

    def compare(self, commands: dict[str, list[str]]) -> Runs:
        """In shuffled order, in rounds."""
        return fresh_process.compare(commands, self.rounds)


WRITTEN = {
    "images": "write images of 20 KB",
    "packed": "write packed tokens of 4 KB, the peers pack them alike",
    "tokens": "write packed tokens of 4 KB, the peers write one sequence a member",
}


def written(bench: Bench, kind: str, wall_bar: float, cpu_bar: float, bytes_bar: float) -> list[Row]:
    """Rows 1 to 4: time, processor time and bytes of writing, and time against write and sha256 of the same bytes."""
    runs = bench.compare(bench.contenders(f"write-{kind}", kind, ("webdataset", "litdata", "MDS")))
    what = WRITTEN[kind]
    rows = [against(runs, f"{what}: wall", "webdataset", wall_bar, "per_second", others(runs))]
    rows.append(against(runs, f"{what}: CPU seconds", "webdataset", cpu_bar, "per_cpu_second", ""))
    hashed = ratio(runs, "ours", "hashed")
    rows.append(Row(f"{what}: wall", "≥ 0.8 of `write()`, then sha256", f"{hashed:.2f}", hashed >= 0.8))
    payload = bench.num_samples(kind) * payload_bytes(bench, kind)
    sizes = {name: median(runs, name, "extra") / payload for name in runs if name not in ("limit", "hashed")}
    note = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items() if name != "ours")
    rows.append(
        Row(f"{what}: bytes / payload", f"≤ {bytes_bar}", f"{sizes['ours']:.3f}", sizes["ours"] <= bytes_bar, note)
    )
    return rows


def payload_bytes(bench: Bench, kind: str) -> float:
    """Of a sample, on average; a label counts one byte, as webdataset writes it."""
    if kind != "images":
        return 2 * content.SEQUENCE_LENGTH
    images = content.images(bench.folder)
    return sum(map(len, images)) / len(images) + 1


def against(runs: Runs, name: str, peer: str, bar: float, field: str, note: str) -> Row:
    """How many times the peer's rate ours is."""
    if peer not in runs:
        return Row(name, f"≥ {bar:g}x {peer}", "—", False, f"{peer} cannot be imported here")
    found = ratio(runs, "ours", peer, field)
    return Row(name, f"≥ {bar:g}x {peer}", f"{found:.1f}x", found >= bar, note)


def others(runs: Runs) -> str:
    """What the other contenders reach of ours, and the rates."""
    shown = [f"{name} {ratio(runs, name, 'ours'):.2f} of ours" for name in runs if name != "ours"]
    return f"{median(runs, 'ours'):,.0f}/s; " + ", ".join(shown)


def write_images(bench: Bench) -> list[Row]:
    """Encoded images with a label."""
    return written(bench, "images", 6, 4, 1.09)


def write_tokens(bench: Bench) -> list[Row]:
    """Blocks of 64 Ki tokens; the peers write the same blocks, and as their users do, a member per sequence."""
    return [*written(bench, "packed", 1, 1, 1.01), *written(bench, "tokens", 14, 8, 1.01)]


def datasets(bench: Bench, kind: str, peers: tuple[str, ...] = ()) -> None:
    """What is read, ours and the peers', unless an earlier row made it."""
    count = bench.num_samples(kind)
    if not (bench.folder / f"ours-{kind}").is_dir():
        (bench.folder / f"ours-{kind}").mkdir()
        ours.dataset(kind, bench.folder / f"ours-{kind}", count)
    for peer in (peer for peer in bench.peers if peer in peers):
        out = bench.folder / f"{peer}-{kind}"
        if not out.is_dir():
            out.mkdir()
            command = [
                bench.peers_python,
                str(HERE / "peers.py"),
                f"write-{kind}-{peer}",
                "--folder",
                str(bench.folder),
            ]
            fresh_process.last_line([*command, "--out", str(out), "--samples", str(count)])


LEFT_OUT = "out of the page cache: no disk, no hashing, no decoding"
"""What the rows about reading leave out, on both sides."""


def read_cold(bench: Bench) -> list[Row]:
    """Every byte from a disk, hashed; other rows leave both out. In megabytes, as a sha256 has no samples."""
    disk = replace(bench, folder=Path(tempfile.mkdtemp(prefix="kftrain-bench-")))
    try:
        content.make(disk.folder)
        datasets(disk, "images")
        count = bench.num_samples("images")
        runs = bench.compare(
            {"ours": disk.command("ours", "read-cold", count), "sha256": disk.command("ours", "read-cold-limit", count)}
        )
    finally:
        shutil.rmtree(disk.folder)
    found = ratio(runs, "ours", "sha256")
    note = f"{median(runs, 'ours') / 1e6:,.0f} MB/s; sha256 {median(runs, 'sha256') / 1e6:,.0f} MB/s"
    name = "an epoch of images from a cold disk, each shard hashed"
    return [Row(name, "≥ 0.8 of sha256 of the files", f"{found:.2f}", found >= 0.8, note)]


def read_images(bench: Bench) -> list[Row]:
    """Encoded images in training order."""
    peers = ("webdataset", "litdata", "MDS")
    datasets(bench, "images", peers)
    runs = bench.compare(bench.contenders("read-images", "images", peers))
    name = "read encoded images in training order"
    rows = [against(runs, name, "webdataset", 15, "per_second", f"{others(runs)}; {LEFT_OUT}")]
    if "litdata" in runs:
        found = ratio(runs, "ours", "litdata")
        rows.append(Row(f"{name}, against litdata", "> 1x litdata", f"{found:.1f}x", found > 1))
    return rows


def adopted(bench: Bench) -> list[Row]:
    """The shards that webdataset has written, in training order where they are."""
    name, bar = "read adopted stock shards in training order", 11
    if "webdataset" not in bench.peers:
        return [Row(name, f"≥ {bar}x webdataset", "—", False, "webdataset cannot be imported here")]
    datasets(bench, "images", ("webdataset",))
    ours.adopt(bench.folder / "webdataset-images", bench.folder / "adopted-images")
    count = bench.num_samples("images")
    commands = {
        "ours": bench.command("ours", "adopted", count),
        "webdataset": bench.command("peers", "read-images-webdataset", count),
    }
    runs = bench.compare(bench.checked(commands))
    return [against(runs, name, "webdataset", bar, "per_second", f"{others(runs)}; {LEFT_OUT}")]


def token_batches(bench: Bench) -> list[Row]:
    """Batches of 64 as int64 tensors, with prefetch."""
    datasets(bench, "tokens")
    ours.flat_tokens(bench.folder, bench.num_samples("tokens"))
    runs = bench.compare(bench.contenders("token-batches", "tokens"))
    found = ratio(runs, "ours", "limit")
    note = f"{median(runs, 'ours'):,.0f} sequences/s; out of the page cache, no hashing"
    return [
        Row(
            "token batches to int64 in training order", "≥ 0.9 of `memmap[indices]`", f"{found:.2f}", found >= 0.9, note
        )
    ]


def decoded(bench: Bench) -> list[Row]:
    """Images decoded to 224 x 224, by none, one and two workers; Pillow alone has the files in memory."""
    datasets(bench, "images")
    kinds = [f"decoded-{kind}-{number}" for kind in ("threads", "processes") for number in (1, 2)]
    works = ("decoded", *kinds, "decoded-Pillow", "decoded-DataLoader")
    count = bench.num_samples("images")
    runs = bench.compare(bench.checked({work: bench.command("ours", work, count) for work in works}))
    alone = ratio(runs, "decoded", "decoded-Pillow")
    by_cpu = ratio(runs, "decoded", "decoded-Pillow", "per_cpu_second")
    note = f"{median(runs, 'decoded'):,.0f}/s; by CPU seconds {by_cpu:.2f}; Pillow has the files in memory"
    name = "decode images in training order"
    rows = [Row(name, "≥ 0.95 of Pillow alone", f"{alone:.2f}", alone >= 0.95, note)]
    for kind in ("threads", "processes"):
        two = ratio(runs, f"decoded-{kind}-2", f"decoded-{kind}-1")
        pipes = ratio(runs, f"decoded-{kind}-2", "decoded-DataLoader")
        rows.append(Row(f"{name}, 2 {kind}", "≥ 1.8x one", f"{two:.2f}x", two >= 1.8))
        rows.append(Row(f"{name}, 2 {kind}", "> 1x torch's DataLoader with 2", f"{pipes:.2f}x", pipes > 1))
    return rows


def sharding(bench: Bench) -> list[Row]:
    """The shard step with two processes and with one, whose digests a thread makes; and two steps beside each other."""
    count = bench.num_samples("images")
    content.make_image_folder(bench.folder, bench.folder / "photos", count)
    commands = bench.checked({f"{number}": bench.command("ours", f"shard-{number}", count) for number in (1, 2)})
    runs = bench.compare({**commands, "twice": bench.command("ours", "shard-twice", count)})
    wall, cpu = ratio(runs, "2", "1"), ratio(runs, "1", "2", "per_cpu_second")
    name = "2 sharding processes against 1"
    note = f"{median(runs, '1'):,.0f}/s by one; two steps beside each other reach {ratio(runs, 'twice', '1'):.2f}x"
    return [
        Row(f"{name}: wall", "≥ 1.8x", f"{wall:.2f}x", wall >= 1.8, note),
        Row(f"{name}: CPU seconds of a sample", "≤ 1.05x", f"{cpu:.2f}x", cpu <= 1.05),
    ]


def resume(bench: Bench) -> list[Row]:
    """To the first batch at three places of the epoch."""
    datasets(bench, "images", ("webdataset",))
    count = bench.num_samples("images")
    commands = {}
    for share in ("0.1", "0.5", "0.9"):
        commands[share] = bench.command("ours", "resume", count, "--at", share)
        if "webdataset" in bench.peers:
            commands[f"webdataset {share}"] = bench.command("peers", "resume-webdataset", count, "--at", share)
    runs = bench.compare(commands)
    found = {name: 1000 / median(runs, name) for name in commands}
    times = [found[share] for share in ("0.1", "0.5", "0.9")]
    theirs = " / ".join(f"{found[name]:.0f}" for name in found if name.startswith("webdataset"))
    met = max(times) <= 3
    shown = " / ".join(f"{each:.1f}" for each in times) + " ms"
    return [Row("resume at 10 / 50 / 90 %", "≤ 3 ms, flat", shown, met, f"webdataset {theirs} ms" if theirs else "")]


def start(bench: Bench) -> list[Row]:
    """Open a dataset to its first batch, with ever more shards of equal size."""
    for times in (1, 10, 100):
        folder = bench.folder / f"shards-{times}"
        folder.mkdir()
        num_samples = SHARDS_AT_1X * times * content.PACKED
        ours.dataset("tokens", folder, num_samples, shard_size_bytes=4 * content.SEQUENCE_LENGTH * content.PACKED // 2)
    runs = bench.compare({f"{times}": bench.command("ours", f"start-{times}", 1) for times in (1, 10, 100)})
    found = {name: 1000 / median(runs, name) for name in runs}
    growth = [ratio(runs, "1", name) for name in ("10", "100")]
    shown = " / ".join(f"{each:.1f}" for each in found.values()) + " ms"
    note = f"{SHARDS_AT_1X} shards at 1x; grows to {growth[0]:.2f} and {growth[1]:.2f} times"
    return [Row("open to first batch at 1x / 10x / 100x shards", "flat ± 20 %", shown, max(growth) <= 1.2, note)]


def memory(bench: Bench) -> list[Row]:
    """One epoch of ever more samples."""
    base = bench.num_samples("images") // 8
    for times in (1, 4, 16):
        (bench.folder / f"memory-{times}").mkdir()
        ours.dataset("images", bench.folder / f"memory-{times}", base * times)
    runs = bench.compare({f"{times}": bench.command("ours", f"memory-{times}", 1) for times in (1, 4, 16)})
    for times in (1, 4, 16):
        shutil.rmtree(bench.folder / f"memory-{times}")
    grown = [median(runs, f"{times}", "extra") for times in (1, 4, 16)]
    slope = (grown[2] - grown[0]) / 15
    shown = " / ".join(f"{each:.1f}" for each in grown) + " MiB"
    note = f"{slope:+.2f} MiB for each {base:,} samples more"
    return [Row("RssAnon after an epoch of 1x / 4x / 16x samples", "slope 0", shown, abs(slope) < 0.5, note)]


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "write-images": write_images,
    "write-tokens": write_tokens,
    "read-images": read_images,
    "read-cold": read_cold,
    "adopted": adopted,
    "token-batches": token_batches,
    "decoded": decoded,
    "sharding": sharding,
    "resume": resume,
    "start": start,
    "memory": memory,
}


def show(rows: list[Row]) -> None:
    """Lines of the table."""
    for row in rows:
        met = "met" if row.met else "missed"
        print(f"| {row.name} | {row.bar} | {row.figure} | {met} | {row.note} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples")
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    parser.add_argument("--peers", default=sys.executable, help="their interpreter")
    parser.add_argument("--rows", default=",".join(ROWS), help="which, of: %(default)s")
    arguments = parser.parse_args()
    command = [arguments.peers, str(HERE / "peers.py"), "available"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    folder = Path(tempfile.mkdtemp(prefix="kftrain-bench-", dir=arguments.folder))
    try:
        content.make(folder)
        peers = [peer for peer, error in found.items() if not error]
        bench = Bench(folder, arguments.rounds, arguments.scale, arguments.peers, peers)
        print("| benchmark | bar | measured | | |\n|---|---|---|---|---|", flush=True)
        for name in arguments.rows.split(","):
            show(ROWS[name](bench))
    finally:
        shutil.rmtree(folder)
    for peer, error in found.items():
        if error:
            print(f"\n{peer} cannot be imported and has no part in this: {error}")


if __name__ == "__main__":
    main()
