import hashlib
import io
import json
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import flat_copy, shard_toy, text_folder

from kftrain.core import storage
from kftrain.data import dataset as datasets
from kftrain.data.shards import manifest as manifests
from kftrain.errors import DataError


@pytest.fixture(scope="module")
def manifest_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sharded")
    result = shard_toy(text_folder(folder / "texts", 400), folder / "root")
    return str(flat_copy(result.manifest_uri, folder / "flat") / "manifest.json")


@pytest.fixture
def remote_uri(manifest_uri: str):
    store = fsspec.filesystem("memory")
    for path in Path(manifest_uri).parent.iterdir():
        store.pipe_file(f"/remote-shards/{path.name}", path.read_bytes())
    yield "memory://remote-shards/manifest.json"
    store.rm("/remote-shards", recursive=True)


def expected_rows(manifest_uri: str, split: str) -> tuple[list[dict[str, np.ndarray]], list[str]]:
    """All rows of each shard and all keys, from Python's own tarfile."""
    import tarfile

    shards, keys = [], []
    for shard in manifests.read_manifest(manifest_uri).splits[split].shards:
        fields: dict[str, list[np.ndarray]] = {"data": [], "length": []}
        with tarfile.open(Path(manifest_uri).parent / shard.name) as archive:
            for member in archive:
                name = member.name.split(".")[1]
                fields[name].append(np.load(io.BytesIO(archive.extractfile(member).read())))
                if name == "data":
                    keys.append(member.name.split(".")[0].replace("_x2e_", "."))
        shards.append({name: np.concatenate(parts) for name, parts in fields.items()})
    return shards, keys


@pytest.mark.parametrize("place", ["local", "remote"])
def test_random_rows_are_what_tarfile_finds(manifest_uri: str, remote_uri: str, place: str) -> None:
    dataset = open_split(manifest_uri if place == "local" else remote_uri, "train")
    shards, _ = expected_rows(manifest_uri, "train")
    assert len(shards) >= 3 and np.diff(dataset._shard_starts).tolist() == [len(shard["data"]) for shard in shards]
    rng = np.random.default_rng(0)
    shard_ids = rng.integers(0, len(shards), 300)
    rows = np.array([rng.integers(0, len(shards[shard]["data"])) for shard in shard_ids])
    starts = np.cumsum([0, *(len(shard["data"]) for shard in shards)])
    found = dataset.read(starts[shard_ids] + rows)
    for name in ("data", "length"):
        expected = np.stack([shards[shard][name][row] for shard, row in zip(shard_ids, rows, strict=True)])
        assert np.array_equal(found[name], expected) and found[name].dtype == expected.dtype
        assert found[name].flags.writeable and found[name].flags.c_contiguous


@pytest.mark.parametrize("place", ["local", "remote"])
def test_stored_order_gives_all_rows_with_their_groups_and_keys(manifest_uri: str, remote_uri: str, place: str) -> None:
    dataset = open_split(manifest_uri if place == "local" else remote_uri, "validation")
    shards, keys = expected_rows(manifest_uri, "validation")
    parts = [
        dataset.read_range(start, min(start + 37, dataset.num_samples)) for start in range(0, dataset.num_samples, 37)
    ]
    data = np.concatenate([arrays["data"] for arrays, _ in parts])
    groups = np.concatenate([group_ids for _, group_ids in parts])
    assert np.array_equal(data, np.concatenate([shard["data"] for shard in shards]))
    assert dataset.group_keys() == keys and dataset.num_groups == len(keys)
    texts = {key: b"".join(bytes(row) for row in data[groups == group]).rstrip(b"\0") for group, key in enumerate(keys)}
    assert all(text.startswith(b"document %d " % int(key[-7:-4])) for key, text in texts.items())


def test_few_open_shards_are_enough_for_many(manifest_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MAX_OPEN_SHARDS", 1)
    dataset = open_split(manifest_uri, "train")
    whole, _ = dataset.read_range(0, dataset.num_samples)
    shards, _ = expected_rows(manifest_uri, "train")
    assert np.array_equal(whole["data"], np.concatenate([shard["data"] for shard in shards]))
    assert len(dataset._open) == 1


def test_threads_may_read_at_the_same_time(manifest_uri: str) -> None:
    dataset = open_split(manifest_uri, "train")
    expected, _ = open_split(manifest_uri, "train").read_range(0, dataset.num_samples)
    wrong: list[int] = []

    def read(start: int) -> None:
        for first in range(start, dataset.num_samples - 64, 64):
            arrays, _ = dataset.read_range(first, first + 64)
            if not np.array_equal(arrays["data"], expected["data"][first : first + 64]):
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 13, 29)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("train-000000.tar", lambda path: path.unlink(), r"train-000000\.tar: missing"),
        ("train-000000.tar", lambda path: path.write_bytes(path.read_bytes()[:5000]), r"train-000000\.tar: truncated"),
        ("train-000000.tar", lambda path: path.write_bytes(b""), r"train-000000\.tar: truncated"),
        ("train-000000.index.npy", lambda path: path.unlink(), r"train-000000\.index\.npy: missing"),
        ("train-000000.index.npy", lambda path: path.write_bytes(b"\0" * 200), r"index\.npy: its content has changed"),
    ],
)
def test_a_damaged_file_is_named_when_it_is_opened(
    manifest_uri: str, tmp_path: Path, name: str, damage, what: str
) -> None:
    shards = flat_copy(manifest_uri, tmp_path / "shards")
    damage(shards / name)
    with pytest.raises(DataError, match=what):
        open_split(str(shards / "manifest.json"), "train").read(np.array([0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.__setitem__((0, 1), 10**9),
        lambda index: index.__setitem__((0, 1), -1),
        lambda index: index.__setitem__((0, 0), 2**62),
        lambda index: index.__setitem__((0, 0), 0),
    ],
)
def test_an_index_that_points_outside_its_shard_is_refused_even_when_all_digests_fit(
    manifest_uri: str, tmp_path: Path, change
) -> None:
    shards = flat_copy(manifest_uri, tmp_path / "shards")
    index = np.load(shards / "train-000000.index.npy")
    change(index)
    replace_index(shards, index)
    with pytest.raises(DataError, match="the index does not fit its shard"):
        open_split(str(shards / "manifest.json"), "train").read(np.array([0]))


def test_an_index_of_objects_is_not_unpickled(manifest_uri: str, tmp_path: Path) -> None:
    shards = flat_copy(manifest_uri, tmp_path / "shards")
    replace_index(shards, np.array([print], dtype=object))
    with pytest.raises(DataError, match="not an array"):
        open_split(str(shards / "manifest.json"), "train").read(np.array([0]))


def replace_index(shards: Path, index: np.ndarray) -> None:
    """Another index, with a manifest to match."""
    np.save(shards / "train-000000.index.npy", index)
    document = storage.read_json(str(shards / "manifest.json"))
    digest = hashlib.sha256((shards / "train-000000.index.npy").read_bytes()).hexdigest()
    document["splits"]["train"]["shards"][0]["index_sha256"] = digest
    lists = {s: [manifests.Shard(**x) for x in document["splits"][s]["shards"]] for s in ("train", "validation")}
    document["dataset_digest"] = manifests.content_digest(ToyTask().schema(), document["task_settings"], lists)
    (shards / "manifest.json").write_text(json.dumps(document))
