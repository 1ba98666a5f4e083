"""The exit handler: cleans up, and explains a failure, whatever happened to the other steps."""

from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Artifact, Markdown, Output

from kftrain.components.images import STEPS_IMAGE


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False)
def finish(
    config: str,
    storage_root: str,
    resume_run: str,
    job_id: str,
    status: dsl.PipelineTaskFinalStatus,
    outcome: Output[Artifact],
    report: Output[HTML],
    summary: Output[Markdown],
    config_json: dict[str, Any] = {},
) -> None:
    """Cleans up after a run and writes why it failed, if it did.

    Args:
        config: The configuration, a YAML text or the URI of one.
        storage_root: The pipeline's parameter; wins over the configuration unless ''.
        resume_run: The run that was resumed, its id or the URI of its folder; empty for a new one.
        job_id: Kubeflow's id of the pipeline run.
        status: How the other steps ended, filled in by Kubeflow.
        outcome: Whether the run succeeded, and why not.
        report: The failure as a page, or what was cleaned up.
        summary: The same as text.
        config_json: The configuration as an object; wins over `config`, key by key.
    """
    from kftrain.stages.finish import finish as finish_stage
    from kftrain.stages.outcome import save

    save(
        finish_stage(config, storage_root, resume_run, job_id, status.state, values=config_json),
        outcome,
        html=report,
        markdown=summary,
    )
