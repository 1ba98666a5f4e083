"""A table against a dict: any keys, any order, growth, removal, admission, expiry, and what a row costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.server.optimizers import RowAdagrad, RowSgd
from kftrain.server.rows import RowStore
from kftrain.server.table import RowTable, TableSpec, draw_initial_weights

pytestmark = pytest.mark.timeout(120)

EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
KEYS = st.lists(st.sampled_from(EDGES) | st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1), max_size=60)


def array(keys):
    return np.array(sorted(set(keys)), np.int64)


def make_table(tmp_path, optimizer=None, **options):
    return RowTable(TableSpec("t", options.pop("dim", 3), 7, **options), optimizer or RowSgd(1.0), tmp_path)


def versions_of(table, keys):
    """How many updates the row of each key had; 0 where it has none."""
    rows = table.view()["rows"]
    versions = dict(zip(rows["key"].tolist(), rows["version"].tolist(), strict=True))
    return [versions.get(key, 0) for key in keys.tolist()]


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), KEYS), max_size=12), looks=KEYS)
def test_rows_are_a_dict(tmp_path_factory, steps, looks):
    rows, oracle = RowStore(1, tmp_path_factory.mktemp("rows")), {}
    for number, (removes, some) in enumerate(steps):
        keys = array(some)
        if removes:
            keys = keys[[key in oracle for key in keys.tolist()]] if keys.size else keys
            rows.remove(keys)
            oracle = {key: value for key, value in oracle.items() if key not in set(keys.tolist())}
        else:
            keys = keys[[key not in oracle for key in keys.tolist()]] if keys.size else keys
            places = rows.insert(keys)
            rows.live["numbers"][places, 0] = number
            oracle |= dict.fromkeys(keys.tolist(), number)
    assert dict(zip(rows.live["key"].tolist(), rows.live["numbers"][:, 0].tolist(), strict=True)) == oracle
    sought = np.array([*looks, *oracle], np.int64)
    places = rows.find(sought)
    assert [key in oracle for key in sought.tolist()] == (places >= 0).tolist()
    assert (rows.live["key"][places[places >= 0]] == sought[places >= 0]).all()


def test_an_index_that_is_emptied_and_filled_again_and_again_stays_small(tmp_path):
    rows = RowStore(1, tmp_path)
    for turn in range(60):
        keys = np.arange(700, dtype=np.int64) + 700 * turn
        rows.insert(keys)
        assert (rows.find(keys) >= 0).all()
        rows.remove(keys)
    assert len(rows) == 0 and rows.num_bytes < 300_000


def test_a_full_index_finds_what_lies_behind_removed_rows(tmp_path):
    rows, live, rng = RowStore(1, tmp_path), np.empty(0, np.int64), np.random.default_rng(0)
    for turn in range(40):
        rows.insert(more := np.arange(100, dtype=np.int64) + 100 * turn)
        live = rng.permutation(np.concatenate([live, more]))
        rows.remove(live[700:])
        gone, live = live[700:], live[:700]
        assert (rows.live["key"][rows.find(live)] == live).all() and (rows.find(gone) < 0).all()


def test_a_new_row_follows_from_seed_table_and_key_alone(tmp_path):
    one, other = make_table(tmp_path), make_table(tmp_path)
    keys = np.random.default_rng(0).permutation(np.arange(-500, 500))
    for part in np.array_split(keys, 7):
        one.update(part, np.zeros((len(part), 3), np.float32))
    for part in np.array_split(keys[::-1], 3):
        other.update(part.copy(), np.zeros((len(part), 3), np.float32))
    assert np.array_equal(one.read(keys), other.read(keys))
    assert np.array_equal(one.read(keys), make_table(tmp_path).read(keys))  # read before it is there
    for changed in (TableSpec("t", 3, 8), TableSpec("u", 3, 7)):
        assert not np.isclose(draw_initial_weights(changed, keys), one.read(keys)).any(axis=1).mean() > 0.1


@pytest.mark.parametrize("initial", ["normal", "uniform"])
def test_new_weights_have_the_distribution_that_was_asked_for(initial):
    spec = TableSpec("t", 16, 1, initial, initial_scale=0.5)
    drawn = draw_initial_weights(spec, np.arange(20_000)).astype(np.float64)
    deviation = 0.5 if initial == "normal" else 0.5 / np.sqrt(3)
    assert abs(drawn.mean()) < 5 * deviation / np.sqrt(drawn.size)
    assert drawn.std() == pytest.approx(deviation, rel=0.01)
    fourth = ((drawn / deviation) ** 4).mean()
    assert fourth == pytest.approx(3 if initial == "normal" else 9 / 5, rel=0.03)
    correlation = np.corrcoef(drawn.T)
    assert abs(correlation - np.eye(16)).max() < 0.05


@settings(max_examples=25, deadline=None)
@given(
    updates=st.lists(st.lists(st.integers(-6, 6), max_size=8), max_size=40),
    num_sightings=st.integers(1, 3),
    expiry_steps=st.sampled_from([0, 2, 5]),
)
def test_a_table_is_a_dict_of_rows(tmp_path_factory, updates, num_sightings, expiry_steps):
    table = make_table(tmp_path_factory.mktemp("t"), num_sightings=num_sightings, expiry_steps=expiry_steps)
    rows, sightings, last_use = {}, {}, {}
    everything = np.arange(-6, 7)
    initial = dict(zip(everything.tolist(), draw_initial_weights(table.spec, everything), strict=True))
    for step, some in enumerate(updates, 1):
        keys = array(some)
        gradients = np.random.default_rng(step).standard_normal((len(keys), 3)).astype(np.float32)
        table.update(keys, gradients)
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            last_use[key] = step
            if key not in rows:
                sightings[key] = sightings.get(key, 0) + 1
                if sightings[key] < num_sightings:
                    continue
                del sightings[key]
                rows[key] = (initial[key], 0)
            rows[key] = (rows[key][0] - gradient, rows[key][1] + 1)
        if expiry_steps:
            for silent in [key for key, use in last_use.items() if step - use >= expiry_steps]:
                rows.pop(silent, 0), sightings.pop(silent, 0), last_use.pop(silent)
    assert len(table) == len(rows)
    assert np.array_equal(table.read(everything), [rows.get(key, (initial[key], 0))[0] for key in everything.tolist()])
    assert versions_of(table, everything) == [rows.get(key, (0, 0))[1] for key in everything.tolist()]


def test_a_table_that_is_read_back_goes_on_as_the_table_would_have(tmp_path):
    tables = [make_table(tmp_path, RowAdagrad(0.1), num_sightings=2, expiry_steps=32) for _ in range(2)]
    rng = np.random.default_rng(0)
    for step in range(60):
        keys = np.unique(rng.integers(0, 3000, 200))
        gradients = rng.standard_normal((len(keys), 3)).astype(np.float32)
        if step == 30:
            tables[1].load(tables[0].num_updates, **tables[0].view())
        for table in tables[: 1 if step < 30 else 2]:
            table.update(keys, gradients)
    keys = np.arange(3000)
    assert np.array_equal(tables[0].read(keys), tables[1].read(keys))
    assert versions_of(tables[0], keys) == versions_of(tables[1], keys)


def test_duplicates_are_read(tmp_path):
    table = make_table(tmp_path)
    table.update(np.array([5]), np.ones((1, 3), np.float32))
    out = table.read(np.array([5, 9, 5, 9]))
    assert np.array_equal(out[:2], out[2:]) and not np.array_equal(out[0], out[1])


def test_a_live_row_costs_at_most_a_quarter_more_than_its_numbers(tmp_path):
    table = make_table(tmp_path, dim=64)
    worst = 0.0
    for start in range(0, 80_000, 4_000):
        keys = np.arange(start, start + 4_000) * 2_654_435_761
        table.update(keys, np.zeros((4_000, 64), np.float32))
        if len(table) >= 20_000:
            worst = max(worst, table.num_bytes / len(table) / 256)
    assert worst <= 1.25


def test_rows_that_are_remembered_from_a_read_are_those_of_the_update(tmp_path):
    table, plain = make_table(tmp_path), make_table(tmp_path)
    rng = np.random.default_rng(0)
    for turn in range(30):
        keys, others = (np.unique(rng.integers(0, 60, 8)) for _ in range(2))
        table.read(keys, table.find(keys))
        if turn % 3 == 0:  # another worker is faster
            for one in (table, plain):
                one.update(others, np.ones((len(others), 3), np.float32))
        if turn % 5 == 0:
            for one in (table, plain):
                gone = one._rows.live["key"][:2].copy()
                one._rows.remove(gone)
        for one in (table, plain):
            one.update(keys, np.full((len(keys), 3), turn, np.float32))
    assert np.array_equal(table.read(np.arange(60)), plain.read(np.arange(60)))


def test_parts_of_an_update_are_one(tmp_path):
    table, plain = make_table(tmp_path), make_table(tmp_path)
    keys, gradients = np.arange(9), np.arange(27, dtype=np.float32).reshape(9, 3)
    table.update_in_parts([(keys[:4], gradients[:4]), (keys[4:], gradients[4:])])
    plain.update(keys, gradients)
    assert table.num_updates == 1 and np.array_equal(table.read(keys), plain.read(keys))
