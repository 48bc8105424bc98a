"""Environments of gymnax, and those in its style, as pure functions over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_dist.envs import env_options
from jaxrl_dist.envs.agents import device
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.base import UNWRAPPED, DeviceEnv, Wrappers
from jaxrl_dist.envs.contract import Contract, of_library
from jaxrl_dist.envs.device import libraries, one_agent
from jaxrl_dist.envs.native import env_label, is_team
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import postponed
from jaxrl_dist.spaces import zeros


def ids() -> list[str]:
    """Returns gymnax's ids, in its order."""
    return list(_library().registered_envs)


def _library() -> Any:
    """Imports gymnax without pandas and SciPy's statistics, which only its pictures need.

    Called only when gymnax is used, so an EnvPool run does not wait for it.
    """
    with postponed("matplotlib.pyplot", "seaborn"):
        import gymnax
    return gymnax


def native(env_id: str, options: Mapping[str, str]) -> tuple[Any, Any]:
    """Makes gymnax's environment object and its parameters.

    Args:
      options: ``--env-options``: fields of the parameters, or arguments of the constructor.

    Raises:
      ConfigError: unknown option.
    """
    gymnax = _library()
    try:
        env, params = gymnax.make(env_id)
    except OSError as error:  # some environments download data in their constructor
        raise ConfigError(f"gymnax:{env_id} cannot be made here: {error}") from error
    arguments = libraries.defaults_of(type(env))
    fields = libraries.fields_of(params)
    values = env_options.parse_options(f"gymnax:{env_id}", options, {**arguments, **fields})
    of_constructor = {name: values.pop(name) for name in arguments.keys() & values}
    env, params = gymnax.make(env_id, **of_constructor)
    return env, params.replace(**values)


def adapt(
    made: Any,
    env_id: str,
    backend: str,
    wrappers: Wrappers = UNWRAPPED,
    contract: Contract | None = None,
) -> DeviceEnv:
    """Adapts an environment of a JAX library or of the user, and traces a first step to check it.

    Args:
      made: what ``native.is_gymnax`` recognises, or a result of ``libraries.make``.
      backend: the library; ``gymnax`` for the user's own.
      contract: what becomes of faults; None: the first raises ``EnvError``.

    Raises:
      ConfigError: no policy here supports the spaces.
      EnvError: a fault, or its code fails in a compiled program.
    """
    env, params = made if isinstance(made, tuple) else (made, None)
    of_user = not of_library(type(env))
    contract = contract or Contract(env_label(backend, env_id))
    with contract.during("a first step"):
        if is_team(env):
            team_fields = {
                name: getattr(env, name)
                for name in ("time_limit", "shows_state")
                if hasattr(env, name)
            }
            env = Team(env, **team_fields)
        if isinstance(env, Team):
            adapted = device.from_team(env, env_id, backend, wrappers, contract)
        else:
            adapted = one_agent.from_env(env, params, env_id, backend, wrappers, contract)
        if of_user:  # libraries work for several environments at once
            _trace(adapted)
    return adapted


def _trace(env: DeviceEnv) -> None:
    """Traces a step of two environments with all wrappers, without compiling it."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2 * env.spec.num_agents))
    action = {
        name: zeros(spec.action, 2 * spec.num_agents) for name, spec in env.spec.by_policy.items()
    }
    jax.eval_shape(
        lambda keys, action: env.step(env.reset(keys)[0], action, keys), keys, env.spec.bare(action)
    )
