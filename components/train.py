"""Step 2: trains until the run is complete; a run that already is costs nothing."""

from kfp import dsl
from kfp.dsl import HTML, Markdown, Metrics, Model, Output

from kftrain.components.images import STEPS_IMAGE
from kftrain.components.workers import FOR_WORKERS


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False, task_config_passthroughs=FOR_WORKERS)
def train(
    run_uri: str,
    task_config: dsl.TaskConfig,
    completion: Output[Model],
    metrics: Output[Metrics],
    report: Output[HTML],
    summary: Output[Markdown],
) -> str:
    """Trains the model of a run.

    Args:
        run_uri: The run's folder.
        task_config: Pod settings of this task, which go to the job's workers.
        completion: Where the checkpoint and the exported model are, with their digests.
        metrics: Last loss, speed, number of parameters.
        report: The training curve as a page.
        summary: The same as text.

    Returns:
        URI of the run's folder.
    """
    from kftrain.stages.outcome import save
    from kftrain.stages.train import train as train_stage

    return save(train_stage(run_uri, task_config=task_config), completion, metrics, report, summary)
