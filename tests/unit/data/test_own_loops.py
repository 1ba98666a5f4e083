"""`kftrain.open_dataset` in people's own loops: plain torch loaders, several ranks, stops in the middle, webdataset."""

import io
import itertools
import json
import pickle
import subprocess
import sys
import tempfile
import tracemalloc
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from helpers import remote_shards
from helpers.source_checks import Sharded
from helpers.toy_data import shard_toy, text_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

import kftrain
from kftrain.core import storage
from kftrain.data import torch_dataset
from kftrain.data.decoding import Generators
from kftrain.data.lanes import Lanes
from kftrain.data.order import TrainingOrder
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.errors import ConfigError, DataError
from kftrain.tasks.image_classification import Augment, ImageClassification
from kftrain.tasks.settings import TaskConfig

RNG = np.random.default_rng(0)
SECTION = {"kind": "image_classification", "image_size": 8, "num_channels": 3, "num_classes": 2, "resize": "crop"}
SECTION |= {"storage": "files"}


def whole_list(samples):
    return list(samples)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """URI of a dataset of 60 JPEGs and PNGs, and the contents of the files by extension."""
    folder = tmp_path_factory.mktemp("images")
    written = {}
    for number in range(60):
        extension = ("jpg", "png")[number % 3 == 0]
        path = folder / "in" / "ab"[number % 2] / f"{number:02d}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (9 + number % 5, 12, 3), dtype=np.uint8)).save(path)
        written.setdefault(extension, set()).add(path.read_bytes())
    task = ImageClassification(**{name: value for name, value in SECTION.items() if name != "kind"})
    return Sharded(folder / "in", folder / "root", task).result.manifest_uri, written


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """URI of a dataset of arrays."""
    folder = tmp_path_factory.mktemp("toy")
    return shard_toy(text_folder(folder / "in"), folder / "root").manifest_uri


def test_a_remote_dataset_is_kept_on_the_node_for_the_next_process(tmp_path, monkeypatch):
    """Each worker of a loader is one; without a cache each would read the others' samples, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri = remote_shards.upload(remote_shards.write_dataset(tmp_path / "shards", 100))
    numbers = np.random.default_rng(0).permutation(kftrain.open_dataset(uri).num_samples)
    with remote_shards.counted_requests(monkeypatch) as requests:
        for _ in range(2):
            dataset = pickle.loads(pickle.dumps(kftrain.open_dataset(uri)))
            remote_shards.assert_rows(dataset.read(numbers), numbers)
            assert sum(requests.of(".tar")) == sum(shard.bytes for shard in read_manifest(uri).splits["train"].shards)
    fsspec.filesystem("memory").rm(remote_shards.FOLDER, recursive=True)


# -- by number -------------------------------------------------------------------------------------------------------


def test_samples_are_read_by_number_as_they_are_stored_or_as_the_task_uses_them(files):
    uri, written = files
    raw = kftrain.open_dataset(uri)
    assert len(raw) == raw.num_samples == len(list(raw)) > 40
    assert {sample["image"] for sample in raw} <= written["jpg"] | written["png"]
    assert all(type(sample["image"]) is bytes for sample in raw)
    decoded = kftrain.open_dataset(uri, task=TaskConfig.model_validate(SECTION))
    for number in (0, 7, len(raw) - 1, -1):
        image = Image.open(io.BytesIO(raw[number]["image"])).convert("RGB")
        side = min(image.size)
        left, top = (image.size[0] - side) / 2, (image.size[1] - side) / 2
        expected = image.resize((8, 8), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        assert np.array_equal(decoded[number]["image"], np.asarray(expected))
        assert decoded[number]["label"] == raw[number]["label"]
    for number in (len(raw), -len(raw) - 1):
        with pytest.raises(IndexError):
            raw[number]
    with pytest.raises(ConfigError, match="open it with task="):
        raw.collate([raw[0]])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_own_loader_takes_it_as_a_map(files, num_workers):
    dataset = kftrain.open_dataset(files[0], task=TaskConfig.model_validate(SECTION))
    loader = DataLoader(dataset, batch_size=7, num_workers=num_workers, collate_fn=dataset.collate)
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches[:-1]] == [7] * (len(batches) - 1)
    found = torch.cat([batch["image"] for batch in batches])
    expected = dataset.task.batch({name: np.stack([row[name] for row in dataset]) for name in ("image", "label")})
    assert torch.equal(found, expected["image"]) and found.shape[1:] == (3, 8, 8)
    again = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(again[3]["image"], dataset[3]["image"])


def test_a_stream_of_tokens_is_cut_into_sequences_by_the_task(tmp_path):
    from kftrain.tasks import build_task

    task = build_task(TaskConfig(kind="language_modeling", sequence_length=16, tokenizer="bytes"))
    shards = Sharded(text_folder(tmp_path / "in"), tmp_path / "root", task).result
    stored = kftrain.open_dataset(shards.manifest_uri)
    sequences = kftrain.open_dataset(shards.manifest_uri, task=task)
    assert len(sequences) < stored.num_samples and sequences.num_samples == stored.num_samples
    tokens = np.array([sample["tokens"] for sample in stored])
    assert np.array_equal(sequences[3]["tokens"], tokens[3 * 16 : 4 * 16 + 1])
    rows = kftrain.open_dataset(shards.manifest_uri, "validation", task=task)
    assert rows[0]["tokens"].shape == sequences[3]["tokens"].shape and len(rows) >= rows.num_samples
    assert sequences.collate([sequences[0], sequences[1]])


# -- in the training order ---------------------------------------------------------------------------------------------


def test_it_is_the_order_and_the_augmentation_of_training(files):
    task = ImageClassification(
        image_size=8, num_channels=3, num_classes=2, resize="crop", storage="files",
        augment=Augment(crop_scale=(0.3, 1.0), flip=True),
    )  # fmt: skip
    dataset = kftrain.open_dataset(files[0], task=task)
    order, generators = TrainingOrder(len(dataset), 5, 1024, 64), Generators(5)
    found = list(dataset.in_training_order(seed=5, batch_size=4, epochs=2))
    assert len(found) == 2 * len(dataset)
    raw = kftrain.open_dataset(files[0])
    for position, sample in enumerate(found):
        stored = raw[int(order.locate(np.array([position]))[0])]
        expected = task.decode(stored, generators.at(position))
        assert np.array_equal(sample["image"], expected["image"]) and sample["label"] == expected["label"]
    assert not np.array_equal(found[0]["image"], found[len(dataset)]["image"])


def numbered(count):
    """A dataset whose samples are their own numbers."""

    class Numbered:
        def __len__(self):
            return count

        def samples(self, numbers, generators):
            return iter(numbers.tolist())

    return Numbered()


def ordered(count, **options):
    defaults = {"seed": 1, "batch_size": 1, "epochs": 1, "rank": 0, "world_size": 1, "shuffle": True}
    return torch_dataset.InTrainingOrder(
        numbered(count), **{**defaults, "range_samples": 3, "window_ranges": 2, "lanes": 4, **options}
    )


def as_worker(monkeypatch, worker, num_workers):
    info = SimpleNamespace(id=worker, num_workers=num_workers) if num_workers > 1 else None
    monkeypatch.setattr(torch_dataset, "get_worker_info", lambda: info)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_each_sample_comes_once_an_epoch_for_any_ranks_workers_stops_and_changes_of_both(data):
    count = data.draw(st.integers(1, 60))
    state, position, seen = ordered(count, batch_size=data.draw(st.integers(1, 9))).state_dict(), 0, []
    if data.draw(st.booleans()):
        del state["batch"]  # of release 0.2
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(data.draw(st.integers(1, 3))):  # a life; the last goes on to the end of the epoch
            world, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
            size = data.draw(st.integers(1, 5))
            stop = data.draw(st.integers(0, 6))
            per_rank = []
            for rank in range(world):
                parts = []
                for worker in range(workers):
                    as_worker(patch, worker, workers)
                    dataset = ordered(count, rank=rank, world_size=world, batch_size=size)
                    dataset.load_state_dict(state)
                    samples = list(dataset)
                    parts.append([samples[first : first + size] for first in range(0, len(samples), size)])
                # as a DataLoader does: one batch of each worker in turn
                batches = [batch for turn in itertools.zip_longest(*parts) for batch in turn if batch]
                per_rank.append(batches)
            if any(len(batches) < stop for batches in per_rank):
                stop = 0  # the epoch ends before
            seen += [sample for batches in per_rank for batch in batches[:stop] for sample in batch]
            resumed = ordered(count, batch_size=size, world_size=world)
            resumed.load_state_dict(state)
            state = resumed.state_after(stop)
            position = state["position"] = min(state["position"], count)
            if position == count:
                break
        as_worker(patch, 0, 1)
        if position < count:
            dataset = ordered(count)
            dataset.load_state_dict(state)
            seen += list(dataset)
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_worker_goes_on_from_its_own_state(monkeypatch, num_workers):
    """As torchdata's StatefulDataLoader asks each worker for its state, and gives it back to it."""
    whole = sorted(ordered(50))
    for stop in (0, 1, 4, 7, 10, 99):
        seen = []
        for worker in range(num_workers):
            as_worker(monkeypatch, worker, num_workers)
            dataset = ordered(50, batch_size=4)
            seen += itertools.islice(iter(dataset), stop + worker)
            state = dataset.state_dict()
            resumed = ordered(50, batch_size=4)
            resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
            if stop < 99:
                seen += list(resumed)
            elif num_workers > 1:
                assert list(resumed) == [], "it has finished its share of the epoch"
                assert len(list(resumed)) > 0, "and takes part in the next one"
        assert sorted(seen) == whole


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_are_the_same_for_any_number_of_workers_and_after_a_resume(toy, world_size):
    dataset = kftrain.open_dataset(toy)
    name = dataset.schema.fields[0].name

    def batches(num_workers, skip=0):
        found = []
        for rank in range(world_size):
            shuffled = dataset.in_training_order(seed=3, batch_size=5, epochs=1, rank=rank, world_size=world_size)
            shuffled.load_state_dict(shuffled.state_after(skip))
            loader = DataLoader(shuffled, batch_size=5, num_workers=num_workers, collate_fn=whole_list)
            found.append([np.stack([sample[name] for sample in batch]).tobytes() for batch in loader])
        return found

    alone = batches(0)
    assert batches(2) == alone
    assert batches(2, skip=3) == batches(0, skip=3) == [rank[3:] for rank in alone]
    assert sum(map(len, alone)) == pytest.approx(len(dataset) / 5, abs=world_size)


def test_an_iteration_follows_the_one_before_and_epochs_differ():
    dataset = ordered(20)
    first, second = list(dataset), list(dataset)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    dataset.set_epoch(0)
    assert list(dataset) == first
    endless = ordered(20, epochs=None)
    assert list(itertools.islice(iter(endless), 40)) == first + second
    assert endless.state_dict() == {"position": 40, "batch": 1}
    assert list(ordered(20, shuffle=False)) == list(range(20))


def test_it_is_order_3_of_its_own_global_batch_and_order_2_after_a_state_of_release_02():
    options = {"range_samples": 4, "window_ranges": 4, "lanes": 4, "batch_size": 6, "epochs": 2}
    loops = [ordered(200, **options, rank=rank, world_size=2) for rank in (0, 1)]
    lanes = TrainingOrder(200, 1, 4, 4, lanes=Lanes(4, 12, 4)).locate(np.arange(400))
    plain = TrainingOrder(200, 1, 4, 4).locate(np.arange(400))
    assert lanes.tolist() != plain.tolist()
    shares = [np.concatenate([np.arange(g, min(g + 6, 400)) for g in range(6 * r, 400, 12)]) for r in (0, 1)]
    for loop, share in zip(loops, shares, strict=True):
        assert list(loop) == lanes[share].tolist()
    old = ordered(200, **options, rank=0, world_size=2)
    old.load_state_dict({"position": 0})
    assert list(old) == plain[shares[0]].tolist()
    old.set_epoch(1)
    assert old.state_dict() == {"position": 200}
    old.load_state_dict({"position": 0, "batch": 12})
    assert list(old) == lanes[shares[0]].tolist(), "a state that names its lanes is never in doubt"
    assert "batch" not in ordered(20, shuffle=False).state_dict()


def test_a_state_without_lanes_never_changes_the_order_of_a_loop_that_has_shown_samples_in_lanes(capsys):
    """Positions of one order in the other would repeat some samples, and leave out as many."""
    loop = ordered(200, batch_size=8)
    seen = list(itertools.islice(iter(loop), 96))
    before = loop.state_dict()
    with pytest.raises(ConfigError, match=r"load_state_dict: not of this loop's order \(got .'position': 96.\)"):
        loop.load_state_dict({"position": 96})
    assert loop.state_dict() == before and sorted(seen + list(loop)) == list(range(200))
    assert "0.2" not in capsys.readouterr().out


def test_a_loop_that_goes_on_in_the_order_of_release_02_says_so_once(capsys):
    old, resumed = TrainingOrder(200, 1, 3, 2).locate(np.arange(200)).tolist(), ordered(200, batch_size=8)
    resumed.load_state_dict({"position": 96})
    assert list(resumed) == old[96:]
    assert capsys.readouterr().out.count("{'position': 96} has no batch: it is taken for one of release 0.2") == 1
    resumed.load_state_dict(resumed.state_dict())
    resumed.load_state_dict({"position": 40})  # it is still in that order
    assert list(resumed) == old[40:]
    stored = ordered(200, shuffle=False)
    stored.load_state_dict({"position": 7})
    assert list(stored) == list(range(7, 200)) and capsys.readouterr().out == ""


@pytest.mark.parametrize("world_size", [1, np.int64(2)])
def test_numbers_of_numpy_make_states_that_are_plain_data(world_size):
    sizes = {"batch_size": np.int64(4), "epochs": np.int32(3), "lanes": np.int64(2), "range_samples": np.int64(3)}
    loop, plain = ordered(20, **sizes, world_size=world_size), ordered(20, batch_size=4, world_size=int(world_size))
    loop.set_epoch(np.int64(1))
    for count in (3, 7, 40):
        list(itertools.islice(iter(loop), count))
        for state in (loop.state_dict(), loop.state_after(np.int64(2))):
            plain.load_state_dict(json.loads(json.dumps(state)))
            assert plain.state_dict()["position"] == state["position"]


@pytest.mark.parametrize("batch", [1 << 40, 1 << 62])
def test_a_state_of_a_huge_batch_takes_no_memory_for_it(batch):
    """It has one lane for all that there is, or as many as its samples reach."""
    loop = ordered(100, range_samples=3, window_ranges=2)
    loop.load_state_dict({"position": 8, "batch": batch})
    tracemalloc.start()
    whole = list(loop)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and len(set(whole)) == 92
    assert sorted(ordered(100, batch_size=sys.maxsize, world_size=2, rank=0)) == list(range(100))
    huge = ordered(100, batch_size=sys.maxsize, world_size=2)
    ordered(100).load_state_dict(huge.state_dict())


def test_what_is_no_state_or_no_rank_is_refused():
    at = {"position": 1}
    for state in (
        *({}, {"position": -1}, {"position": "7"}, {"position": True}),
        *({**at, "start": "x"}, {**at, "start": -1}, {**at, "start": True}, {**at, "start": 1 << 70}),
        *({**at, "batch": 0}, {**at, "batch": True}, {**at, "batch": 2.0}, {**at, "batch": (1 << 62) + 1}),
    ):
        with pytest.raises(ConfigError, match="not a state"):
            ordered(20).load_state_dict(state)
    for options in ({"rank": 2, "world_size": 2}, {"batch_size": 0}, {"epochs": 0}, {"batch_size": True}):
        with pytest.raises(ConfigError, match="must be"):
            ordered(20, **options)


def test_opening_a_dataset_imports_no_torch(files):
    code = (
        "import sys, kftrain; dataset = kftrain.open_dataset(sys.argv[1]); dataset[0]; next(dataset.as_webdataset());"
        "assert 'torch' not in sys.modules; dataset.in_training_order(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, files[0]], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


# -- webdataset --------------------------------------------------------------------------------------------------------


def test_it_begins_a_pipeline_of_webdataset(files):
    uri, written = files
    dataset = kftrain.open_dataset(uri)
    raw = list(webdataset.DataPipeline(dataset.as_webdataset))
    for extension in ("jpg", "png"):
        assert {sample[extension] for sample in raw if extension in sample} <= written[extension]
    assert sum("png" in sample for sample in raw) + sum("jpg" in sample for sample in raw) == len(dataset)
    pipeline = webdataset.DataPipeline(
        dataset.as_webdataset, webdataset.decode("rgb8"), webdataset.to_tuple("jpg;png", "label.npy")
    )
    for sample, (pixels, label) in zip(dataset, pipeline, strict=True):
        expected = np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB"))
        assert np.array_equal(pixels, expected) and label == sample["label"]
    assert len({sample["__key__"] for sample in raw}) == len(dataset)


def damage(uri, monkeypatch, tmp_path):
    """One bit of the first shard; nothing is remembered of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    manifest = read_manifest(uri)
    path = storage.local_path(shard_uri(uri, manifest.splits["train"].shards[0]))
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    return path.name


READINGS = {
    "by number": lambda dataset: dataset[0],
    "training order": lambda dataset: list(dataset.in_training_order()),
    "webdataset": lambda dataset: list(dataset.as_webdataset()),
    "loader": lambda dataset: list(DataLoader(dataset, batch_size=9, num_workers=1, collate_fn=whole_list)),
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_no_sample_of_a_damaged_shard_is_given_whatever_reads_it(tmp_path, monkeypatch, reading):
    uri = shard_toy(text_folder(tmp_path / "in"), tmp_path / "root").manifest_uri
    before = kftrain.open_dataset(uri)
    name = damage(uri, monkeypatch, tmp_path)
    for dataset in (kftrain.open_dataset(uri), before, before):
        with pytest.raises(DataError, match=f"{name}: its content has changed"):
            reading(dataset)
    reading(kftrain.open_dataset(uri, verify=False))


def test_a_shard_is_hashed_once_on_a_node(tmp_path, monkeypatch):
    uri = shard_toy(text_folder(tmp_path / "in"), tmp_path / "root").manifest_uri
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hashed, sha256_file = [], storage.sha256_file
    monkeypatch.setattr(storage, "sha256_file", lambda uri: hashed.append(uri) or sha256_file(uri))
    for _ in range(2):
        dataset = kftrain.open_dataset(uri)
        assert len(list(dataset)) == len(list(pickle.loads(pickle.dumps(dataset)))) == len(dataset)
    shards = read_manifest(uri).splits["train"].shards
    assert sorted(hashed) == sorted(shard_uri(uri, shard) for shard in shards)


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_loader_give_webdatasets_samples_once(toy, method):
    dataset = kftrain.open_dataset(toy)
    pipeline = webdataset.DataPipeline(dataset.as_webdataset)
    loader = DataLoader(pipeline, batch_size=None, num_workers=2, multiprocessing_context=method)
    for _ in range(2):  # epochs
        assert sorted(keys_of(loader)) == keys_of(dataset.as_webdataset())
    assert len(keys_of(loader)) == len(dataset)


@pytest.mark.parametrize("is_known", [True, False], ids=["rank given", "torch.distributed"])
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 3), (3, 1), (2, 2), (7, 0)])
def test_ranks_and_their_workers_share_webdatasets_samples(toy, monkeypatch, world_size, num_workers, is_known):
    """A worker that is spawned has no process group: its dataset brings the rank along."""
    dataset, parts = kftrain.open_dataset(toy), []
    for rank, worker in itertools.product(range(world_size), range(max(1, num_workers))):
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: not is_known)
            patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            patch.setattr(torch.distributed, "get_world_size", lambda: world_size)
            named = {"rank": rank, "world_size": world_size} if is_known else {}
            pickled = pickle.dumps(dataset)
        if num_workers:
            with monkeypatch.context() as patch:
                info = SimpleNamespace(id=worker, num_workers=num_workers)
                patch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
                parts.append(keys_of(pickle.loads(pickled).as_webdataset(**named)))
        else:
            parts.append(keys_of(dataset.as_webdataset(rank=rank, world_size=world_size)))
    assert sorted(itertools.chain(*parts)) == keys_of(dataset.as_webdataset())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if not num_workers or not is_known:  # what was pickled on another rank is read as a whole by one process
        assert len(keys_of(pickle.loads(pickled).as_webdataset())) == len(dataset)
    with pytest.raises(ConfigError, match="rank: must be below 2"):
        next(dataset.as_webdataset(rank=2, world_size=2))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_inherit_nothing_read_in_the_training_order(files, method):
    dataset = kftrain.open_dataset(files[0], task=TaskConfig.model_validate(SECTION))
    samples = dataset.in_training_order(seed=3, batch_size=8, rank=1, world_size=2)
    expected = [sample["image"].tobytes() for sample in samples]
    samples.set_epoch(0)
    loader = DataLoader(samples, batch_size=8, num_workers=2, multiprocessing_context=method, collate_fn=whole_list)
    assert [sample["image"].tobytes() for batch in loader for sample in batch] == expected != []


def test_what_is_pickled_in_the_middle_goes_on_there(toy):
    samples = kftrain.open_dataset(toy).in_training_order(seed=3, batch_size=8)
    whole = [sample["data"].tobytes() for sample in samples]
    samples.set_epoch(0)
    list(itertools.islice(iter(samples), 20))
    again = pickle.loads(pickle.dumps(samples))
    assert [sample["data"].tobytes() for sample in again] == whole[20:]


def test_a_loop_without_workers_counts_its_batches_from_where_it_began():
    samples = ordered(50, batch_size=4)
    samples.load_state_dict({"position": 8})
    assert len(list(itertools.islice(iter(samples), 12))) == 12
    assert samples.state_after(3) == samples.state_dict() == {"position": 20}, "of release 0.2"


@pytest.mark.parametrize("state", [None, {"position": 1 << 70}, {"position": 1.5}])
def test_what_is_no_position_is_refused(state):
    with pytest.raises(ConfigError, match="not a state"):
        ordered(50).load_state_dict(state)


@pytest.mark.parametrize("options", [{"batch_size": 1.5}, {"world_size": 0}])
def test_a_size_that_is_no_whole_number_is_refused(options):
    with pytest.raises(ConfigError, match="at least 1, and a whole number"):
        ordered(50, **options)


def test_the_state_at_the_end_of_an_epoch_goes_on_with_the_next_one():
    for rank in range(2):
        samples, resumed = (ordered(50, batch_size=4, rank=rank, world_size=2) for _ in range(2))
        list(samples)
        resumed.load_state_dict(samples.state_dict())
        assert list(resumed) == list(samples) != []


def test_a_rank_goes_on_in_the_middle_of_its_batch():
    samples, resumed = (ordered(50, batch_size=4, rank=1, world_size=2) for _ in range(2))
    whole = list(ordered(50, batch_size=4, rank=1, world_size=2))
    assert list(itertools.islice(iter(samples), 6)) == whole[:6]
    resumed.load_state_dict(samples.state_dict())
    assert list(resumed) == whole[6:]


def test_a_place_that_is_no_dataset_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for name in ("file", "nothing"):
        with pytest.raises(DataError, match=f"{name}/manifest.json"):
            kftrain.open_dataset(str(tmp_path / name))
