"""A training whose rows lie on servers: the numbers of a bare loop, one cut with the dense part, and its export."""

import time
import types

import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
from helpers import clicks, in_process, jobs
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import nn

from kftrain.checkpoint.export import load_export
from kftrain.core import storage
from kftrain.core.frames import Frame, FrameKind
from kftrain.errors import CheckpointError, ConfigError, DivergedError, Preempted, RetryableError, UserCodeError
from kftrain.models.click_network import ClickNetwork
from kftrain.parallel.world import join_world
from kftrain.registry.pyfunc_loader import ExportedModel
from kftrain.remote_parameters import control
from kftrain.remote_parameters.client import RemoteTables
from kftrain.run import commit, documents
from kftrain.run.commit import CheckpointName
from kftrain.run.documents import Completion
from kftrain.server.settings import ServerConfig, TableConfig
from kftrain.server.table import build_spec, draw_initial_weights
from kftrain.sharding.sources.clicks import ClicksSource
from kftrain.tasks.click_prediction import ClickPrediction
from kftrain.train.remote_rows import RemoteRows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A storage root with a run whose dataset all others share."""
    folder = tmp_path_factory.mktemp("root")
    return folder, jobs.prepare(folder, clicks.TEXT, run_id="data")[0]


@pytest.fixture
def prepare(root, tmp_path):
    folder, data = root
    return lambda *overrides, run_id="r": jobs.prepare(
        folder, clicks.TEXT, overrides, f"{tmp_path.name}-{run_id}", data
    )


@pytest.fixture
def seen(monkeypatch):
    """Ids and labels of each loss with a gradient."""
    batches, loss = [], ClickPrediction.loss

    def record(task, output, batch, weight):
        if torch.is_grad_enabled():
            batches.append((batch["ids"].clone(), batch["label"].clone()))
        return loss(task, output, batch, weight)

    monkeypatch.setattr(ClickPrediction, "loss", record)
    return batches


def train(run, monkeypatch, tmp_path, stop=None):
    paths, resolved = run
    with clicks.serving(paths, resolved, monkeypatch, tmp_path):
        in_process.train(paths, resolved, monkeypatch, stop)


def find_checkpoint(paths):
    return f"{paths.checkpoints}/{commit.list_committed(paths)[0]}"


def bare_loop(batches, table, build):
    """Dense layers and an EmbeddingBag with torch's own optimizers; returns the bag's weights by key."""
    torch.manual_seed(2)
    plain = ClickNetwork(num_fields=clicks.NUM_FIELDS, dim=clicks.DIM, hidden=[8])
    keys = torch.unique(torch.cat([ids.reshape(-1) for ids, _ in batches]))
    initial = torch.from_numpy(draw_initial_weights(build_spec(table, 2), keys.numpy()))
    bag = nn.EmbeddingBag(len(keys), clicks.DIM, sparse=True, mode="sum", _weight=initial)
    dense, sparse = torch.optim.SGD(plain.layers.parameters(), lr=0.5), build(bag.parameters())
    for ids, labels in batches:
        vectors = bag(torch.searchsorted(keys, ids).reshape(-1, 1)).reshape(len(ids), clicks.NUM_FIELDS, -1)
        logits = plain.layers(vectors.flatten(1))[:, 0] + vectors[:, :, -1].sum(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").sum() / 24
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss.backward()
        bag.weight.grad = bag.weight.grad.coalesce()  # SGD would else add one duplicate after the other
        for optimizer in (dense, sparse):
            optimizer.step()
    return keys.numpy(), bag.weight.detach().numpy(), plain.layers.state_dict()


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=2.0),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=2.0),
    "sparse_adam": lambda weights: torch.optim.SparseAdam(weights, lr=2.0),
}


@pytest.mark.parametrize(("kind", "num_servers"), [("sgd", 1), ("adagrad", 3), ("sparse_adam", 2)])
def test_rows_and_weights_have_the_bits_of_a_bare_loop(prepare, monkeypatch, tmp_path, seen, kind, num_servers):
    table = TableConfig(name="ids", dim=clicks.DIM, optimizer=kind, learning_rate=2.0)
    text = f"server.tables=[{{name: ids, dim: 4, optimizer: {kind}, learning_rate: 2.0}}]"
    paths, resolved = prepare(text, f"server.num_servers={num_servers}")
    train((paths, resolved), monkeypatch, tmp_path)
    assert len(seen) >= 8
    keys, weights, layers = bare_loop(seen[-8:], table, OPTIMIZERS[kind])
    rows = clicks.rows_of(find_checkpoint(paths))
    assert np.array_equal(rows["key"], keys)
    assert np.array_equal(rows["numbers"][:, : clicks.DIM], weights)
    assert np.abs(weights - draw_initial_weights(build_spec(table, 2), keys)).max() > 0.1, "nothing was learned"
    exported = load_file(
        storage.local_path(documents.read(Completion, paths.complete).export_uri) / "model.safetensors"
    )
    assert all(torch.equal(exported[f"layers.{name}"], value) for name, value in layers.items())


def test_a_resumed_run_has_the_tables_of_one_that_was_never_stopped(prepare, monkeypatch, tmp_path):
    """Stopped between two checkpoints, after which it goes on with other numbers of servers."""
    adam = "server.tables=[{name: ids, dim: 4, optimizer: adam, learning_rate: 0.5, num_sightings: 2}]"
    whole = prepare(adam, run_id="whole")
    train(whole, monkeypatch, tmp_path)
    paths, resolved = prepare(adam, "server.num_servers=3", run_id="stopped")
    with pytest.raises(Preempted):
        train((paths, resolved), monkeypatch, tmp_path, in_process.StopAfter(5))
    assert commit.find_last_step(paths) == 5
    resolved = resolved.model_copy(update={"server": resolved.server.model_copy(update={"num_servers": 2})})
    train((paths, resolved), monkeypatch, tmp_path)
    for kind in ("rows", "candidates"):
        ours, theirs = (clicks.rows_of(find_checkpoint(one), kind) for one in (paths, whole[0]))
        assert len(ours) and ours.tobytes() == theirs.tobytes()
    assert [str(name) for name in commit.list_committed(paths)] == storage.list_names(paths.checkpoints)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_other_numbers_of_servers_hold_the_same_rows(prepare, monkeypatch, tmp_path, num_servers):
    paths, resolved = prepare("server.num_servers=2", "train.steps=4", f"run.name=of-{num_servers}")
    train((paths, resolved), monkeypatch, tmp_path)
    step = commit.find_last_step(paths)
    expected = [clicks.rows_of(find_checkpoint(paths), kind) for kind in ("rows", "candidates")]
    resolved = resolved.model_copy(update={"server": resolved.server.model_copy(update={"num_servers": num_servers})})
    with clicks.serving(paths, resolved, monkeypatch, tmp_path) as servers:
        addresses = control.find_servers(paths.servers, num_servers, 10)
        control.load_all(addresses, clicks.SECRET.encode(), Frame(FrameKind.LOAD, clock=step, sequence=1))
        control.ask_all(addresses, clicks.SECRET.encode(), Frame(FrameKind.SAVE, clock=step, sequence=99))
        assert all(len(server._state.tables[0]) for server in servers)
    uri = f"{paths.checkpoints}/{CheckpointName(step, 99)}"
    for kind, rows in zip(("rows", "candidates"), expected, strict=True):
        assert clicks.rows_of(uri, kind).tobytes() == rows.tobytes()


@pytest.mark.slow
def test_what_int8_learns_is_as_good_as_what_fp32_learns(tmp_path, monkeypatch):
    """On clicks whose teacher is known, by the area under the curve of samples that nobody was trained on."""
    source = ClicksSource(num_rows=60_000, num_fields=3, num_keys=1000, exponent=1.05)
    monkeypatch.setattr(clicks, "SOURCE", source)
    ids, labels, log_odds = source.draw(source.num_rows, source.num_rows)
    sizes = ["train.steps=160", "train.global_batch_size=256", "checkpoint.interval_steps=160"]
    sizes += ["server.tables=[{name: ids, dim: 4, learning_rate: 0.1}]", "optimizer.learning_rate=0.1"]
    areas, data = {}, None
    for encoding in ("fp32", "int8"):
        paths, resolved = jobs.prepare(tmp_path, clicks.TEXT, [*sizes, f"server.encoding={encoding}"], encoding, data)
        data = data or paths
        train((paths, resolved), monkeypatch, tmp_path)
        completion = documents.read(Completion, paths.complete)
        model = load_export(completion.export_uri, completion.export_digest).model
        areas[encoding] = roc_auc_score(labels, model(torch.from_numpy(ids)).detach().numpy())
    assert 0.7 < areas["fp32"] < roc_auc_score(labels, log_odds)
    assert areas["int8"] > areas["fp32"] - 0.001, areas


def test_a_checkpoint_waits_for_the_gradients_of_a_step(prepare, monkeypatch, tmp_path):
    paths, resolved = prepare("train.steps=1")
    secret = clicks.SECRET.encode()
    with clicks.serving(paths, resolved, monkeypatch, tmp_path) as (server,):
        addresses = control.find_servers(paths.servers, 1, 10)
        control.load_all(addresses, secret, Frame(FrameKind.LOAD))
        tables = RemoteTables(addresses, {"ids": 4}, 0, secret)
        tables.push("ids", np.array([3]), np.ones((1, 4), np.float32))
        while server._state.is_between_steps:
            time.sleep(0.01)
        with pytest.raises(RetryableError, match="could not save"):
            control.ask_all(addresses, secret, Frame(FrameKind.SAVE, clock=1, sequence=1))
        tables.finish_step()
        control.ask_all(addresses, secret, Frame(FrameKind.SAVE, clock=1, sequence=1))
        tables.close()
    assert clicks.rows_of(f"{paths.checkpoints}/{CheckpointName(1, 1)}")["key"].tolist() == [3]


def test_what_was_done_after_the_cut_is_forgotten_by_servers_that_live_on(prepare, monkeypatch, tmp_path):
    """Pods of servers outlive workers that are replaced: the next attempt tells them where to begin."""
    whole = prepare(run_id="whole")
    train(whole, monkeypatch, tmp_path)
    paths, resolved = prepare(run_id="lost")
    with clicks.serving(paths, resolved, monkeypatch, tmp_path):
        with pytest.raises(UserCodeError, match="lost"), monkeypatch.context() as patch:
            patch.setattr(ClickPrediction, "loss", fail_after(7, ClickPrediction.loss))
            in_process.train(paths, resolved, monkeypatch)
        assert commit.find_last_step(paths) == 4
        in_process.train(paths, resolved, monkeypatch)
    ours, theirs = (clicks.rows_of(find_checkpoint(one)) for one in (paths, whole[0]))
    assert ours.tobytes() == theirs.tobytes()


def fail_after(num_steps, loss):
    """A loss that breaks once it was asked for with a gradient so many times, the probe's one among them."""
    count = 0

    def break_off(task, output, batch, weight):
        nonlocal count
        count += torch.is_grad_enabled()
        if count > num_steps:
            raise RuntimeError("lost")
        return loss(task, output, batch, weight)

    return break_off


def test_a_damaged_table_file_is_no_checkpoint(prepare, monkeypatch, tmp_path):
    paths, resolved = prepare("train.steps=4")
    train((paths, resolved), monkeypatch, tmp_path)
    uri = find_checkpoint(paths)
    files = commit.read_checkpoint_manifest(uri)[0].files
    assert {"tables-0.json", "tables-0-ids-rows.npy", "tables-0-ids-candidates.npy"} <= files.keys()
    file = storage.local_path(uri) / "tables-0-ids-rows.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        commit.verify_files(uri, files)


def test_the_export_answers_unknown_ids_as_training_did_and_its_auc_is_scikit_learns(prepare, monkeypatch, tmp_path):
    paths, resolved = prepare("train.steps=60", "server.num_servers=2", "checkpoint.interval_steps=60")
    train((paths, resolved), monkeypatch, tmp_path)
    completion = documents.read(Completion, paths.complete)
    loaded = load_export(completion.export_uri, completion.export_digest)
    rows = clicks.rows_of(completion.checkpoint_uri)
    table = load_file(storage.local_path(completion.export_uri) / "table-ids.safetensors")
    assert np.array_equal(table["keys"].numpy(), rows["key"])
    assert np.array_equal(table["weights"].numpy(), rows["numbers"][:, : clicks.DIM])
    asked = np.array([rows["key"][0], -5, 2**62])
    spec = build_spec(resolved.server.tables[0], resolved.run.seed)
    expected = np.concatenate([rows["numbers"][:1, : clicks.DIM], draw_initial_weights(spec, asked[1:])])
    answered = loaded.model.rows(torch.from_numpy(asked)[:, None]).detach().numpy()
    assert np.array_equal(answered, expected)

    ids, labels, _ = clicks.SOURCE.draw(0, clicks.SOURCE.num_rows)
    inputs = pandas.DataFrame({"ids": list(ids)})
    answers = ExportedModel(loaded.model, loaded.task).predict(inputs)["probability"].to_numpy()
    with torch.no_grad():
        logits = loaded.model(torch.from_numpy(ids))
    np.testing.assert_allclose(answers, torch.sigmoid(logits.double()).numpy(), rtol=1e-6)
    sums = loaded.task.statistics(logits, {"label": torch.from_numpy(labels)})
    ours = float(loaded.task.metrics({name: value.sum().numpy() for name, value in sums.items()})["auc"])
    assert ours == pytest.approx(roc_auc_score(labels, answers), abs=5e-3) and ours > 0.6


def test_a_step_whose_row_gradients_are_not_finite_is_skipped_as_a_whole(prepare, monkeypatch, tmp_path):
    paths, resolved = prepare("train.steps=2")
    monkeypatch.setattr("kftrain.models.sparse_embedding.SparseEmbedding.sum_gradients", lambda embedding: float("inf"))
    with pytest.raises(DivergedError):
        train((paths, resolved), monkeypatch, tmp_path)
    assert not commit.list_committed(paths)


def test_tables_that_the_model_has_not_are_refused(prepare, monkeypatch, tmp_path):
    run = prepare("server.tables=[{name: ids, dim: 5}]")
    with pytest.raises(ConfigError, match=r"server\.tables: .*others .*'ids': 5.* the model has .*'ids': 4"):
        train(run, monkeypatch, tmp_path)


def test_a_run_without_its_secret_is_refused(prepare, monkeypatch):
    paths, resolved = prepare()
    monkeypatch.delenv("KFTRAIN_SERVER_SECRET", raising=False)
    with pytest.raises(ConfigError, match="KFTRAIN_SERVER_SECRET: workers and servers share no secret"):
        in_process.train(paths, resolved, monkeypatch)


REFUSED = {
    "server.num_servers=0": "num_servers must be at least 1 with tables",
    "server.consistency=ssp": "needs at least 1",
    "server.copies=2": "num_servers must be at least 2",
    "parallel.strategy=fsdp": "parallel.strategy must be ddp with tables",
    "precision.compute=bf16": "precision.compute must be fp32 with tables",
    "train.average_decay=0.9": "train.average_decay must be left out with tables",
    "train.micro_batch_size=auto": "train.micro_batch_size must be a number with tables",
    "server.tables=[{name: ids, dim: 4}, {name: ids, dim: 4}]": "two tables have one name: ids",
    "server.tables=[{name: ../x, dim: 4}]": "name",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_go_together_is_refused(prepare, override):
    with pytest.raises(ConfigError, match=REFUSED[override]):
        prepare(override)


def test_a_clock_rule_changes_the_training_and_the_number_of_servers_does_not(prepare):
    _, resolved = prepare()
    before = resolved.training_digest("d")
    other = TableConfig(name="ids", dim=clicks.DIM, optimizer="sgd", learning_rate=1.0)
    for changes, is_same in (
        ({"num_servers": 5}, True),
        ({"copies": 2, "num_servers": 2}, True),
        ({"consistency": "asp"}, False),
        ({"encoding": "bf16"}, False),
        ({"tables": (other,)}, False),
    ):
        server = ServerConfig(**{**dict(resolved.server), **changes})
        assert (resolved.model_copy(update={"server": server}).training_digest("d") == before) is is_same


def test_a_change_of_servers_leaves_the_group_of_the_checkpoint_thread_alone(monkeypatch):
    """That thread may write meanwhile: two collectives of one group at once would wait for each other for ever."""
    groups, gather = [], dist.all_gather_object
    rows = RemoteRows.__new__(RemoteRows)
    rows._tables, rows._change, rows._servers = types.SimpleNamespace(switch=lambda servers: None), None, []
    with in_process.alone(monkeypatch), join_world(60.0) as rows._world:
        note = lambda values, value, group: (groups.append(group), gather(values, value, group=group))  # noqa: E731
        monkeypatch.setattr(dist, "all_gather_object", note)
        rows._switch()
        assert groups == [rows._world.control] * 2
