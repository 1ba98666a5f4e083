"""`kftrain init`: what it writes is a project that can be built; docs/tutorial.md trains it (slow)."""

import runpy
import shlex
import sys

import numpy as np
import pytest
import torch

from kftrain import cli, config
from kftrain.cli import init
from kftrain.data.schema import Record
from kftrain.errors import ConfigError
from kftrain.sharding.sources.resolve_source import choose_split
from kftrain.tasks import build_task


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    """A new project, importable."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", str(tmp_path / "digits-test")])
    assert caught.value.code == 0, capsys.readouterr().err
    monkeypatch.syspath_prepend(str(tmp_path / "digits-test"))
    yield tmp_path / "digits-test"
    for name in [name for name in sys.modules if name.startswith("digits_test")]:
        del sys.modules[name]


def test_every_template_is_written_and_named_in_what_is_printed(project, capsys):
    templates = {path.name.removesuffix(".jinja") for path in (init.Path(init.__file__).parent / "templates").iterdir()}
    assert templates == init.FILES.keys()
    files = sorted(path.relative_to(project).as_posix() for path in project.rglob("*.*") if path.is_file())
    assert files == [
        *("config.yaml", "digits_test/__init__.py", "digits_test/data.py", "digits_test/model.py"),
        *("digits_test/task.py", "tests/test_digits_test.py"),
    ]
    assert not [path for path in project.rglob("*.py") if "{" + "{" in path.read_text()]


@pytest.mark.parametrize("folder", ["digits_there", "digits of there"])
def test_what_is_printed_names_each_file_and_what_to_do_next(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        cli.main(["init", f"~/{folder}"])
    *wrote, following = capsys.readouterr().out.splitlines()
    files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert sorted(wrote) == sorted(f"wrote {path}" for path in files) and len(files) == len(init.FILES)
    assert following.split(": ", 1)[1].split(" && ") == [
        *(
            f"cd {shlex.quote(str(tmp_path / folder))}",
            "python -m pytest",
            "PYTHONPATH=$PWD kftrain run --config config.yaml",
        )
    ]


def test_the_projects_own_tests_pass(project):
    own = runpy.run_path(str(project / "tests" / "test_digits_test.py"))
    tests = [each for name, each in own.items() if name.startswith("test_")]
    assert len(tests) == 3
    for each in tests:
        each()


def test_configuration_data_task_and_model_fit_together(project):
    resolved = config.load(project / "config.yaml")
    task = build_task(resolved.task)
    from digits_test.data import records

    blocks = list(task.encode((Record(key, fields) for key, fields in records()), "train"))
    assert len(blocks) == 1797 == len({block.key for block in blocks})
    assert (resolved.run.name, resolved.registry.metric, resolved.registry.goal) == (
        "digits-test",
        "accuracy",
        "maximize",
    )
    assert {name: rows.shape for name, rows in blocks[0].arrays.items()} == {"pixels": (1, 8, 8), "label": (1,)}
    from kftrain.models import build_model

    model = build_model(resolved.model, task.model_arguments())
    batch = task.batch(blocks[0].arrays)
    assert model(*task.inputs(batch)).shape == (1, 10)


def test_the_first_model_leaves_room_for_a_second_one(project):
    """Where the first one is always right, no gate can decide anything."""
    resolved = config.load(project / "config.yaml")
    task = build_task(resolved.task)
    from digits_test.data import records
    from digits_test.model import Network

    rows = {"train": [], "validation": []}
    for record in (Record(key, fields) for key, fields in records()):
        rows[choose_split(record, resolved.data.validation_fraction)].append(record)
    batches = {}
    for split, part in rows.items():
        blocks = list(task.encode(iter(part), split))
        names = blocks[0].arrays
        batches[split] = task.batch({name: np.concatenate([each.arrays[name] for each in blocks]) for name in names})
    model = Network(num_classes=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(300):  # far longer than the configuration trains: a linear model gets no better
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(*task.inputs(batches["train"])), batches["train"]["label"]).backward()
        optimizer.step()
    held_out = batches["validation"]
    accuracy = (model(*task.inputs(held_out)).argmax(1) == held_out["label"]).float().mean().item()
    assert 0.8 < accuracy < 0.98


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path):
    (tmp_path / "digits_quality").mkdir()
    (tmp_path / "digits_quality" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        init.write_project(tmp_path / "digits_quality", "digits_quality")
    assert [path.name for path in (tmp_path / "digits_quality").iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("json", "module of that name"), ("class", "no package"), ("7up", "no package"), ("x" * 41, "no package")],
)
def test_a_name_that_python_cannot_import_is_refused(name, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        init.name_package(tmp_path / name)
    assert init.name_package(tmp_path / "My Digits-2") == "my_digits_2"
