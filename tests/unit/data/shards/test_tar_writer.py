"""The bytes of an archive do not depend on how its members meet the buffers, on threads, or on who changes an array."""

import hashlib
import tarfile

import numpy as np
import pytest

from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards import tar_writer
from kftrain.data.shards.tar_writer import HASHED_BYTES, TarWriter, member_header, padding
from kftrain.data.shards.writer import SplitWriter

SIZES = (0, 1, 511, 512, HASHED_BYTES - 1536, HASHED_BYTES - 512, HASHED_BYTES, 3 * HASHED_BYTES + 7, 20)


@pytest.mark.parametrize("hash_in_line", [False, True])
def test_members_of_any_length_come_back_and_the_digest_is_the_files(tmp_path, hash_in_line):
    contents = [bytes([number + 1]) * size for number, size in enumerate(SIZES)]
    with TarWriter(tmp_path / "a.tar", hash_in_line) as writer:
        for number, content in enumerate(contents):
            parts = [member_header(b"", b"%d.bin" % number, len(content)), content, padding(len(content))]
            writer.append(parts, sum(map(len, parts)))
        digest, table = writer.finish()
    written = (tmp_path / "a.tar").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest()
    assert table == b"".join(
        hashlib.sha256(written[at : at + 192 * 1024]).digest() for at in range(0, len(written), 192 * 1024)
    )
    assert writer.num_bytes == (tmp_path / "a.tar").stat().st_size
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [archive.extractfile(member).read() for member in archive] == contents


def test_the_header_is_the_one_that_tarfile_makes():
    for folder, base, size in (("", "k.jpg", 3), ("a/b", "x" * 100, 8**11 - 1), ("f" * 155, "~" * 100, 0)):
        info = tarfile.TarInfo(f"{folder}/{base}" if folder else base)
        info.size, info.mode = size, 0o444
        expected = tarfile.TarInfo.frombuf(info.tobuf(tarfile.USTAR_FORMAT), "ascii", "strict")
        found = tarfile.TarInfo.frombuf(member_header(folder.encode(), base.encode(), size), "ascii", "strict")
        assert found.get_info() == {**expected.get_info(), "chksum": found.chksum}


def test_an_array_may_be_changed_once_its_block_is_written(tmp_path):
    schema = SampleSchema((Field("rows", "int32", (3,)), Field("file", BYTES, (), ("txt",))))
    rows = np.empty((1, 3), np.int32)
    with SplitWriter(tmp_path, "train", schema, 10**9) as writer:
        for number in range(300):
            rows[:] = number
            writer.write(Block(f"k{number}", {"rows": rows, "file": np.array([b"%d" % number], object)}))
        writer.finish()
    with tarfile.open(tmp_path / "train-000000.tar") as archive:
        found = [archive.extractfile(member).read()[-12:] for member in archive if member.name.endswith(".npy")]
    assert found == [np.full(3, number, np.int32).tobytes() for number in range(300)]


def test_a_large_member_takes_no_more_memory_than_the_buffers(tmp_path, monkeypatch):
    seen = []

    def update(hasher, buffer, view):
        seen.append(len(buffer.getvalue()))
        hasher.free_buffers.put(tar_writer.io.BytesIO(bytes(HASHED_BYTES)))

    monkeypatch.setattr(tar_writer._Hasher, "update", update)
    content = np.zeros(10 * HASHED_BYTES, np.uint8)
    with TarWriter(tmp_path / "a.tar", hash_in_line=True) as writer:
        parts = [member_header(b"", b"x.bin", content.nbytes), content.data]
        writer.append(parts, 512 + content.nbytes)
        writer.finish()
    assert set(seen) == {HASHED_BYTES}
