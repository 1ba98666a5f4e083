"""Records in MLflow, beside every metric of a version, the champion's on the same data, and the difference.

Versions of a schedule are measured each on a window of its own, so their figures alone do not compare.
"""

from __future__ import annotations

from math import isfinite

from kftrain.config import Config
from kftrain.registry import judgement
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.comparison import RESAMPLING_SEED, MeasuredExport
from kftrain.registry.judgement import Challenger
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import Metrics
from kftrain.tracking import client, runs

REFERENCE_PREFIX = "reference_"


def record_comparison(
    config: Config, alias: ChampionAlias, challenger: Challenger, rival: int | None, metrics: Metrics
) -> None:
    """Record the comparison with a rival, on the run's data and on the reference set. May be repeated.

    The points go to the run, and to its LoggedModel unless the version is another run's.
    """
    uri, registered, tags = alias.uri, challenger.registered, dict[str, str]()
    model_id = None if registered.identical else registered.logged_model_id
    for prefix, own in (("", challenger.measured), (REFERENCE_PREFIX, challenger.on_reference)):
        if own is not None:
            digest = tags[f"kftrain.{prefix}evaluation_digest"] = own.evaluation.evaluation_digest
            theirs = judgement.measured_version(alias, alias.journal.entries(), rival, digest)
            values = {f"{prefix}{name}": value for name, value in _collect(config, metrics, own, theirs).items()}
            points = runs.evaluation_points(uri, registered.mlflow_run_id, values)
            dataset = "reference" if prefix else runs.dataset_name(uri, registered.mlflow_run_id)
            client.log_points(uri, registered.mlflow_run_id, points, model_id, (dataset, own.evaluation.dataset_digest))
    client.set_tags(uri, registered.mlflow_run_id, tags)


def _collect(config: Config, metrics: Metrics, own: MeasuredExport, theirs: MeasuredExport | None) -> dict[str, float]:
    """Return name -> value of the metrics, and of the champion's and the differences if there is an evaluation of it.

    What is not finite is left out: MLflow stores NaN as 0.
    """
    figures = {name: interval.value for name, interval in own.evaluation.metrics.items()}
    if theirs is not None:
        resampling = (config.evaluate.num_bootstrap, config.registry.confidence, RESAMPLING_SEED)
        pair = bootstrap.paired_differences(metrics, own.statistics, theirs.statistics, {}, *resampling)[0]
        for name in pair.keys() & theirs.evaluation.metrics.keys():
            bounds = {"": pair[name].value, "_low": pair[name].low, "_high": pair[name].high}
            figures[f"{name}.champion"] = theirs.evaluation.metrics[name].value
            figures |= {f"{name}.difference{bound}": value for bound, value in bounds.items()}
    return {name: value for name, value in figures.items() if isfinite(value)}
