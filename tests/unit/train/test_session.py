"""What an attempt finds of the ones before it: a real worker process."""

from helpers import jobs

from kftrain import contracts, storage
from kftrain.contracts import Completion
from kftrain.launch.completion import has_export


def test_a_run_whose_export_is_gone_exports_again_without_a_step(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=4"])
    assert jobs.run_worker(paths, resolved, processes=1).returncode == 0
    before = contracts.read(Completion, paths.complete)
    storage.remove(before.export_uri)
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    after = contracts.read(Completion, paths.complete)
    assert has_export(after) and (after.attempt, before.attempt) == (2, 1)
    assert (after.checkpoint_digest, after.export_digest) == (before.checkpoint_digest, before.export_digest)
    assert "going on after step 4" in done.stdout and "step 4/4" not in done.stdout
