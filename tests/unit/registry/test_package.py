"""What a version carries for strangers: kftrain's own wheel, an environment, an example, a card."""

import email
import hashlib
import io
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode

import mlflow
import numpy as np
import pandas
import pytest
import torch
import yaml
from mlflow import MlflowClient
from mlflow.models import Model

import kftrain
from kftrain import registry
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.registry import pyfunc_loader
from kftrain.registry.package import ModelPackage, list_requirements, make_own_wheel
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tracking.session import StoredModel, write_model

EXAMPLE = {"text": "def f():"}
TYPES = {"bits_per_byte": "double", "num_bytes": "long"}


@pytest.fixture(scope="module")
def wheel():
    return make_own_wheel()


@pytest.fixture
def package(wheel):
    return ModelPackage("# card", {"model.dim": "8"}, ("mlflow==3.17.2", "torch==2.13.0"), wheel, EXAMPLE, TYPES)


def test_the_wheel_holds_every_module_and_its_record_is_right(wheel):
    assert make_own_wheel().content == wheel.content
    archive = zipfile.ZipFile(io.BytesIO(wheel.content))
    names = set(archive.namelist())
    assert {"kftrain/__init__.py", "kftrain/components/train.py", "kftrain/pipelines/train.py"} <= names
    assert {"kftrain/reports/templates/page.html", "kftrain/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("/") or ".." in name]
    [record] = [name for name in names if name.endswith("/RECORD")]
    listed = dict(line.split(",", 1) for line in archive.read(record).decode().splitlines())
    assert set(listed) == names
    for name in names - {record}:
        digest = urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        assert listed[name] == f"sha256={digest},{len(archive.read(name))}"
    metadata = email.message_from_bytes(archive.read(record.replace("RECORD", "METADATA")))
    assert metadata["Version"] == f"{kftrain.__version__}+{wheel.digest}" and "torch" in str(
        metadata.get_all("Requires-Dist")
    )
    assert wheel.file_name == f"kftrain-{metadata['Version']}-py3-none-any.whl"


def test_pip_installs_the_wheel_from_beside_the_requirements_wherever_it_runs(package, tmp_path):
    """As a server does, from another folder; dependencies are left out here."""
    for name, content in package.files().items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    wanted = tmp_path / "model" / "requirements.txt"
    kept = [line for line in wanted.read_text().splitlines() if line.startswith(("-c", "kftrain"))]
    wanted.write_text("\n".join(kept))
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", tmp_path / "here"]
    subprocess.run([*command, "-r", wanted], cwd="/", check=True, capture_output=True)
    code = "import kftrain.registry.pyfunc_loader as loader; print(loader.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "here"), "PATH": ""},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(tmp_path / "here"))


def test_the_environment_pins_what_was_trained_with_and_names_the_wheel_in_every_form(package, wheel):
    files = package.files()
    place = f"--find-links wheels/{wheel.digest}"
    assert files["requirements.txt"].decode().splitlines() == [
        "-c constraints.txt",
        "mlflow==3.17.2",
        "torch==2.13.0",
        f"kftrain=={kftrain.__version__}",
    ]
    assert files["constraints.txt"].decode() == f"{place}\n"
    assert yaml.safe_load(files["python_env.yaml"])["dependencies"] == [place, "-r requirements.txt"]
    conda = yaml.safe_load(files["conda.yaml"])["dependencies"][-1]["pip"]
    assert conda == [place, "mlflow==3.17.2", "torch==2.13.0", f"kftrain=={kftrain.__version__}"]
    assert files[f"wheels/{wheel.digest}/{wheel.file_name}"] == wheel.content
    assert ModelPackage().files() == {}
    bare = ModelPackage(requirements=("torch==2.13.0",)).files()
    assert bare["requirements.txt"] == b"torch==2.13.0\n" and "constraints.txt" not in bare


def test_requirements_are_pins_of_the_training_with_what_reads_the_storage():
    found = list_requirements(
        {"torch": "2.13.0+cpu", "numpy": "2.4.6"}, {"mlflow": "3.17.2", "s3fs": "2026.1"}, "s3://b/e"
    )
    assert found == ("botocore", "mlflow==3.17.2", "numpy==2.4.6", "s3fs==2026.1", "torch==2.13.0")
    assert list_requirements({}, {}, "/a/folder") == (
        "mlflow",
        "numpy>=1.26",
        "safetensors>=0.5",
        "tokenizers>=0.20",
        "torch>=2.11",
    )


def test_mlflow_reads_environment_example_and_signature(package, tmp_path):
    stored = StoredModel({"reference.json": b"{}", **package.files()}, package.input_example, package.answer_types)
    write_model(tmp_path, "r", "m-1", "kftrain.registry.pyfunc_loader", "reference.json", stored)
    model = Model.load(str(tmp_path))
    assert [column.type.name for column in model.get_input_schema().inputs] == ["string"]
    assert {column.name: column.type.name for column in model.get_output_schema().inputs} == TYPES
    assert model.load_input_example(str(tmp_path)).to_dict("records") == [EXAMPLE]
    assert mlflow.pyfunc.get_model_dependencies(str(tmp_path), "pip").endswith("requirements.txt")
    assert model.flavors["python_function"]["env"] == {"conda": "conda.yaml", "virtualenv": "python_env.yaml"}


@pytest.mark.parametrize(("types", "columns"), [({"0": "float"}, ["0"]), ({}, None)])
def test_of_arrays_the_signature_says_the_answer_alone_since_mlflow_would_refuse_some(types, columns, tmp_path):
    example = {"image": [[1]]}
    stored = StoredModel({"reference.json": b"{}", **ModelPackage(input_example=example).files()}, example, types)
    write_model(tmp_path, "r", "m-1", "kftrain.registry.pyfunc_loader", "reference.json", stored)
    model = Model.load(str(tmp_path))
    assert model.get_input_schema() is None
    assert (model.get_output_schema().input_names() if model.signature else None) == columns
    assert model.load_input_example(str(tmp_path)).to_dict("records") == [example]


def test_plain_columns_make_a_signature(tmp_path):
    example = {"age": 3.5, "sex": "f"}
    stored = StoredModel({"reference.json": b"{}", **ModelPackage(input_example=example).files()}, example)
    write_model(tmp_path, "r", "m-1", "kftrain.registry.pyfunc_loader", "reference.json", stored)
    assert Model.load(str(tmp_path)).get_input_schema().input_names() == ["age", "sex"]


IMAGES = np.arange(2 * 8 * 8).reshape(2, 8, 8, 1).astype(np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        IMAGES,
        list(IMAGES),
        IMAGES.tolist(),
        {"image": list(IMAGES)},
        pandas.DataFrame({"image": list(IMAGES)}),
        pandas.DataFrame({"image": IMAGES.tolist()}),
    ],
)
def test_a_model_of_images_takes_them_in_every_form(given, tmp_path, monkeypatch):
    torch.manual_seed(0)
    task = ImageClassification(image_size=8, num_classes=3, num_channels=1)
    settings = ModelConfig(kind="vision_transformer", dim=8, num_layers=1, num_heads=2, patch_size=2)
    ours = pyfunc_loader.ExportedModel(build_model(settings, task.model_arguments()).eval(), task)
    monkeypatch.setattr(pyfunc_loader, "_load_pyfunc", lambda path: ours)
    example, types = task.input_example({"image": IMAGES[0]}), task.answer_types()
    stored = StoredModel({"reference.json": b"{}", **ModelPackage(input_example=example).files()}, example, types)
    write_model(tmp_path, "r", "m-1", "kftrain.registry.pyfunc_loader", "reference.json", stored)
    loaded = mlflow.pyfunc.load_model(str(tmp_path))
    assert loaded.metadata.get_output_schema().input_names() == list(types)
    expected = ours.predict(pandas.DataFrame({"image": list(IMAGES)}))
    assert loaded.predict(given)[list(types)].to_dict("list") == expected[list(types)].to_dict("list")


@pytest.mark.parametrize(
    "given",
    [
        ["one text", "another"],
        np.array(["one text", "another"]),
        {"text": ["one text", "another"]},
        [{"text": "one text"}, {"text": "another"}],
        pandas.DataFrame({"text": ["one text", "another"], "other": [1, 2]}),
        pandas.Series(["one text", "another"]),
    ],
)
def test_a_model_with_a_signature_takes_what_it_took_without_one(given, package, tmp_path, monkeypatch):
    torch.manual_seed(0)
    task = LanguageModeling(sequence_length=8)
    module = build_model(ModelConfig(kind="transformer", dim=8, num_layers=1, num_heads=2), task.model_arguments())
    ours = pyfunc_loader.ExportedModel(module.eval(), task)
    monkeypatch.setattr(pyfunc_loader, "_load_pyfunc", lambda path: ours)
    stored = StoredModel({"reference.json": b"{}", **package.files()}, package.input_example, package.answer_types)
    write_model(tmp_path, "r", "m-1", "kftrain.registry.pyfunc_loader", "reference.json", stored)
    answer = mlflow.pyfunc.load_model(str(tmp_path)).predict(given)
    expected = ours.predict(pandas.DataFrame({"text": ["one text", "another"]}))
    assert answer.to_dict("list") == expected.to_dict("list")


def test_a_registered_version_has_card_parameters_and_metrics_of_its_dataset(config, finished, package):
    run = finished("one", 0.6)
    made = []
    found = registry.register(
        run.config, run.paths, run.completion, run.evaluation, run.mlflow_run_id, lambda: made.append(1) or package
    )
    reader = MlflowClient(tracking_uri=config.tracking.uri)
    assert reader.get_model_version("toy", "1").description.startswith("# card\n\nMeasured")
    model = reader.get_logged_model(found.logged_model_id)
    assert model.name == "one" and model.params == {"model.dim": "8"}
    assert {metric.key: (metric.dataset_name, metric.dataset_digest) for metric in model.metrics} == {
        "evaluation/accuracy": ("toy", "d" * 36),
        "evaluation/error": ("toy", "d" * 36),
    }
    [by_tag] = reader.search_model_versions("name = 'toy' and tags.`kftrain.model` = 'transformer'")
    assert by_tag.version in (1, "1")
    registry.register(run.config, run.paths, run.completion, run.evaluation, run.mlflow_run_id, lambda: made.append(1))
    assert made == [1]  # a version that is there needs no package
