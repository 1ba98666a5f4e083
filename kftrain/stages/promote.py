"""Carries out a person's decision: a version becomes champion or is declined, whatever the gate says, with a reason."""

from __future__ import annotations

import json

from kftrain import config as configuration
from kftrain import registry
from kftrain.core.progress import Progress, to_log
from kftrain.errors import ConfigError
from kftrain.kubeflow import parameters
from kftrain.registry.journal import Declined, Entry
from kftrain.reports.markdown import escape
from kftrain.stages import failure, resolve
from kftrain.stages.outcome import Outcome


def promote_version(
    config: str, model: str, version: int, reason: str, decline: bool = False, progress: Progress = to_log
) -> Outcome:
    """Make a version champion, or decline it, and keep the reason. May be repeated. Raises KftrainError.

    Args:
        config: Text or URI of a configuration that names storage root and tracking; a run's `config.yaml` will do.
        model: Name of the registered model; empty: as in the configuration.
        version: Its number.
        reason: The person's reason; must not be empty.
        decline: True to decline the version instead of promoting it.
        progress: Takes a line at a time.
    """
    with failure.announce_failure("promote", progress):
        if not reason.strip():
            raise ConfigError("a decision by hand needs a reason", where="reason", fix="say why; it is kept")
        content, where = parameters.read_config_parameter(config)
        overrides = [f"registry.model_name={json.dumps(model)}"] if model else []
        resolved = resolve.anchor_paths(configuration.parse_kept(content, where, overrides), ".")
        decision = (
            registry.decline(resolved, version, reason) if decline else registry.promote(resolved, version, reason)
        )
        result = f"version {decision.version} of {resolved.model_name} is {'declined' if decline else 'champion'}"
        progress(f"{result} ({decision.reason})")
        summary = {"result": result, "model_name": resolved.model_name, **decision.to_dict()}
        return Outcome(run_uri="", summary=summary, markdown=_format_markdown(result, decision))


def _format_markdown(result: str, decision: Entry | Declined) -> str:
    title = f"## Decision by hand: {escape(result)}.\n\n{escape(decision.reason)}\n"
    if isinstance(decision, Declined):
        return title
    before = "none" if decision.previous is None else f"version {decision.previous}"
    return f"{title}\nBefore: {before}; entry {decision.number}.\n"
