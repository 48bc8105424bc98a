"""Exact truth of small environments: tables of them, their optimal values,
and how far a policy is from these.

A table comes from an environment whose states can be listed, ``table("FourRooms-misc")``, from
Gymnasium's ``P``, or from arrays, ``Table.of_arrays``; ``optimal``, ``values``, ``visits`` and
``episode_return`` solve it, and ``measure(policy)`` compares a policy with its truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_dist.envs import source
from jaxrl_dist.exact.environment import TableEnv
from jaxrl_dist.exact.listing import of_source
from jaxrl_dist.exact.measuring import Measured
from jaxrl_dist.exact.measuring import of_policy as measure
from jaxrl_dist.exact.solve import (
    action_values,
    backup,
    episode_return,
    greedy,
    log_softmax,
    optimal,
    start_value,
    state_values,
    values,
    visits,
)
from jaxrl_dist.exact.table import Table

__all__ = [
    "Measured",
    "Table",
    "TableEnv",
    "action_values",
    "backup",
    "episode_return",
    "greedy",
    "log_softmax",
    "measure",
    "optimal",
    "start_value",
    "state_values",
    "table",
    "values",
    "visits",
]


def table(env: Any, options: Mapping[str, str] = {}, **limits: int) -> Table:
    """Returns the table of an environment.

    Args:
      env: as in ``Train``: a name, or an environment object.
      options: as ``Train.env_options``.
      limits: ``max_states``, ``tries``, ``starts`` and ``seed``, as for ``listing.table_of``.

    Raises:
      ConfigError: it has no table, or the environment cannot be found.
    """
    return of_source(source.find(env, options), **limits)
