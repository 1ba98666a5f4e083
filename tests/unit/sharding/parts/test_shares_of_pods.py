"""Parts that the pods of a job encode: a fixed plan, shared out, and the same dataset for every number of pods."""

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
from helpers.fakes import counting_store
from helpers.fakes.counting_store import count, describe
from helpers.toy_data import text_folder, toy_config
from hypothesis import given
from hypothesis import strategies as st

from kftrain import launch
from kftrain.core import storage
from kftrain.errors import DataError, LaunchError
from kftrain.launch import jobs
from kftrain.run.budget import read_standing
from kftrain.run.config import read_job_config
from kftrain.run.documents import SHARES_ENV, PartShare
from kftrain.run.job_tasks import SHARDING
from kftrain.run.paths import RunPaths
from kftrain.sharding import mixing
from kftrain.sharding.parts import part_worker, pool, share
from kftrain.sharding.parts.share import encode_share, share_parts
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.stages import shard as stages_shard
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import permit

pytestmark = pytest.mark.timeout(300)

TOY = "helpers.models.toy_task:ToyTask"


class KilledError(Exception):
    """What ends a pod or the step at any place."""


class Pods:
    """The launcher of a job whose pods run one after the other in this process.

    `order`: says in which order, and who never comes. `before`: is called with the rank of each before it begins.
    """

    interrupted = False

    def __init__(self, root, monkeypatch, order=None, before=lambda rank: None):
        self.paths = RunPaths.of(str(root), "r-1")
        self.order = order
        self.before = before
        self.num_jobs = 0
        self.shares = []
        self._monkeypatch = monkeypatch

    def encode(self, config, shares):
        """What the shard step is given."""
        self._monkeypatch.setattr(jobs, "build_launcher", lambda resolved: self)
        self.shares = shares
        return launch.run_sharding(self.paths, config, shares)

    def run(self, spec):
        self.num_jobs += 1
        config = read_job_config(self.paths, spec.config_digest)
        num_pods = spec.workers.num_processes
        assert num_pods == config.data.shard_pods
        self._monkeypatch.setenv(SHARES_ENV, spec.environment[SHARES_ENV])
        for rank in range(num_pods) if self.order is None else self.order:
            if rank < num_pods:
                self.before(rank)
                self._monkeypatch.setenv("RANK", str(rank))
                encode_share(self.paths, config)
        return 0

    def close(self):
        pass


def config_for(source, root, **data):
    config = toy_config(source, root, **{"part_size_bytes": 1 << 16, "processes": 1, **data})
    return permit(config.model_copy(update={"task": TaskConfig(kind=TOY)}))


def shard(source, root, run_job=None, **data):
    config = config_for(source, root, **data)
    return shard_dataset(config, build_task(config.task), lambda line: None, run_job)


def files(root):
    """Everything below the shards but what holds times."""
    shards = Path(root) / "shards"
    paths = [path for path in shards.rglob("*") if path.is_file() and "seen" not in (path.stem, path.parent.name)]
    return {str(path.relative_to(shards)): path.read_bytes() for path in paths}


@pytest.fixture
def source(tmp_path):
    return text_folder(tmp_path / "texts", 120)


@pytest.fixture(autouse=True)
def encoded(monkeypatch):
    """The input digests of the parts that are encoded, as they are: all in this process, and each pays for a pod."""
    numbers = []

    def map_jobs(jobs, first, num_processes):
        encoder = part_worker._Encoder(first)
        for number, job in enumerate(jobs):
            answer = encoder.run(job)
            numbers.extend([] if answer["reused"] else [job["input_digest"]])
            yield number, answer

    monkeypatch.setattr(pool, "map_jobs", map_jobs)
    monkeypatch.setattr(share, "PROCESS_BYTES", 1)
    return numbers


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 20))
def test_each_part_is_in_one_share_and_shares_are_alike(sizes, num_shares):
    parts = sorted(enumerate(sizes), key=lambda part: -part[1])
    shares = share_parts(parts, num_shares)
    assert len(shares) == num_shares
    assert sorted(part for share in shares for part in share) == list(enumerate(sizes))
    loads = [sum(size for _, size in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert sum(1 for share in shares if share) == min(num_shares, len(sizes))


def test_the_number_of_pods_changes_no_byte(tmp_path, source, monkeypatch):
    here = shard(source, tmp_path / "here")
    for num_pods in (2, 3, 7):
        root = tmp_path / f"{num_pods}"
        pods = Pods(root, monkeypatch)
        there = shard(source, root, pods.encode, shard_pods=num_pods)
        assert there.dataset_digest == here.dataset_digest and pods.num_jobs == 1
        assert files(root) == files(tmp_path / "here")
        assert shard(source, root, pods.encode, shard_pods=num_pods).reused and pods.num_jobs == 1


def test_only_what_is_missing_goes_to_pods_and_to_no_more_than_pay(tmp_path, source, monkeypatch, encoded):
    root, pods = tmp_path / "root", Pods(tmp_path / "root", monkeypatch)
    shard(source, root, pods.encode, shard_pods=100)
    num_parts = len(encoded)
    assert 1 < len(pods.shares) == num_parts < 100
    (source / "part" / "doc-010.txt").write_text("later")
    assert not shard(source, root, pods.encode, shard_pods=100).reused
    assert len(encoded) == num_parts and pods.num_jobs == 1, "one part is encoded by the step"
    monkeypatch.setattr(share, "PROCESS_BYTES", 1 << 30)
    pods = Pods(tmp_path / "other", monkeypatch)
    shard(source, tmp_path / "other", pods.encode, shard_pods=100)
    assert pods.num_jobs == 0


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_and_repeated_with_any_number_of_pods_the_bytes_are_those_of_one(
    tmp_path, source, monkeypatch, encoded, seed
):
    """A pod or the step dies at any publication; whoever comes next goes on, and no part is encoded twice."""
    shard(source, tmp_path / "here")
    encoded.clear()
    chance, root, lives = random.Random(seed), tmp_path / "there", 0
    publish = storage.publish_json

    def die_sometimes(uri, document):
        publish(uri, document)
        if ("/sharding/" in uri or "/by-input/" in uri) and chance.random() < 0.2:
            raise KilledError

    result = None
    while result is None:
        lives += 1
        num_pods = chance.randint(2, 6)
        order = chance.sample(range(num_pods), num_pods)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "publish_json", die_sometimes if lives < 12 else publish)
            with contextlib.suppress(KilledError):
                result = shard(source, root, Pods(root, monkeypatch, order).encode, shard_pods=num_pods)
    assert files(root) == files(tmp_path / "here")
    assert len(set(encoded)) == len(encoded) > 3


def test_a_pod_that_has_not_come_is_missed(tmp_path, source, monkeypatch, encoded):
    root = tmp_path / "root"
    with pytest.raises(LaunchError, match="not encoded yet"):
        shard(source, root, Pods(root, monkeypatch, order=[1]).encode, shard_pods=2)
    done = set(encoded)
    assert done and not list((root / "shards" / "by-source").glob("*"))
    shard(source, root, Pods(root, monkeypatch).encode, shard_pods=2)
    assert len(encoded) == len(set(encoded)) > len(done)


def test_a_part_that_somebody_has_deleted_meanwhile_is_encoded_again(tmp_path, source, monkeypatch):
    root = tmp_path / "root"
    here = shard(source, tmp_path / "here")
    pods = Pods(root, monkeypatch, order=[0])
    with pytest.raises(LaunchError, match="not encoded yet"):
        shard(source, root, pods.encode, shard_pods=2)
    pointers = sorted(Path(pods.paths.encoded_parts).glob("*.json"))
    shutil.rmtree(root / "shards" / "parts" / json.loads(pointers[0].read_text())["part_digest"])
    pointers[-1].write_text("{}")
    assert shard(source, root, Pods(root, monkeypatch).encode, shard_pods=2).dataset_digest == here.dataset_digest
    assert files(root) == files(tmp_path / "here")


def test_a_source_that_changes_while_pods_read_it_makes_no_dataset(tmp_path, source, monkeypatch):
    def meddle(rank):
        (source / "part" / "later.txt").write_text("later")

    with pytest.raises(DataError, match="the source changed while it was read"):
        shard(source, tmp_path / "root", Pods(tmp_path / "root", monkeypatch, before=meddle).encode, shard_pods=2)
    assert not list((tmp_path / "root" / "shards").glob("by-source/*"))


def test_what_pods_read_of_a_source_that_was_another_then_is_never_used(tmp_path, monkeypatch):
    """The source changes under a pod, the step dies, and the source is put back: names, sizes and tags are equal."""
    store, local = counting_store.open_store(), text_folder(tmp_path / "texts", 120)
    monkeypatch.setattr(store, "_numbers", itertools.repeat(0))  # the tag of an object is that of its content
    contents = {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*.txt")}
    raw, root = store.uri("raw"), store.uri("root")

    def put(changed=lambda content: content):
        for name, content in contents.items():
            store.put(store.uri("raw", name), changed(content))

    def meddle(rank):
        put(bytes.swapcase)
        if rank == 1:
            raise KilledError

    put()
    truth = shard(raw, store.uri("truth"))
    with pytest.raises((KilledError, DataError)):
        shard(raw, root, Pods(root, monkeypatch, before=meddle).encode, shard_pods=2)
    put()
    assert shard(raw, root, Pods(root, monkeypatch).encode, shard_pods=2).dataset_digest == truth.dataset_digest


def test_pods_read_no_file_that_somebody_else_has_put_into_their_share(tmp_path, source, monkeypatch):
    secret = "AWS_SECRET_ACCESS_KEY=hunter2 " * 20
    (tmp_path / "secret.txt").write_text(secret)
    pods = Pods(tmp_path / "root", monkeypatch)

    def meddle(rank):
        (path,) = Path(pods.paths.sharding).glob("*/0.json")
        document = json.loads(path.read_text())
        document["jobs"][0]["pieces"][0]["file"]["uri"] = str(tmp_path / "secret.txt")
        storage.publish_json(str(path), document)

    pods.before = meddle
    with pytest.raises(DataError, match="not the share that the job was started for"):
        shard(source, tmp_path / "root", pods.encode, shard_pods=2)
    assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "root" / "shards").rglob("*.tar"))


def test_attempts_that_each_encode_a_part_are_progress(tmp_path, source, monkeypatch):
    class Lost(Pods):
        """Each attempt encodes one part more; then its node is taken away."""

        def run(self, spec):
            with contextlib.suppress(KilledError):
                return super().run(spec)
            return 137

    publish, root = storage.publish_json, tmp_path / "root"

    def die(uri, document):
        is_new = "/sharding/parts/" in uri and not storage.exists(uri)
        publish(uri, document)
        if is_new:
            raise KilledError

    pods = Lost(root, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "publish_json", die)
        shard(source, root, pods.encode, shard_pods=2)
    assert pods.num_jobs > 4  # more than may fail without progress
    assert read_standing(pods.paths, 0, SHARDING).step == len(list(Path(pods.paths.encoded_parts).iterdir()))
    stuck = Lost(tmp_path / "stuck", monkeypatch, before=raise_killed)
    with pytest.raises(LaunchError, match="failed 4 times without a new part, at last"):
        shard(source, tmp_path / "stuck", stuck.encode, shard_pods=2)


def raise_killed(rank):
    raise KilledError


def test_a_bad_record_is_named_by_the_pod_that_reads_it(tmp_path, source, monkeypatch):
    (source / "part" / "doc-010.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"doc-010\.txt: not UTF-8") as caught:
        shard(source, tmp_path / "root", Pods(tmp_path / "root", monkeypatch).encode, shard_pods=3)
    assert caught.value.exit_code == 11


def test_an_error_of_a_source_that_has_changed_is_that_it_has(tmp_path, source, monkeypatch):
    def meddle(rank):
        (source / "part" / "doc-010.txt").write_bytes(b"\xff\xfe")

    with pytest.raises(DataError, match="the source changed while it was read"):
        shard(source, tmp_path / "root", Pods(tmp_path / "root", monkeypatch, before=meddle).encode, shard_pods=3)


def test_answers_of_a_source_without_files_are_not_gone_on_with(tmp_path, source, monkeypatch):
    """Nobody can look whether what a name and a version stand for has changed since."""
    paths = RunPaths.of(str(tmp_path / "root"), "r-1")
    left = storage.join(paths.encoded_parts, "left.json")
    pods = Pods(tmp_path / "root", monkeypatch)
    for pieces, stays in (([{"file": {}}], True), ([{"name": "a", "version": "1"}], False)):
        storage.publish_json(left, {})
        job = {"pieces": pieces, "input_digest": "left"}
        part = PartShare(kind="text", assets={}, strata={}, level="size", jobs=[job])
        monkeypatch.setattr(pods, "run", lambda spec: storage.publish_json(left, {"new": True}) or 0)
        pods.encode(config_for(source, tmp_path / "root"), [part, part])
        assert (storage.read_json(left) == {}) == stays


def test_the_stage_leaves_nothing_behind(tmp_path, source, monkeypatch):
    config = toy_config(source, tmp_path / "root", part_size_bytes=1 << 16, processes=1, shard_pods=2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 4})})
    pods = Pods(tmp_path / "root", monkeypatch)
    monkeypatch.setattr(jobs, "build_launcher", lambda resolved: pods)
    stages_shard.shard(config, "r-1")
    assert pods.num_jobs == 1 and not Path(pods.paths.sharding).exists()


def test_who_cannot_have_pods_is_told(tmp_path, source, monkeypatch):
    config, lines = config_for(source, tmp_path / "root", shard_pods=2), []
    task = build_task(config.task)
    task.built_from = None
    pods = Pods(tmp_path / "root", monkeypatch)
    shard_dataset(config, task, lines.append, pods.encode)
    assert pods.num_jobs == 0 and any("data.shard_pods is not used" in line for line in lines)


def test_the_parts_of_a_mixture_go_to_a_job_for_each_of_its_datasets(tmp_path, source, monkeypatch):
    other = text_folder(tmp_path / "others", 90)
    mixture = [{"name": "a", "source": str(source)}, {"name": "b", "source": str(other)}]
    digests = []
    for num_pods in (0, 2):
        config = config_for("stdlib", tmp_path / f"{num_pods}", mixture=mixture, shard_pods=num_pods)
        pods = Pods(tmp_path / f"{num_pods}", monkeypatch)
        task = build_task(config.task)
        digests.append(mixing.shard_mixture(config, task, lambda line: None, pods.encode).dataset_digest)
        assert pods.num_jobs == num_pods
    assert digests[0] == digests[1]


def test_what_pods_ask_for_does_not_grow_with_their_number(tmp_path, monkeypatch):
    """The step alone lists the source, each pod reads its own share of the plan, and nobody lists answers but once."""
    listings, plans = {}, {}
    for num_pods in (0, 2, 8, 64):
        store = counting_store.open_store()
        for path in text_folder(tmp_path / "texts", 120).rglob("*.txt"):
            store.put(store.uri("raw", path.relative_to(tmp_path / "texts").as_posix()), path.read_bytes())
        root, inside, outside = store.uri("root"), [], []

        def begin(rank, store=store, inside=inside, outside=outside):
            (inside if rank else outside).extend(store.take())

        pods = Pods(root, monkeypatch, before=begin)
        run = pods.run

        def note(spec, run=run, store=store, inside=inside):
            code = run(spec)
            inside.extend(store.take())
            return code

        pods.run = note
        shard(store.uri("raw"), root, pods.encode, shard_pods=num_pods)
        outside += store.take()
        raw = store.uri("raw")
        assert count(inside, "list") == 0, describe(inside)
        assert count(inside, "get", raw) == (120 if num_pods else 0)
        listings[num_pods] = count(outside, "list", raw)
        read = [request.num_bytes for request in inside if "/sharding/" in request.uri and request.kind == "get"]
        plans[num_pods] = sum(read)
    assert listings[2] == listings[8] == listings[64] <= listings[0], listings
    assert plans[64] < 1.5 * plans[2], plans


def test_processes_of_this_machine_are_the_pods_of_the_local_backend(tmp_path, source, monkeypatch):
    """Through the launcher: one of them ends the job with its own error, and then all is well."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    here = shard(source, tmp_path / "here")
    paths = RunPaths.of(str(tmp_path / "there"), "r-1")
    run = functools.partial(launch.run_sharding, paths)
    (source / "part" / "doc-010.txt").rename(tmp_path / "kept")
    (source / "part" / "doc-010.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"doc-010\.txt: not UTF-8"):
        shard(source, tmp_path / "there", run, shard_pods=2)
    (tmp_path / "kept").rename(source / "part" / "doc-010.txt")
    there = shard(source, tmp_path / "there", run, shard_pods=2)
    assert there.dataset_digest == here.dataset_digest
    logs = {
        name: storage.read_text(f"{paths.logs}/sharding/{name}")
        for name in storage.list_names(f"{paths.logs}/sharding")
    }
    assert sorted(logs) == ["rank-0.log", "rank-1.log"] and all("is encoded" in text for text in logs.values())
