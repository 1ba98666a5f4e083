"""Step 1: checks what can be checked cheaply, opens the run, and writes the shards of its dataset."""

from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Dataset, Markdown, Metrics, Output

from kftrain.components.images import STEPS_IMAGE


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False)
def shard(
    config: str,
    source: str,
    storage_root: str,
    model_name: str,
    nodes: int,
    processes_per_node: int,
    steps: int,
    learning_rate: float,
    promotion: str,
    trainer_image: str,
    queue: str,
    resume_run: str,
    job_id: str,
    shards: Output[Dataset],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    report: Output[HTML],
    next_step: dsl.OutputPath(str),
    config_json: dict[str, Any] = {},
    created: str = "",
) -> str:
    """Shards the dataset of a run.

    Args:
        config: The configuration, a YAML text or the URI of one.
        source: Where samples come from. This and the next nine win over the configuration unless '' or 0.
        storage_root: Where shards and runs are kept.
        model_name: Name of the registered model.
        nodes: Machines of the training job.
        processes_per_node: Processes on each of them.
        steps: Optimizer steps of the whole training.
        learning_rate: Peak learning rate.
        promotion: `auto`, `manual` or `never`.
        trainer_image: Image of the worker pods.
        queue: Kueue LocalQueue that admits the jobs.
        resume_run: The run to go on with, its id or the URI of its folder; empty starts a new one.
        job_id: Kubeflow's id of the pipeline run, out of which a new run gets its id.
        shards: Where the shards are and what they hold.
        metrics: Numbers of samples, shards and bytes.
        summary: The same as text.
        report: Counts, sizes, classes, findings and some samples of the dataset.
        next_step: `train`, or `finish` where a scheduled run has nothing to do.
        config_json: The configuration as an object; wins over `config`, key by key.
        created: When the pipeline run was created; a scheduled one was due at the last time before.

    Returns:
        URI of the run's folder.
    """
    from kftrain.stages.outcome import save
    from kftrain.stages.resolve import Knobs
    from kftrain.stages.shard import shard_from_pipeline

    names: Knobs = {"source": source, "storage_root": storage_root, "model_name": model_name, "promotion": promotion}
    training: Knobs = {"steps": steps, "learning_rate": learning_rate}
    job: Knobs = {"nodes": nodes, "processes_per_node": processes_per_node}
    pods: Knobs = {"trainer_image": trainer_image, "queue": queue}
    knobs = {**names, **training, **job, **pods}
    outcome = shard_from_pipeline(config, knobs, resume_run, job_id, values=config_json, created=created)
    return save(outcome, shards, metrics, html=report, markdown=summary, next_step=next_step)
