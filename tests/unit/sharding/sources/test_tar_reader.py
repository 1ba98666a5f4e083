"""The walk through a tar's headers, against Python's own reader of tars."""

import io
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.shards import tar_reader
from kftrain.errors import DataError

NAMES = st.lists(
    st.lists(st.text("aä.b- €", min_size=1, max_size=40).filter(lambda part: part.strip(". ")), min_size=1, max_size=9),
    min_size=1,
    max_size=6,
    unique_by="/".join,
).map(lambda names: ["/".join(parts) for parts in names])
DIALECTS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    found.size, found.type = len(content), kind
    for field, value in fields.items():
        setattr(found, field, value)
    return found, content


def archive(*members: tuple[tarfile.TarInfo, bytes], **options) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as written:
        for info, content in members:
            written.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def walked(content: bytes) -> list[tuple[str, bytes]]:
    members = tar_reader.walk(io.BytesIO(content), "s.tar")
    return [(each.name, content[each.offset_bytes :][: each.size_bytes]) for each in members]


def read_by_tarfile(content: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8") as found:
        return [(each.name.removeprefix("./"), found.extractfile(each).read()) for each in found if each.isreg()]


@settings(deadline=None, max_examples=150)
@given(names=NAMES, dialect=DIALECTS, of_all=st.dictionaries(st.sampled_from(["comment", "mtime"]), st.just("1.5")))
def test_members_of_any_dialect_are_those_that_tarfile_reads(names: list[str], dialect: int, of_all: dict) -> None:
    members = [member(name, name.encode() * 7, mtime=1.5, pax_headers={"comment": "é" * 30}) for name in names]
    options = {"pax_headers": of_all} if dialect == tarfile.PAX_FORMAT else {}
    try:
        content = archive(*members, format=dialect, encoding="utf-8", **options)
    except ValueError:  # a name that USTAR has no place for
        return
    assert walked(content) == read_by_tarfile(content) == [(name, name.encode() * 7) for name in names]


def test_sizes_and_names_for_all_members_count_until_they_are_said_anew() -> None:
    """A global header's size holds for each member behind it that has no other."""
    content = archive(
        member("1.txt", b"one"), member("2.txt", b"two"), pax_headers={"size": "3"}, format=tarfile.PAX_FORMAT
    )
    assert walked(content) == [("1.txt", b"one"), ("2.txt", b"two")]


def test_a_size_in_base_256_and_signed_checksums_are_read() -> None:
    block = bytearray(archive(member("é.txt", b"data"), format=tarfile.GNU_FORMAT, encoding="utf-8"))
    block[124:136] = b"\x80" + (4).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in block[:512])
    assert walked(bytes(block)) == [("é.txt", b"data")] == read_by_tarfile(bytes(block))


def test_an_archive_of_the_stock_writer_is_read(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "s-%06d.tar"), maxcount=3, verbose=0) as writer:
        for number in range(7):
            writer.write({"__key__": f"{'deep/' * 30}{number}", "txt": f"text {number}", "cls": number})
    found = [each for path in sorted(tmp_path.iterdir()) for each in walked(path.read_bytes())]
    assert sorted(found)[::2] == sorted((f"{'deep/' * 30}{n}.cls", b"%d" % n) for n in range(7))


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (member("2.txt", kind=tarfile.SYMTYPE, linkname="1.txt"), r"s\.tar:2\.txt: neither .*, but a link \(got '2'\)"),
        (member("2.txt", kind=tarfile.LNKTYPE, linkname="1.txt"), r"s\.tar:2\.txt: neither .*, but a link \(got '1'\)"),
        (member("2.txt", kind=tarfile.CHRTYPE), r"s\.tar:2\.txt: neither .*, but a device"),
        (member("2.txt", kind=tarfile.BLKTYPE), r"s\.tar:2\.txt: neither .*, but a device"),
        (member("2.txt", kind=tarfile.FIFOTYPE), r"s\.tar:2\.txt: neither .*, but a pipe"),
        (member("2.txt", kind=b"Z"), r"s\.tar:2\.txt: neither .*, but of an unknown kind \(got 'Z'\)"),
        (member("2.txt", kind=tarfile.GNUTYPE_SPARSE), r"s\.tar:2\.txt: a sparse file"),
        (member("2.txt", pax_headers={"GNU.sparse.size": "9"}), r"s\.tar:2\.txt: a sparse file"),
        (member("/etc/2.txt", b"x"), r"s\.tar: the name of a member is absolute \(got '/etc/2\.txt'\)"),
        (member("a/../2.txt", b"x"), r"s\.tar: the name of a member climbs \(got 'a/\.\./2\.txt'\)"),
        (member("x", pax_headers={"path": "../2.txt"}), r"s\.tar: the name of a member climbs"),
        (member("..", kind=tarfile.DIRTYPE), r"s\.tar: the name of a member climbs"),
        (member("2.txt", pax_headers={"size": "-1"}), r"s\.tar: a PAX header has no size"),
        (member("2.txt", pax_headers={"comment": "x" * 2_000_000}), r"s\.tar: a header explains the next one in 2,0"),
    ],
)
def test_what_is_no_plain_file_is_refused_by_name(bad: tuple[tarfile.TarInfo, bytes], what: str) -> None:
    with pytest.raises(DataError, match=what):
        walked(archive(member("1.txt", b"x"), bad))


def test_folders_and_labels_are_passed_over() -> None:
    members = (member("label", kind=b"V"), member("d/", kind=tarfile.DIRTYPE), member("d/1.txt", b"x"))
    assert walked(archive(*members)) == [("d/1.txt", b"x")]


def test_two_headers_may_not_explain_one_member_each_in_its_way() -> None:
    whole = archive(member("x" * 200, b"x"), format=tarfile.PAX_FORMAT)
    with pytest.raises(DataError, match="two headers of one kind explain the same member"):
        walked(whole[:1024] + whole)
    gnu = archive(member("y" * 200, b"x"), format=tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match="two headers name the same member"):
        walked(whole[:1024] + gnu)
    with pytest.raises(DataError, match="a header explains a member that is not there"):
        walked(whole[:1024] + bytes(1024))
