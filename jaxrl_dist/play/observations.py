"""The observations that a caller gives to a policy: what is wrong with them,
and their form for networks.
"""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.spaces import Part, Space
from jaxrl_dist.types import EnvSpec, PyTree


def checked(obs: PyTree, spec: EnvSpec, hidden: Collection[str]) -> tuple[PyTree, int]:
    """Returns the observations as policies see them, and the batch size B.

    Args:
      obs: ``[B, ...]`` as the environment returns them.
      hidden: names of the parts that only the critic sees; missing ones become 0.

    Raises:
      ValueError: they are no batch of the environment's observations.
    """
    space = spec.observation
    obs = spaces.untupled(obs, spec.tuples, "observation")
    if isinstance(space, dict):
        obs = _all_parts(obs, space, hidden)
    else:
        _check_array(obs)
    given = spaces.leaves(obs)
    wanted = spaces.leaves(space)
    if unlike := sorted(given.keys() ^ wanted.keys()):
        raise ValueError(f"observations have the parts {', '.join(wanted)}; {unlike[0]} differs")
    values = {path: _batch(path, part, given[path]) for path, part in wanted.items()}
    *_, last = values.values()
    return spaces.nested(space, values), last.shape[0]


def _all_parts(obs: PyTree, space: dict[str, Space], hidden: Collection[str]) -> dict[str, PyTree]:
    """Returns the observations with all parts of ``space``.

    Raises:
      ValueError: a part that is not hidden is missing, or there are more.
    """
    given = obs if isinstance(obs, dict) else {}
    seen = [name for name in space if name not in hidden]
    if missing := [name for name in seen if name not in given]:
        raise ValueError(
            f"observations are dicts here, with {', '.join(seen)}; {missing[0]} is missing"
        )
    if extra := [str(name) for name in given if name not in space]:
        raise ValueError(
            f"observations have no part {extra[0]} here; their parts are {', '.join(space)}"
        )
    size = (*np.shape(jax.tree.leaves(given)[0]), 1)[0]
    blank = {name: _blank(space[name], size) for name in space if name not in given}
    return {**given, **blank}


def _blank(space: Space, num_envs: int) -> PyTree:
    """Returns zeros ``[num_envs, ...]``; in an export, ``num_envs`` is symbolic."""
    return jax.tree.map(lambda part: jnp.zeros((num_envs, *part.native_shape), part.dtype), space)


def _check_array(obs: PyTree) -> None:
    if isinstance(obs, dict):
        raise ValueError("observations are arrays here, not a dict")
    if isinstance(obs, tuple) and any(isinstance(part, dict) for part in obs):
        raise ValueError("observations are arrays here, not (obs, info), as reset returns them")


def _batch(path: str, part: Part, value: PyTree) -> jax.Array | np.ndarray:
    """Returns a part of the observations as policies see it.

    Raises:
      ValueError: it has another type or shape, or values that the environment does not have.
    """
    name = f"observations {path}".rstrip()
    if not isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(part.dtype, jnp.floating):
        raise ValueError(f"{name} are {part.dtype} here, not {value.dtype}")
    one = part.native_shape
    wanted = ", ".join(map(str, ("B", *one)))
    if value.shape == one and path:
        raise ValueError(
            f"{name} have shape [{wanted}] here, not {list(one)}; "
            "jax.tree.map(lambda x: x[None], obs) makes one observation a batch"
        )
    if value.shape == one:
        raise ValueError(
            f"{name} have shape [{wanted}] here, not {list(one)}; "
            "obs[None] makes one observation a batch"
        )
    if value.shape[1:] != one or not value.shape[0]:
        raise ValueError(f"{name} have shape [{wanted}] here, not {list(value.shape)}")
    counted = spaces.counted(part, value)
    if isinstance(value, np.ndarray) and not spaces.holds(part, counted):
        raise ValueError(f"{name} hold values that the environment's do not")
    return counted
