"""The configuration in a run's folder: kept when the run is opened and when a job is started, and read from there.

`config.yaml` is what the run was opened with last. `configs/<digest>.yaml` is what one job was started for: whoever
opens the run meanwhile, with other launch settings, must not change what workers find that are started again.
"""

from __future__ import annotations

from kftrain import config as configuration
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.run.best_effort import retryable
from kftrain.run.paths import RunPaths
from kftrain.trust import permit


def is_opened(paths: RunPaths) -> bool:
    """Tell whether somebody has opened the run: its folder holds a configuration."""
    return storage.exists(paths.config)


def keep_config(paths: RunPaths, config: Config, before: Config | None = None) -> None:
    """Make it the run's configuration. `before`: the one whose place it takes, kept for `restore_config`."""
    if before is not None and before != config:  # kept first: a process that dies between both loses neither
        storage.publish(paths.config_before(config.digest()), before.to_yaml())
    storage.publish(paths.config, config.to_yaml())


def restore_config(paths: RunPaths, config: Config) -> bool:
    """Put back what the run had before this configuration, which was refused; False where that is not known."""
    before = _read_if_exists(paths.config_before(config.digest()))
    if before is not None:
        storage.publish(paths.config, before.to_yaml())
    return before is not None


def keep_job_config(paths: RunPaths, config: Config) -> None:
    """Keep the configuration that a job is started for, under its digest, for the job's workers."""
    storage.publish(paths.job_config(config.digest()), config.to_yaml())


def read_config(paths: RunPaths) -> Config:
    """Read the run's configuration. Raises ConfigError, and RetryableError where it cannot be read now."""
    config = _read_if_exists(paths.config)
    if config is None:
        raise _build_no_run_error(paths)
    return config


def read_job_config(paths: RunPaths, digest: str) -> Config:
    """Read the configuration with this digest, for which the job was started.

    A worker that somebody has started by hand takes the run's own. Raises ConfigError where that is another one, and
    RetryableError where it cannot be read now.
    """
    for uri in (paths.job_config(digest), paths.config):
        config = _read_if_exists(uri)
        if config is not None and config.digest() != digest:
            raise ConfigError(
                "config.yaml is not the one this job was started for",
                where=uri,
                value=config.digest()[:16],
                fix="the job needs the same version of kftrain as its launcher",
            )
        if config is not None:
            return permit(config)
    raise _build_no_run_error(paths)


def _read_if_exists(uri: str) -> Config | None:
    """Read the configuration at `uri`; None where there is none."""
    with retryable("the run cannot be read", uri):
        try:
            text = storage.read_text(uri)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(f"damaged: {error}", where=uri) from error
    return configuration.parse_kept(text, uri)


def _build_no_run_error(paths: RunPaths) -> ConfigError:
    return ConfigError("not a run: it has no config.yaml", where=paths.uri, fix="check the run's URI")
