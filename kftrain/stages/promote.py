"""A person's promotion: a version becomes champion whatever the gate says, with a reason that is kept."""

from __future__ import annotations

import json

from kftrain import config as configuration
from kftrain import registry
from kftrain.errors import ConfigError
from kftrain.progress import Progress, to_log
from kftrain.registry.journal import Entry
from kftrain.report.markdown import escape
from kftrain.stages import failure, parameters, resolve
from kftrain.stages.outcome import Outcome


def promote_version(config: str, model: str, version: int, reason: str, progress: Progress = to_log) -> Outcome:
    """Makes a version champion and enters the reason in the journal. May be repeated. Raises KftrainError.

    Args:
        config: Text or URI of a configuration that names storage root and tracking; a run's `config.yaml` will do.
        model: Name of the registered model; empty: as in the configuration.
        version: Its number.
        reason: Why.
        progress: Told what has happened.
    """
    with failure.announced("promote", progress):
        if not reason.strip():
            raise ConfigError("a promotion by hand needs a reason", where="reason", fix="say why; the journal keeps it")
        content, where = parameters.text_of(config)
        overrides = [f"registry.model_name={json.dumps(model)}"] if model else []
        resolved = resolve.anchored(configuration.parse_kept(content, where, overrides), ".")
        entry = registry.promote(resolved, version, reason)
        result = f"version {entry.version} of {resolved.model_name} is champion"
        progress(f"{result} ({entry.reason})")
        summary = {"result": result, "model_name": resolved.model_name, **entry.to_dict()}
        return Outcome(run_uri="", summary=summary, markdown=_markdown(result, entry))


def _markdown(result: str, entry: Entry) -> str:
    before = "none" if entry.previous is None else f"version {entry.previous}"
    return f"## Promotion: {escape(result)}.\n\n{escape(entry.reason)}\n\nBefore: {before}; entry {entry.number}.\n"
