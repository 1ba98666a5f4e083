"""Makes a version champion, or declines it, because a person wants it."""

from kfp import dsl
from kfp.dsl import Artifact, Markdown, Output

from kftrain.components.images import STEPS_IMAGE


@dsl.component(base_image=STEPS_IMAGE, install_kfp_package=False)
def promote(
    model: str,
    version: int,
    reason: str,
    config: str,
    decline: bool,
    promotion: Output[Artifact],
    summary: Output[Markdown],
) -> str:
    """Makes a version of a registered model champion, or declines it, whatever the gate says.

    Args:
        model: Name of the registered model; empty: as in the configuration.
        version: Its number.
        reason: Why; it goes to the journal of promotions.
        config: The configuration, or the URI of one: a run's `config.yaml` will do.
        decline: It is to be no champion.
        promotion: What was decided, as it is kept.
        summary: The same as text.

    Returns:
        Nothing: an empty text.
    """
    from kftrain.stages.outcome import save
    from kftrain.stages.promote import promote_version

    return save(promote_version(config, model, version, reason, decline), promotion, markdown=summary)
