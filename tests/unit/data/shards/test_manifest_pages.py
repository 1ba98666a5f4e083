"""A manifest of many shards has pages: the same dataset, of which a reader reads and verifies what it needs."""

import itertools
import json
import pickle
import time

import numpy as np
import pytest
from helpers import large_datasets
from helpers.fakes import counting_store
from helpers.fakes.counting_store import count, count_bytes
from helpers.large_datasets import make_manifest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder, toy_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain import trust
from kftrain.core import storage
from kftrain.data.settings import DataConfig
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import pages
from kftrain.data.shards.manifest import Component, publish_manifest, read_manifest
from kftrain.data.shards.verify import check_listing, choose_listings
from kftrain.errors import DataError
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import run_dataset

SPLITS = ("train", "validation")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def new_process():
    """A process that has read no page yet."""
    pages._read_page.cache_clear()


def on_node(folder):
    """Settings of the processes of a node."""
    return DataConfig(cache_dir=str(folder))


@pytest.fixture
def paged(monkeypatch):
    """Small pages, for every dataset."""
    monkeypatch.setattr(pages, "PAGE_SHARDS", 4)
    monkeypatch.setattr(manifests, "MAX_PLAIN_SHARDS", 0)


def publish_both(folder, manifest):
    """The manifest read from its two forms."""
    uris = [str(folder / name / "manifest.json") for name in ("plain", "paged")]
    with pytest.MonkeyPatch.context() as patch:
        for uri, limit in zip(uris, (1 << 30, 0), strict=True):
            patch.setattr(manifests, "MAX_PLAIN_SHARDS", limit)
            publish_manifest(uri, manifest)
    assert "splits" in storage.read_json(uris[0]) and "splits" not in storage.read_json(uris[1])
    return [read_manifest(uri) for uri in uris]


@st.composite
def any_manifest(draw):
    counts = {split: draw(st.integers(1, 12)) for split in SPLITS}
    components = []
    if draw(st.booleans()):
        first = {split: draw(st.integers(1, counts[split])) for split in SPLITS}
        if all(first[split] < counts[split] for split in SPLITS):
            shares = [first, {split: counts[split] - first[split] for split in SPLITS}]
            components = [
                Component(name=name, source=name, dataset_digest=large_datasets.digest(name), num_shards=share)
                for name, share in zip(("web", "code"), shares, strict=True)
            ]
    folder = draw(st.sampled_from(["", "s3://others/shards"]))
    return make_manifest(counts["train"], counts["validation"], folder, components=components)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifest=any_manifest(), data=st.data())
def test_both_forms_give_equal_datasets(manifest, data, paged, tmp_path_factory):
    plain, compact = publish_both(tmp_path_factory.mktemp("forms"), manifest)
    assert plain == manifest and compact.to_dict() == manifest.to_dict()
    assert manifests.describe(plain) == manifests.describe(compact)
    assert plain.adopted_folders == compact.adopted_folders and plain.is_adopted == compact.is_adopted
    for ours, theirs in zip(plain.split_by_component(), compact.split_by_component(), strict=True):
        for split in SPLITS:
            expected, shards = list(ours.splits[split].shards), theirs.splits[split].shards
            assert list(shards) == expected and len(shards) == len(expected)
            for name in ("bytes", "num_blocks", "num_samples"):
                column = theirs.splits[split].column(name)
                assert column.dtype == np.int64 and column.tolist() == [getattr(shard, name) for shard in expected]
            assert shards[::-1].column("bytes").tolist() == [s.bytes for s in expected[::-1]]
            bounds = st.none() | st.integers(-15, 15)
            chosen = data.draw(st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2, 3, -1])))
            assert list(shards[chosen]) == expected[chosen]
            place = data.draw(st.integers(-len(expected), len(expected) - 1))
            assert shards[place] == expected[place]
            with pytest.raises(IndexError):
                shards[len(expected)]


def test_training_reads_the_same_from_both_forms(paged, tmp_path):
    source = text_folder(tmp_path / "texts", 200)
    results = {}
    for name, limit in (("plain", 1 << 30), ("paged", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifests, "MAX_PLAIN_SHARDS", limit)
            results[name] = shard_toy(source, tmp_path / name, part_size_bytes=1 << 16)
    assert results["plain"].dataset_digest == results["paged"].dataset_digest
    for split in SPLITS:
        plain, compact = (open_split(result.manifest_uri, split) for result in results.values())
        numbers = np.random.default_rng(0).permutation(plain.num_samples)
        for name, rows in plain.read(numbers).items():
            assert (rows == compact.read(numbers)[name]).all()
        assert plain.group_keys() == compact.group_keys()
        assert (plain.group_of(numbers) == compact.group_of(numbers)).all()
        again = pickle.loads(pickle.dumps(read_manifest(results["paged"].manifest_uri)))
        assert list(again.splits[split].shards) == list(results["plain"].manifest.splits[split].shards)
    assert shard_toy(source, tmp_path / "paged", part_size_bytes=1 << 16).reused


def test_a_small_dataset_is_one_file_as_ever(tmp_path):
    manifest = make_manifest(400, 112)
    publish_manifest(str(tmp_path / "manifest.json"), manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == storage.dump_json(manifest.to_dict())
    publish_manifest(str(tmp_path / "large" / "manifest.json"), make_manifest(400, 113))
    assert len(list((tmp_path / "large").iterdir())) == 2


def test_releases_before_refuse_it_by_its_schema_version(paged, tmp_path):
    publish_manifest(str(tmp_path / "manifest.json"), make_manifest(3, 2))
    assert storage.read_json(str(tmp_path / "manifest.json"))["schema_version"] == 2


@pytest.fixture
def folder(paged, tmp_path):
    """A dataset of four pages: shards 0-3, 4-7, 8-11, 12-13, of which the last five are for validation."""
    publish_manifest(str(tmp_path / "d" / "manifest.json"), make_manifest(9, 5))
    return tmp_path / "d"


def read_all(folder):
    manifest = read_manifest(str(folder / "manifest.json"))
    shards = [shard for split in SPLITS for shard in manifest.splits[split].shards]
    one_by_one = [manifest.splits["train"].shards[place] for place in range(9)]
    return shards, one_by_one, [split.num_samples for split in manifest.splits.values()]


def pages_file(folder):
    (path,) = folder.glob("pages-*.bin")
    return path


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
def test_a_flipped_bit_is_refused_by_whoever_reads_it(folder, where, flipped):
    manifest = read_manifest(str(folder / "manifest.json"))
    path = pages_file(folder)
    whole = path.read_bytes()
    place = int(where * len(whole))
    path.write_bytes(whole[:place] + bytes([whole[place] ^ flipped]) + whole[place + 1 :])
    try:
        pages._read_page.cache_clear()
        with pytest.raises(DataError):
            read_all(folder)
        with pytest.raises(DataError):
            [split.shards[place] for split in manifest.splits.values() for place in range(len(split.shards))]
        with pytest.raises(DataError):  # whoever writes it: reports, mixtures
            manifest.to_dict()
    finally:
        path.write_bytes(whole)


def test_digits_of_the_manifest_that_change_are_refused_or_read_as_in_the_plain_form(folder):
    """The digest of the dataset is that of its content: whatever is accepted has the shards that it had."""
    path = folder / "manifest.json"
    whole, expected = path.read_bytes(), make_manifest(9, 5)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            manifest = read_manifest(str(path))
        except DataError:
            continue
        for split in SPLITS:
            assert [one.sha256 for one in manifest.splits[split].shards] == [
                one.sha256 for one in expected.splits[split].shards
            ]


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file_is_named(folder, kept):
    path = pages_file(folder)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"pages-[0-9a-f]{64}\.bin: its content has changed"):
        read_manifest(str(folder / "manifest.json"))
    path.unlink()
    with pytest.raises(DataError, match=r"pages-[0-9a-f]{64}\.bin: missing"):
        read_manifest(str(folder / "manifest.json"))


def spans(folder):
    """First and last byte of each of the four pages."""
    entry = json.loads((folder / "manifest.json").read_bytes())["pages"]
    return list(itertools.pairwise(itertools.accumulate((size for size, _ in entry["pages"]), initial=0)))


def test_swapped_pages_are_refused_when_one_of_them_is_read(folder):
    path = pages_file(folder)
    content = path.read_bytes()
    (a, b), (c, d), *_ = spans(folder)
    assert b - a == d - c  # the sizes agree, so that only the digests tell
    shards = read_manifest(str(folder / "manifest.json")).splits["train"].shards
    path.write_bytes(content[:a] + content[c:d] + content[a:b] + content[d:])
    pages._read_page.cache_clear()
    assert shards[8] == make_manifest(9, 5).splits["train"].shards[8]
    for place in (0, 7):
        with pytest.raises(DataError, match="the sha256 differs"):
            shards[place]


def test_the_pages_of_another_dataset_are_refused(folder, tmp_path):
    publish_manifest(str(tmp_path / "e" / "manifest.json"), make_manifest(9, 5, "s3://b/x"))
    pages_file(folder).write_bytes(pages_file(tmp_path / "e").read_bytes())
    with pytest.raises(DataError, match="the sha256 differs"):
        read_manifest(str(folder / "manifest.json"))


def forge(folder, change=lambda document: None, pages_of=None):
    """A manifest whose digests agree, whatever it says: what somebody writes who knows how."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    content = pages_file(folder).read_bytes()
    texts = [content[a:b] for a, b in spans(folder)]
    texts = [pages_of(json.loads(text)) for text in texts] if pages_of else texts
    pages_file(folder).unlink()
    entry = document["pages"]
    entry["pages"] = [(len(text), storage.sha256_bytes(text)) for text in texts]
    change(document)
    name = storage.digest_json(document["pages"]["pages"]) if "pages" in (document.get("pages") or ()) else "0"
    (folder / f"pages-{name}.bin").write_bytes(b"".join(texts))
    path.write_text(json.dumps(document))


def attested(folder):
    """The manifest as somebody reads it who has been told that it is the right one."""
    path = folder / "manifest.json"
    return read_manifest(str(path), sha256=storage.sha256_file(str(path)))


def renamed(name, value):
    return lambda page: json.dumps({**page, name: [value for _ in page["name"]]}).encode()


@pytest.mark.parametrize(
    "pages_of",
    [
        renamed("name", "../../../etc/passwd.tar"),
        renamed("folder", "../../elsewhere"),
        renamed("folder", "s3://elsewhere/bucket"),
        renamed("sha256", "0" * 63),
        renamed("sha256", None),
        renamed("more", 1),
        lambda page: b"[]",
        lambda page: b"{}",
        lambda page: b"null",
        lambda page: b'"text"',
        lambda page: b"{",
        lambda page: b"",
        lambda page: b"\xff",
        lambda page: b"[" * 100_000,
        lambda page: json.dumps({name: values[:1] for name, values in page.items()}).encode(),
        lambda page: json.dumps({name: values[0] for name, values in page.items()}).encode(),
        lambda page: json.dumps({name: {"0": values[0]} for name, values in page.items()}).encode(),
        lambda page: json.dumps({name: 1 for name in page}).encode(),
    ],
)
def test_a_page_that_is_no_page_is_refused_though_its_digest_agrees(folder, pages_of):
    forge(folder, pages_of=pages_of)
    with pytest.raises(DataError):
        read_all(folder)
    with pytest.raises(DataError):
        [attested(folder).splits["train"].shards[place] for place in range(9)]


def test_counts_are_those_of_the_manifest_whatever_a_page_says(folder):
    forge(folder, pages_of=renamed("bytes", 7))
    assert read_all(folder)[0][0].bytes == 64_000_000


def test_an_adopted_folder_that_the_manifest_does_not_name_is_refused(folder):
    """What may be read is decided by the manifest alone, before any page is read."""
    adopt = {"folder": "s3://others/secret", "index": "train-000000.index.npy"}
    forge(
        folder,
        pages_of=lambda page: json.dumps(
            {**page, **{name: [value for _ in page["name"]] for name, value in adopt.items()}}
        ).encode(),
    )
    manifest = attested(folder)
    assert not manifest.adopted_folders
    with pytest.raises(DataError, match="a page names a folder that its manifest does not"):
        manifest.splits["train"].shards[0]


def test_the_folders_of_adopted_shards_are_asked_about_before_a_page_is_read(folder, tmp_path):
    forge(folder, lambda document: document["pages"].update(adopted_folders=["s3://others/secret"]))
    manifest = read_manifest(str(folder / "manifest.json"))
    with pytest.raises(DataError, match="s3://others/secret"):
        trust.require_places(manifest, str(folder / "manifest.json"), toy_config(tmp_path, tmp_path))


@pytest.mark.parametrize("value", [-1, -(1 << 62), 1 << 53, (1 << 63) - 1, 1 << 90, 0.5, "x", None])
@pytest.mark.parametrize("name", pages.COLUMNS)
def test_counts_that_no_shard_has_are_refused(folder, name, value):
    forge(folder, lambda document: document["pages"]["columns"][name].__setitem__(13, value))
    with pytest.raises(DataError, match=f"columns.{name}.13"):
        attested(folder)


def test_a_count_that_the_index_does_not_have_is_found_with_the_index(paged, tmp_path):
    """As in the plain form: counts are no part of the dataset digest, but those of an index are."""
    result = shard_toy(text_folder(tmp_path / "texts", 12), tmp_path / "root")
    uri, manifest = result.manifest_uri, result.manifest
    first = manifest.splits["train"].shards[0]
    changed = first.model_copy(update={"num_samples": first.num_samples + 1})
    splits = {**manifest.splits, "train": manifests.Split(shards=[changed])}
    publish_manifest(uri, manifest.model_copy(update={"splits": splits}))
    with pytest.raises(DataError, match="does not fit its shard"):
        open_split(uri, "train").read(np.array([0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["pages"].update(num_shards={"train": 1 << 40, "validation": 1}),
        lambda document: document["pages"].update(num_shards={"train": 1 << 26, "validation": 1 << 26}),
        lambda document: document["pages"].update(num_shards={"train": 14}),
        lambda document: document["pages"].update(num_shards={"train": 13, "validation": 0}),
        lambda document: document["pages"].update(num_shards={"train": 9, "validation": 4, "test": 1}),
        lambda document: document["pages"].update(page_shards=0),
        lambda document: document["pages"].update(page_shards=5),
        lambda document: document["pages"].update(page_shards=1 << 70),
        lambda document: document["pages"].pop("page_shards"),
        lambda document: document["pages"].pop("columns"),
        lambda document: document["pages"]["columns"].pop("bytes"),
        lambda document: document["pages"]["columns"]["bytes"].pop(),
        lambda document: document["pages"]["pages"].pop(),
        lambda document: document["pages"]["pages"].append((1, "0" * 64)),
        lambda document: document["pages"]["pages"].__setitem__(0, (0, "0" * 64)),
        lambda document: document["pages"]["pages"].__setitem__(0, (-1, "0" * 64)),
        lambda document: document["pages"]["pages"].__setitem__(0, (1 << 25, "0" * 64)),
        lambda document: document["pages"]["pages"].__setitem__(0, (100, "../" + "0" * 61)),
        lambda document: document["pages"].update(schema_version=7),
        lambda document: document["pages"].update(more=1),
        lambda document: document.update(pages=[]),
        lambda document: document.update(pages=None),
        lambda document: document.pop("pages"),
        lambda document: document.update(components=[{}]),
        lambda document: document.update(format_version=3),
    ],
)
def test_an_entry_that_no_pages_have_is_refused_before_they_are_read(folder, change):
    forge(folder, change)
    with pytest.raises(DataError):
        read_all(folder)


def test_shards_of_another_dataset_under_a_digest_are_found_by_whoever_looks_at_the_whole(folder):
    first, other = large_datasets.digest("train", 0, "tar"), large_datasets.digest("another")
    forge(folder, pages_of=lambda page: json.dumps(page).replace(first, other).encode())
    assert attested(folder).splits["train"].shards[0].sha256 == other
    for sha256 in ("", "0" * 64):
        with pytest.raises(DataError, match="does not match its own digest"):
            read_manifest(str(folder / "manifest.json"), sha256=sha256)


def run_of(folder, tmp_path, **fields):
    """A run whose shard step has seen this dataset whole."""
    uri = str(folder / "manifest.json")
    paths = RunPaths.of(str(folder.parent), "r")
    known = {
        "manifest_uri": uri,
        "dataset_digest": read_manifest(uri).dataset_digest,
        "manifest_sha256": storage.sha256_file(uri),
    }
    storage.publish_json(paths.shards, RunShards(**(known | fields)).to_dict())
    return paths


def test_a_job_reads_the_manifest_that_its_shard_step_saw_or_looks_at_the_whole(folder, tmp_path, monkeypatch):
    paths = run_of(folder, tmp_path)
    checked = []
    check = manifests._check_digest
    monkeypatch.setattr(manifests, "_check_digest", lambda *given: (checked.append(given[0]), check(*given)))
    run_dataset.read_dataset(paths)
    assert not checked
    forge(folder, lambda document: document.update(source="written again"))
    assert run_dataset.read_dataset(paths)[1].source == "written again" and len(checked) == 1
    first, other = large_datasets.digest("train", 0, "tar"), large_datasets.digest("another")
    forge(folder, pages_of=lambda page: json.dumps(page).replace(first, other).encode())
    with pytest.raises(DataError, match="does not match its own digest"):
        run_dataset.read_dataset(paths)


def test_a_run_whose_shard_step_looked_at_nothing_whole_looks_at_the_whole(folder, tmp_path):
    paths = run_of(folder, tmp_path, manifest_sha256="")
    assert "manifest_sha256" not in storage.read_json(paths.shards)
    first, other = large_datasets.digest("train", 0, "tar"), large_datasets.digest("another")
    forge(folder, pages_of=lambda page: json.dumps(page).replace(first, other).encode())
    with pytest.raises(DataError, match="does not match its own digest"):
        run_dataset.read_dataset(paths)


def test_a_job_refuses_the_manifest_of_another_dataset(folder, tmp_path):
    paths = run_of(folder, tmp_path)
    publish_manifest(str(folder / "manifest.json"), make_manifest(9, 4))
    with pytest.raises(DataError, match="the manifest is that of another dataset"):
        run_dataset.read_dataset(paths)


# A node


LARGE = 100_000


@pytest.fixture(scope="module")
def large():
    """A dataset of 100,000 shards in a counting store, and a run that has it."""
    store = counting_store.open_store()
    manifest = make_manifest(LARGE // 2, LARGE // 2)
    uri = store.uri("root", "shards", manifest.dataset_digest, "manifest.json")
    publish_manifest(uri, manifest)
    paths = RunPaths.of(store.uri("root"), "r")
    known = RunShards(
        manifest_uri=uri, dataset_digest=manifest.dataset_digest, manifest_sha256=storage.sha256_file(uri)
    )
    storage.publish_json(paths.shards, known.to_dict())
    return store, paths, manifest


def test_a_node_needs_few_requests_and_few_bytes_of_100_000_shards(large, tmp_path):
    store, paths, expected = large
    store.take()
    start = time.process_time()
    for _ in range(8):  # the processes of this node
        pages._read_page.cache_clear()
        own = run_dataset.read_dataset(paths, on_node(tmp_path))[1]
        for place in range(1000, 1016):  # of a node among many
            assert own.splits["train"].shards[place] == expected.splits["train"].shards[place]
        assert own.splits["train"].num_samples == expected.splits["train"].num_samples
    seconds = (time.process_time() - start) / 8
    requests = store.take()
    below = store.uri("root", "shards")
    assert count(requests, below=below) == 3, counting_store.describe(requests)  # size and content of it, and a page
    assert count(requests) <= 20 and count_bytes(requests) <= 8_000_000, counting_store.describe(requests)
    assert seconds < 0.5, "it took 2 to 4 seconds to parse what it needs no more"


@pytest.mark.parametrize("kept", ["nothing", "nowhere"])
def test_a_node_that_keeps_nothing_fetches_by_itself(large, tmp_path, kept):
    store, paths, expected = large
    nowhere = tmp_path / "file"
    nowhere.write_text("no folder")
    chosen = DataConfig(cache_bytes=0) if kept == "nothing" else on_node(nowhere)
    store.take()
    for _ in range(2):
        alone = run_dataset.read_dataset(paths, chosen)[1]
        assert alone.splits["validation"].shards[5] == expected.splits["validation"].shards[5]
    assert count(store.take(), "get", store.uri("root", "shards")) in (3, 4)


def test_shards_in_any_order_cost_each_page_once_on_a_node(large, tmp_path):
    store, paths, expected = large
    shards = run_dataset.read_dataset(paths, on_node(tmp_path))[1].splits["train"].shards
    store.take()
    for place in np.random.default_rng(0).permutation(LARGE // 2)[:2000].tolist():
        assert shards[place] == expected.splits["train"].shards[place]
    assert count(store.take(), "get", store.uri("root", "shards")) <= -(-LARGE // 2 // 128)


def test_what_a_process_has_read_does_not_hide_what_is_there_now(folder):
    """A stage looks at the whole more than once."""
    assert read_all(folder)
    path = pages_file(folder)
    path.write_bytes(path.read_bytes()[:-20] + b"x" + path.read_bytes()[-19:])
    with pytest.raises(DataError, match="the sha256 differs"):
        read_manifest(str(folder / "manifest.json"))


def test_what_a_node_keeps_is_compared_again(large, tmp_path):
    store, paths, expected = large
    run_dataset.read_dataset(paths, on_node(tmp_path))[1].splits["train"].shards[7]
    kept = [path for path in tmp_path.rglob("*.file") if path.stat().st_size]
    assert len(kept) == 2  # manifest, page
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    store.take()
    for num_requests in (2, 0):
        pages._read_page.cache_clear()
        again = run_dataset.read_dataset(paths, on_node(tmp_path))[1]
        assert again.splits["train"].shards[7] == expected.splits["train"].shards[7]
        assert count(store.take(), "get", store.uri("root", "shards")) == num_requests


def test_a_store_that_answers_wrongly_once_is_asked_again(large, tmp_path, monkeypatch):
    _, paths, expected = large
    answers = iter([b"a proxy's page, " * 2000])
    real = storage.read_range

    def answer(uri, start, stop):
        return next(answers, b"")[: stop - start] or real(uri, start, stop)

    manifest = run_dataset.read_dataset(paths, on_node(tmp_path))[1]
    monkeypatch.setattr(storage, "read_range", answer)
    assert manifest.splits["train"].shards[9] == expected.splits["train"].shards[9]
    answers = iter([b"a proxy's page, " * 2000])
    assert list(manifest.splits["train"].shards[300:9000]) == expected.splits["train"].shards[300:9000]
    monkeypatch.setattr(storage, "read_range", lambda uri, start, stop: bytes(stop - start))
    for read in (lambda shards: shards[20_000], lambda shards: list(shards[12000:])):
        with pytest.raises(DataError, match="the sha256 differs"):
            read(manifest.splits["train"].shards)


def test_the_processes_of_a_node_are_given_no_more_than_they_need(large, tmp_path):
    """What goes to a process that reads for another holds no page, and no lock."""
    manifest = run_dataset.read_dataset(large[1], on_node(tmp_path))[1]
    content = pickle.dumps(manifest)
    assert len(content) < 2_000_000
    again = pickle.loads(content)
    assert again.splits["train"].shards[9] == large[2].splits["train"].shards[9]


def test_what_reads_every_shard_makes_one_request(large):
    store, paths, expected = large
    manifest = run_dataset.read_dataset(paths)[1]
    store.take()
    assert sum(shard.bytes for split in SPLITS for shard in manifest.splits[split].shards) == sum(
        split.num_bytes for split in expected.splits.values()
    )
    assert count(store.take()) == 2  # one for each split
    for shard in manifest.splits["train"].shards[::-640]:
        assert shard.bytes
    assert count(store.take()) == 1


# Listings


def test_many_part_folders_are_one_listing_of_what_is_above_them(paged):
    store = counting_store.open_store()
    manifest = make_manifest(1500, 1500)
    uri = store.uri("root", "shards", manifest.dataset_digest, "manifest.json")
    publish_manifest(uri, manifest)
    large_datasets.lay_out(store, uri, manifest)
    manifest = read_manifest(uri)
    store.take()
    versions = check_listing(uri, manifest)
    listings = [request for request in store.take() if request.kind == "list"]
    assert [(one.uri, one.num_requests) for one in listings] == [(store.uri("root", "shards", "parts"), 6)]
    assert len(versions) == 6000 and all(versions.values())
    last = manifests.index_uri(uri, manifest.splits["validation"].shards[-1])
    store.put(last, size_bytes=1)
    with pytest.raises(DataError, match="truncated or changed: it has 1 bytes"):
        check_listing(uri, manifest)
    store.remove(last)
    with pytest.raises(DataError, match="missing"):
        check_listing(uri, manifest)


def test_what_lies_beside_is_listed_only_where_many_folders_of_ours_are():
    """A listing of a store goes one after another, a thousand objects at a time, whoever they belong to."""
    parts = [f"s3://bucket/root/shards/parts/{number}" for number in range(1000)]
    uri, adopted = "s3://bucket/root/shards/d/manifest.json", [f"s3://bucket/day-{number}" for number in range(2000)]
    assert choose_listings(uri, parts[1:]) == parts[1:]
    assert choose_listings(uri, adopted) == adopted
    assert choose_listings(uri, [adopted[0], *parts, adopted[1]]) == [
        "s3://bucket/root/shards/parts",
        adopted[0],
        adopted[1],
    ]
    local = [part.removeprefix("s3:/") for part in parts]
    assert choose_listings("/bucket/root/shards/d/manifest.json", local) == local


def test_a_few_parts_in_a_store_of_others_cost_a_request_each():
    store = counting_store.open_store()
    manifest = make_manifest(17, 1)
    uri = store.uri("root", "shards", manifest.dataset_digest, "manifest.json")
    large_datasets.lay_out(store, uri, manifest)
    for number in range(40_000):
        store.put(store.uri("root", "shards", "parts", f"{number:064x}", "x"), size_bytes=3)
    check_listing(uri, manifest)
    assert count(store.take(), "list") == 17


def test_sharding_writes_and_finds_pages_again_by_a_task_of_any_kind(paged, tmp_path):
    source = text_folder(tmp_path / "texts", 60)
    config = toy_config(source, tmp_path / "root", part_size_bytes=1 << 16)
    first = shard_dataset(config, ToyTask(), lambda line: None)
    pages_file(tmp_path / "root" / "shards" / first.dataset_digest).unlink()
    again = shard_dataset(config, ToyTask(), lambda line: None)
    assert not again.reused and again.dataset_digest == first.dataset_digest
    assert shard_dataset(config, ToyTask(), lambda line: None).reused
