"""Configs of runs that are on the disk."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from jaxrl_dist import flags
from jaxrl_dist.config import Train, env_name


def stored_config(
    run_dir: str | pathlib.Path, algorithm: type | None = None, env: Any = None, torso: Any = None
) -> Train[Any]:
    """The config of a run, with what no file can hold handed over again; arguments as those of ``load_policy``.

    Raises:
      ConfigError: it cannot be read, or something is to be handed over that is not.
    """
    objects = {} if torso is None else {"torso": torso}
    config = flags.read_config(pathlib.Path(run_dir), algorithm, None if env is None else env_name(env), objects)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **objects))
    return config if env is None else dataclasses.replace(config, env=env)
