"""An attempt of a row of the table of parity, with kftrain's own checkpoints: it stops after some steps, or goes on."""

import contextlib

from helpers.in_process import StopAfter
from helpers.parity.rank import COLLECTIVE_SECONDS, Trained, averages_of, new_loader, whole
from helpers.served_islands import connect_islands

from kftrain import config
from kftrain.checkpoint import load
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.core import storage
from kftrain.errors import Preempted
from kftrain.parallel.mesh import Mesh
from kftrain.process.liveness import Liveness
from kftrain.run import attempts, commit
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.recorder import Recorder


def attempt(world, job, folder, num_steps, stops=None):
    """Goes on with what lies in the folder, if anything, for so many steps at most; what came of it.

    `stops`: the ranks that are asked to stop; None: all.
    """
    with job.defect():
        return _attempt(world, job, folder, StopAfter(num_steps if stops is None or world.rank in stops else 10**6))


def _attempt(world, job, folder, stop):
    resolved = config.parse(job.text, [*job.overrides, f"run.storage_root={folder}"])
    paths, identity = RunPaths.of(folder, "r"), resolved.training_identity("d")
    number = world.from_main(
        attempts.claim_run(paths, commit.find_last_step(paths), world.size) if world.is_main else None
    )
    loaded = load.choose_checkpoint(paths, world, identity)
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    with contextlib.closing(new_loader(resolved, task, mesh, job.data())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh, before=loaded.manifest if loaded else None)
        first = whole(engine.model)
        known = Identity(number, "d", storage.digest_json(identity), identity, engine.state.versions)
        writer = CheckpointWriter(paths, world, known, 1, loaded.manifest.step if loaded else 0)
        recorder = Recorder(loaded.history if loaded else [], None, resolved.train.steps)
        liveness = Liveness(lambda: None, COLLECTIVE_SECONDS)
        loop = Loop(resolved, world, engine, loader, None, writer, recorder, stop, liveness)
        connected = connect_islands(engine, resolved, world, loaded.manifest if loaded else None)
        with contextlib.suppress(Preempted), contextlib.closing(writer), connected:
            loop.run(loop.resume(loaded))
        trained = Trained(first, recorder.history, whole(engine.model), averages_of(engine, resolved))
    return trained if world.is_main else None
