"""Sums of a champion that are damaged, with the right digest beside them: no traceback, and a person decides."""

import hashlib
import io
import zipfile

import numpy as np
import pytest

from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.registry.comparison import read_measured_export


def packed(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return bytearray(stream.getvalue())


def with_bytes(content, changes):
    """The archive with other bytes in its first directory entry and local header."""
    for offset, value in changes.items():
        content[content.find(b"PK\x01\x02") + offset + 2] = content[offset] = value
    return content


def saved(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def deflated(name):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, np.random.default_rng(0).bytes(600))
    content = bytearray(stream.getvalue())
    content[30 + len(name) : 50 + len(name)] = b"\xff" * 20
    return content


KEYS, ONES = np.array(["a", "b"]), np.ones(2)

DAMAGED = {
    "empty": b"",
    "one array": saved(ONES),
    "encrypted": with_bytes(packed(keys=KEYS, count=ONES), {6: 1}),
    "odd compression": with_bytes(packed(keys=KEYS, count=ONES), {8: 99}),
    "corrupt": deflated("keys.npy"),
    "text": packed(keys=KEYS, count=KEYS),
    "one number": packed(keys=KEYS, count=np.float64(3)),
    "table": packed(keys=KEYS, count=np.ones((2, 2))),
    "numbers as keys": packed(keys=ONES, count=ONES),
    "no keys": packed(count=ONES),
    "another length": packed(keys=KEYS, count=np.ones(3)),
    "complex": packed(keys=KEYS, count=1j * ONES),
}


def damage(run, content, name="statistics"):
    folder = run.paths.evaluation(run.completion.checkpoint_digest, run.evaluation.evaluation_digest)
    storage.publish(storage.join(folder, f"{name}.npz"), bytes(content))
    digest = {f"{name}_sha256": hashlib.sha256(content).hexdigest()}
    storage.publish_json(storage.join(folder, "metrics.json"), {**run.evaluation.to_dict(), **digest})
    return folder


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_they_are_refused_in_one_line(finished, content):
    with pytest.raises(EvaluationError, match=r"the statistics cannot be read: ['\w]"):
        read_measured_export(damage(finished("one", 0.6), content))


def test_so_are_those_by_slice_without_their_slices(finished):
    with pytest.raises(EvaluationError, match=r"the statistics cannot be read: ['\w]"):
        read_measured_export(damage(finished("one", 0.6), packed(keys=KEYS, count=ONES), "slices"))


def test_a_person_decides_about_a_challenger_of_such_a_champion(finished):
    champion, challenger = finished("one", 0.6), finished("two", 0.8)
    champion.submit()
    damage(champion, DAMAGED["text"])
    found = challenger.submit()
    assert found.awaits_person and "has no evaluation on the same data" in found.reason
