"""Step 4: registers the model and decides whether it becomes the champion."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Markdown, Metrics, Output

from kftrain.components.images import STEPS_IMAGE


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False)
def register(
    run_uri: str,
    registration: Output[Artifact],
    metrics: Output[Metrics],
    report: Output[HTML],
    summary: Output[Markdown],
    comparison: Output[HTML],
) -> str:
    """Registers the model of a run and promotes it by policy.

    Args:
        run_uri: The run's folder.
        registration: The registered version and what the gate decided.
        metrics: The compared metric of challenger and champion, and the improvement.
        report: The report of the whole run as a page.
        summary: The same as text.
        comparison: The champion and the newest versions beside each other, as a page.

    Returns:
        URI of the run's folder.
    """
    from kftrain.stages.outcome import save
    from kftrain.stages.register import register as register_stage

    return save(register_stage(run_uri), registration, metrics, report, summary, comparison=comparison)
