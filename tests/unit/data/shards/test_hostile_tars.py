"""Archives that ask for more than they hold: memory and time follow the bytes of the file, whatever its headers say."""

import io
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers.source_checks import records

from kftrain.errors import DataError

READ_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import numpy as np
from kftrain.data.settings import DataConfig
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.adopted import scan
from kftrain.errors import DataError
paths = sys.argv[2:]
opened = [resolve_source.resolve(DataConfig(source=path)) for path in paths]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
for source in opened:
    try:
        (file,) = source.entries()
        found = scan.scan(file, Path(file.uri + ".npy"), None, lambda key: False)
        adopted = len(np.load(file.uri + ".npy"))
    except DataError as error:
        adopted = error.line
    try:
        print("read", len(list(source.records())), adopted)
    except DataError as error:
        print("refused", adopted)
"""

MARGIN_BYTES = 64 << 20
"""What reading a small archive may take on top of the imports."""


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A GNU header of any size, which may need more digits than USTAR has."""
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (
        b"%011o\0" % size
        if 0 <= size < 8**11
        else bytes([0x80 if size > 0 else 0xFF]) + (size % 256**11).to_bytes(11, "big")
    )
    return sealed(block)


def sealed(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def sparse(name: str, real_size: int) -> bytes:
    """An old GNU sparse file of one byte at its end: 1.5 KB."""
    block = bytearray(header(name, 1, tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (real_size - 1, 1)
    block[483:495] = b"%011o\0" % real_size
    return sealed(block) + b"x" + bytes(511)


def pax(records_: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    text = b""
    for key, value in records_.items():
        line = f" {key}={value}\n".encode()
        length = len(line) + len(str(len(line) + 2))
        text += str(length).encode() + line
    return header("pax", len(text), kind) + text + bytes(-len(text) % 512)


END = bytes(1024)
TERABYTE = 1 << 40
ATTACKS = {
    "sparse": sparse("1.txt", 2 << 30) + END,
    "sparse by PAX": pax({"GNU.sparse.size": str(2 << 30), "GNU.sparse.map": f"{(2 << 30) - 1},1"})
    + header("1.txt", 1)
    + b"x"
    + bytes(511)
    + END,
    "sparse by a map": pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2 << 30)})
    + header("1.txt", 512)
    + f"1\n{(2 << 30) - 1}\n1\n".encode().ljust(512, b"\0")
    + END,
    "a member of a terabyte": header("1.txt", TERABYTE) + b"x" * 512 + END,
    "a member of 8 GiB": header("1.txt", 8**11 - 1) + b"x" * 512 + END,
    "a size that PAX gives": pax({"size": str(TERABYTE)}) + header("1.txt", 1) + b"x" * 512 + END,
    "a negative size": header("1.txt", -512) + b"x" * 512 + END,
    "a size that leads back": header("0.txt", 1) + b"x" * 512 + header("1.txt", -1536) + END,
    "PAX of a terabyte": header("pax", TERABYTE, tarfile.XHDTYPE) + b"x" * 512 + END,
    "a long name of a terabyte": header("n", TERABYTE, tarfile.GNUTYPE_LONGNAME) + b"x" * 512 + END,
    "headers of headers": pax({"a": "b"}) * 3000 + header("1.txt", 1) + b"x" * 512 + END,
    "a number of many digits": pax({"size": "9" * 5000}) + header("1.txt", 1) + b"x" * 512 + END,
}


def read_under_a_limit(paths: list[Path], seconds: float = 600.0) -> list[str]:
    command = [sys.executable, "-c", READ_UNDER_A_LIMIT, str(MARGIN_BYTES), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_archives_that_ask_for_memory_are_refused_within_what_they_hold(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(len(ATTACKS))]
    for path, content in zip(paths, ATTACKS.values(), strict=True):
        path.write_bytes(content)
    found = read_under_a_limit(paths)
    assert {name: line.split()[0] for name, line in zip(ATTACKS, found, strict=True)} == dict.fromkeys(
        ATTACKS, "refused"
    ), found
    assert all(re.match(rf"refused {tmp_path}/{number}\.tar", line) for number, line in enumerate(found)), found


@pytest.mark.parametrize("attack", ["sparse", "a member of a terabyte"])
def test_the_member_and_the_reason_are_named(tmp_path: Path, attack: str) -> None:
    (tmp_path / "s.tar").write_bytes(ATTACKS[attack])
    with pytest.raises(DataError, match=r"s\.tar:1\.txt: (a sparse file|the member is cut off: it holds 1,536 of)"):
        records(tmp_path / "s.tar")


def whole_archive(dialect: int) -> bytes:
    """Twelve members; of dialect 3, that of version 7 of Unix, with bare headers and short names."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=min(dialect, 2)) as archive:
        array = io.BytesIO()
        np.save(array, np.arange(6))
        for number in range(3):
            members = {"txt": b"text", "cls": b"7", "json": b'{"a": 1}', "npy": array.getvalue()}
            folder = "long/" * (0 if dialect == 3 else 18 if dialect == tarfile.USTAR_FORMAT else 30)
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{folder if number else ''}{number}.{suffix}")
                member.size, member.mtime = len(content), number / 3 if dialect == tarfile.PAX_FORMAT else number
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue() if dialect < 3 else as_version_7(stream.getvalue())


def as_version_7(ustar: bytes) -> bytes:
    content = bytearray(ustar)
    for start in range(0, len(content), 512):
        if content[start + 257 : start + 262] == b"ustar":
            content[start + 156] = 0
            content[start + 257 : start + 512] = bytes(255)
            content[start : start + 512] = sealed(content[start : start + 512])
    return bytes(content)


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """Some bytes, numbers or blocks changed; most headers are made to fit their checksum again."""
    content = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        start = 512 * draw.randrange(len(content) // 512)
        kind = draw.randrange(4)
        if kind == 0:
            content[start + draw.choice([124, 156, 257, 345, 386, 483])] = draw.randrange(256)
        elif kind == 1:
            content[draw.randrange(len(content))] = draw.randrange(256)
        elif kind == 2:
            content[start + 124 : start + 136] = draw.choice(
                [b"77777777777\0", bytes([0x80]) + draw.randbytes(11), bytes([0xFF]) * 12, b"%011o\0" % 512]
            )
        else:
            content[start + 156] = draw.choice(b"0123567LKSxgX")
        if draw.random() < 0.9:
            content[start : start + 512] = sealed(content[start : start + 512])
    return bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])


def test_a_thousand_mutated_archives_are_read_or_refused_and_never_anything_else(tmp_path: Path) -> None:
    draw = random.Random(17)
    whole = [whole_archive(dialect) for dialect in range(4)]
    paths = [tmp_path / f"{number}.tar" for number in range(1000)]
    for number, path in enumerate(paths):
        path.write_bytes(mutated(whole[number % 4], draw))
    for dialect, content in enumerate(whole):
        paths.append(tmp_path / f"whole-{dialect}.tar")
        paths[-1].write_bytes(content)
    found = read_under_a_limit(paths)
    assert len(found) == 1004 and found[1000:] == ["read 3 3"] * 4
    assert {line.split()[0] for line in found} == {"read", "refused"}
    for number, line in enumerate(found):
        as_source, adopted = re.match(r"(read \d+|refused) (.*)", line).groups()
        assert as_source in ("refused", f"read {adopted}"), line
        assert re.match(rf"\d+$|{tmp_path}/(whole-)?{number % 1000}\.tar", adopted), line
