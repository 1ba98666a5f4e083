"""Documents of a plausible run, as the stages write them."""

from __future__ import annotations

from typing import Any

import pytest
from report_documents import DIGESTS, Documents, make_history

from kftrain import config
from kftrain.run.documents import Completion, Confusion, Evaluation, Example, Interval, Registration, Slice


@pytest.fixture
def settings() -> config.Config:
    text = "run: {name: stdlib-lm, storage_root: /data/runs}\ntrain: {steps: 400}\nregistry: {goal: minimize}\n"
    return config.parse(text)


@pytest.fixture
def completion() -> Completion:
    return Completion(
        run_id="stdlib-lm-1",
        step=400,
        samples_consumed=12_800,
        attempt=2,
        world_size=4,
        checkpoint_uri="/data/runs/stdlib-lm-1/checkpoints/step-400-a2",
        checkpoint_digest=DIGESTS["check"],
        export_uri="/data/runs/stdlib-lm-1/export/cccc",
        export_digest=DIGESTS["export"],
        dataset_digest=DIGESTS["data"],
        training_digest=DIGESTS["train"],
        num_parameters=1_861_248,
        metrics={"loss": 1.58834, "samples_per_second": 287.3, "learning_rate": 1e-4},
        seconds=200.4,
        loss_unit="nats per token",
    )


@pytest.fixture
def history() -> list[dict[str, Any]]:
    return make_history(400)


@pytest.fixture
def evaluation() -> Evaluation:
    return Evaluation(
        evaluation_digest=DIGESTS["eval"],
        checkpoint_digest=DIGESTS["check"],
        export_uri="/data/runs/stdlib-lm-1/export/cccc",
        export_digest=DIGESTS["export"],
        dataset_digest=DIGESTS["data"],
        num_samples=5321,
        num_groups=187,
        confidence=0.95,
        metrics={
            "bits_per_byte": Interval(value=2.33712, low=2.28941, high=2.38323),
            "perplexity": Interval(value=5.0526, low=4.889, high=5.217),
        },
        slices={
            "json": Slice(num_samples=705, metrics={"bits_per_byte": 2.3251}),
            "asyncio": Slice(num_samples=67, metrics={"bits_per_byte": 2.5542}),
            "ctypes": Slice(num_samples=521, metrics={"bits_per_byte": 2.0443}),
        },
        baselines={"bits_per_byte": {"zlib -9": 2.512, "order-2": 2.946}},
        confusion=Confusion(labels=["cat", "dog", "ship"], matrix=[[90, 9, 1], [4, 95, 1], [0, 0, 100]]),
        examples=[
            Example(
                key="json/decoder.py",
                is_worst=False,
                metrics={"bits_per_byte": 2.25},
                shown={"text": "def decode(self, s):\n    obj", "the model writes": "ect = self"},
            ),
            Example(key="asyncio/base.py", is_worst=True, metrics={"bits_per_byte": 4.5}, picture="iVBORw0KGgo="),
        ],
        statistics_sha256="f" * 64,
    )


@pytest.fixture
def registration() -> Registration:
    return Registration(
        run_id="stdlib-lm-1",
        model_name="stdlib-lm",
        version=7,
        logged_model_id="m-5f0c",
        mlflow_run_id="0a7c",
        tracking_uri="sqlite:////data/mlflow.db",
        promoted=True,
        reason="the interval of the improvement is above 0",
        metric="bits_per_byte",
        goal="minimize",
        challenger=Interval(value=2.33712, low=2.28941, high=2.38323),
        champion_version=5,
        champion=Interval(value=2.398, low=2.349, high=2.445),
        improvement=Interval(value=0.0609, low=0.0431, high=0.0788),
    )


@pytest.fixture
def manifest() -> dict[str, Any]:
    def shard(name: str, num_samples: int) -> dict[str, Any]:
        return {"name": name, "bytes": 63_987_200, "sha256": "0" * 64, "num_samples": num_samples, "num_blocks": 1211}

    return {
        "schema_version": 1,
        "dataset_digest": DIGESTS["data"],
        "source": "stdlib",
        "sample_schema": {"fields": [{"name": "tokens", "dtype": "uint8", "shape": [257]}]},
        "splits": {
            "train": {"shards": [shard("train-000000.tar", 248_731), shard("train-000001.tar", 81_004)]},
            "validation": {"shards": [shard("validation-000000.tar", 5321)]},
        },
        "baselines": {"bits_per_byte": {"zlib -9": 2.512}},
    }


@pytest.fixture
def documents(
    settings: config.Config,
    completion: Completion,
    history: list[dict[str, Any]],
    evaluation: Evaluation,
    registration: Registration,
    manifest: dict[str, Any],
) -> Documents:
    return Documents(settings, completion, history, evaluation, registration, manifest)
