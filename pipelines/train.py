"""Raw data to a promoted model: shard -> train -> evaluate -> register, and finish whatever happens.

The graph is flat because on a cluster every step costs about 20 s and every condition or loop 10 s more. There is one
condition: what a scheduled run that has nothing to do leaves out.
Nothing is retried by KFP (a stock installation would not) and nothing is cached by it: each step decides by
digests what is already done.
"""

from typing import Any

from kfp import dsl, kubernetes

from kftrain.components.evaluate import evaluate
from kftrain.components.finish import finish
from kftrain.components.images import LAUNCHER_CPU, LAUNCHER_MEMORY, NAMED_STEPS_IMAGE, STEPS_IMAGE_VARIABLE
from kftrain.components.register import register
from kftrain.components.shard import shard
from kftrain.components.train import train

DAY_SECONDS = 24 * 60 * 60

PIPELINE_CONFIG = dsl.PipelineConfig(
    # All three: a stock installation has defaults for the specific ones, and those win over the general one.
    ttl_seconds_after_finished=7 * DAY_SECONDS,
    ttl_seconds_after_success=DAY_SECONDS,
    ttl_seconds_after_failure=7 * DAY_SECONDS,
    # The only limit that also ends a pod which never gets a node or an image.
    active_deadline_seconds=30 * DAY_SECONDS,
)

SECRETS = {
    "kftrain-storage": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
    ),
    "kftrain-mlflow": (
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
    ),
}
"""Optional Kubernetes secrets and the keys in them, which become environment variables of the same names."""

ALERT_SECRET, ALERT_KEY = "kftrain-alert", "KFTRAIN_ALERT_URL"
"""Optional, too, and for the step alone that alerts: whoever has the URL can write there."""

USER_ID = 1000
"""The image's user; a namespace under the restricted Pod Security standard admits no step without it."""


def prepare(task: dsl.PipelineTask, cpu: str, memory: str) -> dsl.PipelineTask:
    """What every step has: live logs, no cache, a user that is not root, credentials, requests."""
    task.set_env_variable("PYTHONUNBUFFERED", "1")
    if NAMED_STEPS_IMAGE:  # who goes on with the run must name it again
        task.set_env_variable(STEPS_IMAGE_VARIABLE, NAMED_STEPS_IMAGE)
    task.set_caching_options(False)
    task.set_cpu_request(cpu).set_memory_request(memory)
    kubernetes.set_security_context(task, run_as_user=USER_ID, run_as_non_root=True)
    for secret, keys in SECRETS.items():
        kubernetes.use_secret_as_env(task, secret, {key: key for key in keys}, optional=True)
    return task


def _train_and_register(run_uri: Any) -> None:
    """The steps after the first one; each gets the run's URI from the one before."""
    train_task = train(run_uri=run_uri)
    prepare(train_task, LAUNCHER_CPU, LAUNCHER_MEMORY)
    evaluate_task = evaluate(run_uri=train_task.outputs["Output"])
    prepare(evaluate_task, LAUNCHER_CPU, LAUNCHER_MEMORY)
    register_task = register(run_uri=evaluate_task.outputs["Output"])
    prepare(register_task, cpu="500m", memory="1Gi")


@dsl.pipeline(
    name="kftrain-train",
    description="Shards a dataset, trains a model on it, evaluates, registers and promotes it.",
    pipeline_config=PIPELINE_CONFIG,
)
def train_pipeline(
    config: str = "",
    config_json: dict[str, Any] = {},
    source: str = "",
    storage_root: str = "",
    model_name: str = "",
    nodes: int = 0,
    processes_per_node: int = 0,
    steps: int = 0,
    learning_rate: float = 0.0,
    promotion: str = "",
    trainer_image: str = "",
    queue: str = "",
    resume_run: str = "",
) -> None:
    """Trains a model from raw data; a parameter that is '' or 0 leaves what the configuration says.

    Args:
        config: The configuration, a YAML text or the URI of one; empty: the defaults, or that of the run to resume.
        config_json: The same as an object, for the editor of the run form; wins over `config`, key by key.
        source: Where samples come from.
        storage_root: Folder or object store URI below which shards and runs are kept.
        model_name: Name of the registered model.
        nodes: Machines of the training job.
        processes_per_node: Processes on each of them.
        steps: Optimizer steps of the whole training.
        learning_rate: Peak learning rate.
        promotion: `auto`, `manual` or `never`.
        trainer_image: Image of the worker pods.
        queue: Kueue LocalQueue that admits the jobs.
        resume_run: The run to go on with, its id or the URI of its folder; empty starts a new one.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    finish_task = finish(
        config=config, config_json=config_json, storage_root=storage_root, resume_run=resume_run, job_id=job_id
    )
    prepare(finish_task, cpu="100m", memory="512Mi").set_display_name("finish")
    kubernetes.use_secret_as_env(finish_task, ALERT_SECRET, {ALERT_KEY: ALERT_KEY}, optional=True)

    with dsl.ExitHandler(finish_task, name="run"):
        shard_task = shard(
            config=config,
            config_json=config_json,
            source=source,
            storage_root=storage_root,
            model_name=model_name,
            nodes=nodes,
            processes_per_node=processes_per_node,
            steps=steps,
            learning_rate=learning_rate,
            promotion=promotion,
            trainer_image=trainer_image,
            queue=queue,
            resume_run=resume_run,
            job_id=job_id,
            created=dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
        )
        prepare(shard_task, cpu="1", memory="2Gi")
        with dsl.If(shard_task.outputs["next_step"] != "finish", name="something-to-do"):
            _train_and_register(shard_task.outputs["Output"])
