"""Step 3: measures the trained model, and the champion where it has no figures on the same data."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, ClassificationMetrics, Markdown, Metrics, Output

from kftrain.components.images import STEPS_IMAGE
from kftrain.components.workers import FOR_WORKERS


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False, task_config_passthroughs=FOR_WORKERS)
def evaluate(
    run_uri: str,
    task_config: dsl.TaskConfig,
    evaluation: Output[Artifact],
    metrics: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    report: Output[HTML],
    summary: Output[Markdown],
) -> str:
    """Evaluates the model of a run.

    Args:
        run_uri: The run's folder.
        task_config: Pod settings of this task, which go to the job's workers.
        evaluation: Every metric with its confidence interval, beside its baselines.
        metrics: The metrics as plain numbers.
        confusion: Counts of true against predicted classes; without classes its text says so.
        report: The same as a page.
        summary: The same as text.

    Returns:
        URI of the run's folder.
    """
    from kftrain.stages.evaluate import evaluate as evaluate_stage
    from kftrain.stages.outcome import save

    return save(evaluate_stage(run_uri, task_config=task_config), evaluation, metrics, report, summary, confusion)
