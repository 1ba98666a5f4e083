"""A run of a mixture of experts by real workers: its metrics, its export, its evaluation in several layouts."""

import pytest
import torch
import transformers
from helpers import jobs

from kftrain import config
from kftrain.checkpoint.export import load_export
from kftrain.core import storage
from kftrain.evaluate.identity import evaluation_digest
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation, EvaluationRequest, EvaluationTarget

pytestmark = pytest.mark.slow

MODEL = """{kind: mixture_of_experts, dim: 32, num_layers: 3, num_heads: 4, num_kv_heads: 2, first_dense_layers: 1,
  num_experts: 4, experts_per_token: 2, expert_dim: 16, num_shared_experts: 1, scores: sigmoid, balance_rate: 0.01,
  balance_loss: 0.001, capacity_factor: 1.25}"""

TEXT = jobs.TINY.replace("{kind: transformer, dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2}", MODEL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    source = jobs.write_texts(root / "texts")
    paths, resolved = jobs.prepare(root, TEXT.replace("SOURCE", str(source)), ["parallel.expert=2"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, resolved, documents.read(Completion, paths.complete), done.stdout + done.stderr


def test_the_log_shows_the_fullest_expert_and_what_was_dropped(trained):
    assert "fullest expert" in trained[3] and "of choices dropped" in trained[3]


def test_transformers_loads_the_export_and_gives_our_logits(trained):
    completion = trained[2]
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        storage.local_path(completion.export_uri), output_loading_info=True, dtype=torch.float32
    )
    assert type(theirs).__name__ == "Dots1ForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours = load_export(completion.export_uri, completion.export_digest).model
    biases = [value for name, value in ours.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(bias.any() for bias in biases)
    tokens = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("processes", "expert"), [(2, 1), (2, 2), (4, 2)])
def test_an_evaluation_in_the_layout_of_a_training_gives_the_metrics_of_whole_copies(
    trained, tmp_path, processes, expert
):
    ours = evaluate(trained, tmp_path / "spread", processes, ["evaluate.layout=training", f"parallel.expert={expert}"])
    theirs = evaluate(trained, tmp_path / "copies", 1, ["evaluate.layout=copies", "parallel.expert=1"])
    assert ours.num_samples == theirs.num_samples and ours.metrics.keys() == theirs.metrics.keys()
    for name, found in ours.metrics.items():
        assert found.value == pytest.approx(theirs.metrics[name].value, rel=1e-5)


def evaluate(trained, folder, processes, overrides):
    paths, resolved, completion, _ = trained
    resolved = config.parse(resolved.to_yaml(), overrides)
    storage.publish(paths.config, resolved.to_yaml())
    digest = evaluation_digest(resolved, completion.dataset_digest)
    target = EvaluationTarget(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        checkpoint_digest=completion.checkpoint_digest,
        output_uri=str(folder),
    )
    request = EvaluationRequest(evaluation_digest=digest, targets=[target])
    storage.publish_json(paths.evaluation_request, request.to_dict())
    done = jobs.run_worker(paths, resolved, "evaluate", processes, KFTRAIN_TRUSTED_ROOTS=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot be spread" not in done.stdout + done.stderr
    return documents.read(Evaluation, str(folder / "metrics.json"))
