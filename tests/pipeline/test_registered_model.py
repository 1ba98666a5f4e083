"""The registered champion, loaded as a stranger loads it: mlflow alone, in another process, from another folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import jobs
from helpers.documents import DIGITS
from helpers.fakes.mlflow_server import Server

from kftrain.core import storage
from kftrain.data.settings import DataConfig
from kftrain.run import documents
from kftrain.run.documents import Evaluation
from kftrain.run.paths import RunPaths
from kftrain.sharding.sources import resolve_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PREDICT = """
import json, sys, mlflow, pandas
inputs = pandas.DataFrame(json.load(open(sys.argv[2])))
answer = mlflow.pyfunc.load_model(f"models:/{sys.argv[1]}@champion").predict(inputs)
print(json.dumps({name: list(map(float, answer[name])) for name in answer.columns}))
"""


def run_pipeline(folder, text, *overrides):
    (folder / "c.yaml").write_text(text)
    options = [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "kftrain", "run", "--config", "c.yaml", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    uri = next(line.split(" in ")[1] for line in done.stderr.splitlines() if line.startswith("run ") and " in " in line)
    return RunPaths(uri)


def evaluation_of(paths):
    found = list(storage.local_path(paths.uri).glob("evaluation/*/*/metrics.json"))
    assert len(found) == 1
    return documents.read(Evaluation, str(found[0]))


def predict(tracking_uri, model_name, inputs, elsewhere):
    elsewhere.mkdir()
    (elsewhere / "inputs.json").write_text(json.dumps(inputs))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PREDICT, model_name, "inputs.json"],
        cwd=elsewhere,
        env={**os.environ, "MLFLOW_TRACKING_URI": tracking_uri, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_language_model_answers_with_evaluations_own_number_through_a_server(tmp_path):
    source = jobs.write_texts(tmp_path / "texts")
    server = Server(tmp_path)
    server.start()
    try:
        text = jobs.TINY.replace("SOURCE", str(source))
        paths = run_pipeline(tmp_path, text, f"tracking.uri={server.uri}", "train.steps=10")
        records = [
            record
            for record in resolve_source.resolve(DataConfig(source=str(source))).records()
            if resolve_source.choose_split(record, 0.2) == "validation"
        ]
        inputs = {"text": [record.fields["text"].decode() for record in records]}
        answer = predict(server.uri, "tiny", inputs, tmp_path / "elsewhere")
    finally:
        server.stop()
    num_bytes = [len(text.encode()) for text in inputs["text"]]
    assert answer["num_bytes"] == num_bytes
    mean = sum(b * n for b, n in zip(answer["bits_per_byte"], num_bytes, strict=True)) / sum(num_bytes)
    assert mean == pytest.approx(evaluation_of(paths).metrics["bits_per_byte"].value, rel=1e-6)


def test_the_image_classifier_answers_with_class_probabilities_on_sqlite(tmp_path):
    paths = run_pipeline(tmp_path, DIGITS, "train.steps=40", "registry.promotion=auto")
    data = DataConfig(source="digits", validation_fraction=0.1)
    records = [r for r in resolve_source.resolve(data).records() if resolve_source.choose_split(r, 0.1) == "validation"]
    inputs = {"image": [record.fields["image"].tolist() for record in records]}
    answer = predict(f"sqlite:///{tmp_path}/mlflow.db", "tiny", inputs, tmp_path / "elsewhere")
    rows = list(zip(*answer.values(), strict=True))
    assert len(answer) == 10
    assert all(sum(row) == pytest.approx(1.0, abs=1e-5) for row in rows)
    hits = sum(row.index(max(row)) == record.fields["label"] for row, record in zip(rows, records, strict=True))
    assert hits / len(records) == pytest.approx(evaluation_of(paths).metrics["accuracy"].value)


def test_the_vectors_of_names_answer_from_the_tables_of_two_servers(tmp_path):
    text = (Path(__file__).parents[2] / "examples" / "identifiers.yaml").read_text()
    paths = run_pipeline(tmp_path, text, "train.steps=200", "evaluate.interval_steps=0", "optimizer.warmup_steps=5")
    near, far = ("self", "def"), ("self", "never_seen_before")
    inputs = {"identifier": [near[0], far[0]], "other": [near[1], far[1]]}
    answer = predict(f"sqlite:///{tmp_path}/mlflow.db", "identifiers", inputs, tmp_path / "elsewhere")
    assert answer["log_odds"][0] > answer["log_odds"][1] + 0.5
    metrics = evaluation_of(paths).metrics
    assert metrics["reciprocal_rank"].value > 0.6
