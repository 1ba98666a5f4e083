"""What the log files of an evaluation's ranks say."""

from helpers import jobs

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import EvaluationRequest


def test_each_rank_says_what_it_scores_and_that_it_has_ended(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=1", "evaluate.batch_size=4"])
    assert jobs.run_worker(paths, resolved, processes=1).returncode == 0
    jobs.request_evaluation(paths)
    done = jobs.run_worker(paths, resolved, "evaluate", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest_uri = storage.read_json(paths.shards)["manifest_uri"]
    target = documents.read(EvaluationRequest, paths.evaluation_request).targets[0]
    num_samples = storage.read_json(f"{target.output_uri}/metrics.json")["num_samples"]
    shares = []
    for rank in range(2):
        opened, scored, end = storage.read_text(f"{paths.logs}/evaluation/rank-{rank}.log").splitlines()
        assert opened.startswith("export ") and opened.endswith(f", shards {manifest_uri}")
        assert f" of {num_samples} samples: from batch {rank} on every 2. of " in scored
        assert end == "the evaluation has ended"
        shares.append(int(scored.split()[1]))
    assert sum(shares) == num_samples and 0 < shares[1] < num_samples
