"""A person's decision: a version becomes champion, or none, whatever the gate says, with a reason that is kept."""

from __future__ import annotations

import json

from kftrain import config as configuration
from kftrain import registry
from kftrain.errors import ConfigError
from kftrain.progress import Progress, to_log
from kftrain.registry.journal import Declined, Entry
from kftrain.report.markdown import escape
from kftrain.stages import failure, parameters, resolve
from kftrain.stages.outcome import Outcome


def promote_version(
    config: str, model: str, version: int, reason: str, decline: bool = False, progress: Progress = to_log
) -> Outcome:
    """Makes a version champion, or declines it, and keeps the reason. May be repeated. Raises KftrainError.

    Args:
        config: Text or URI of a configuration that names storage root and tracking; a run's `config.yaml` will do.
        model: Name of the registered model; empty: as in the configuration.
        version: Its number.
        reason: Why.
        decline: It is to be no champion.
        progress: Told what has happened.
    """
    with failure.announced("promote", progress):
        if not reason.strip():
            raise ConfigError("a decision by hand needs a reason", where="reason", fix="say why; it is kept")
        content, where = parameters.text_of(config)
        overrides = [f"registry.model_name={json.dumps(model)}"] if model else []
        resolved = resolve.anchored(configuration.parse_kept(content, where, overrides), ".")
        said = registry.decline(resolved, version, reason) if decline else registry.promote(resolved, version, reason)
        result = f"version {said.version} of {resolved.model_name} is {'declined' if decline else 'champion'}"
        progress(f"{result} ({said.reason})")
        summary = {"result": result, "model_name": resolved.model_name, **said.to_dict()}
        return Outcome(run_uri="", summary=summary, markdown=_markdown(result, said))


def _markdown(result: str, said: Entry | Declined) -> str:
    title = f"## Decision by hand: {escape(result)}.\n\n{escape(said.reason)}\n"
    if isinstance(said, Declined):
        return title
    before = "none" if said.previous is None else f"version {said.previous}"
    return f"{title}\nBefore: {before}; entry {said.number}.\n"
