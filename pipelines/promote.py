"""One step for people in the Kubeflow UI: a version becomes champion, or is declined, with a reason."""

from kfp import dsl

from kftrain.components.promote import promote
from kftrain.pipelines.train import PIPELINE_CONFIG, prepare


@dsl.pipeline(
    name="kftrain-promote",
    description="Makes a version of a registered model champion, or declines it, whatever the gate says.",
    pipeline_config=PIPELINE_CONFIG,
)
def promote_pipeline(version: int, reason: str, config: str, model: str = "", decline: bool = False) -> None:
    """One step.

    Args:
        version: Number of the version.
        reason: Why; it goes to the journal of promotions.
        config: The configuration, or the URI of one: `config.yaml` in the folder of any run of the model will do.
        model: Name of the registered model; empty: as in the configuration.
        decline: It is to be no champion.
    """
    step = promote(model=model, version=version, reason=reason, config=config, decline=decline)
    prepare(step, cpu="500m", memory="1Gi")
