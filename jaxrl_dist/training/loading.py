"""Loads a policy from a run directory: an algorithm and its trained variables."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import checkpoint
from jaxrl_dist.run.directories import check_run_dir
from jaxrl_dist.settings.fixed_policies import Copy
from jaxrl_dist.settings.policies import Policies, alone
from jaxrl_dist.settings.stored import stored_config
from jaxrl_dist.training.setup import make_algorithm, variable_shapes
from jaxrl_dist.types import Algorithm, EnvSpec, Variables


def load_acting(run_dir: str, policy: str | None, spec: EnvSpec) -> tuple[Algorithm, Variables]:
    """Returns the algorithm of a finished run, or of one of its policies, and its variables as numpy arrays.

    Args:
      policy: the policy's name; None if the run has only one.
      spec: the policy's observations and actions.

    Raises:
      ConfigError: there is no such run or policy, it has other spaces, or its files are damaged.
    """
    config = acting_config(run_dir, policy, f"{spec.backend}:{spec.id}")
    algorithm: Algorithm = make_algorithm(config, spec)
    return algorithm, checkpoint.load_variables(run_dir, variable_shapes(algorithm), policy)


def acting_config(run_dir: str, policy: str | None, env: Any) -> Train[Any]:
    """Returns the config of a finished run, or of one of its policies, with another environment.

    Raises:
      ConfigError: there is no such run or policy, or its files are damaged.
    """
    check_run_dir(pathlib.Path(run_dir))
    return of_policy(stored_config(run_dir, env=env), policy, run_dir)


def of_policy(config: Train[Any], policy: str | None, run_dir: Any) -> Train[Any]:
    """Returns the config of the policy that the user has named in a run.

    Raises:
      ConfigError: the run has no such policy, or has several, and none is named.
    """
    known = list(config.algorithm.parts) if isinstance(config.algorithm, Policies) else []
    if policy is None and not known:
        return config
    if policy not in known:
        there = f"it has the policies {', '.join(known)}" if known else "it has one policy, which needs no name"
        raise ConfigError(f"{run_dir}: {'which policy?' if policy is None else f'no policy {policy}'}; {there}")
    kind = config.algorithm.parts[str(policy)].algorithm
    if isinstance(kind, Copy) and kind.size > 1:
        raise ConfigError(f"{run_dir}: {policy} is a pool of copies of {kind.policy}; {kind.policy} can be loaded")
    return alone(config, kind.policy if isinstance(kind, Copy) else str(policy))
