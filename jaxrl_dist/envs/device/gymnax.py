"""gymnax environments as pure functions over a batch, with next-step autoreset."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng, spaces
from jaxrl_dist.envs import base, episodes, masks
from jaxrl_dist.envs.agents import device
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.base import UNWRAPPED, DeviceEnv, Wrappers
from jaxrl_dist.envs.contract import Contract, of_env, of_library
from jaxrl_dist.envs.device import libraries
from jaxrl_dist.envs.drawing import draw, own_render
from jaxrl_dist.envs.native import env_label, family_of, is_team, plain, render_fps, tuples, unnamed
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import postponed
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.protocols import Environment
from jaxrl_dist.simulator import Simulated, Simulator
from jaxrl_dist.spaces import zeros
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep


class State(NamedTuple):
    """A batch of environments; every leaf is ``[B, ...]``."""

    env: PyTree
    obs: PyTree
    ended: jax.Array
    """Bool: the next step is a reset."""
    episode_return: jax.Array
    """Float32."""
    episode_length: jax.Array
    """Int32."""
    info: PyTree
    """Float32, keyed by metric of the info; see ``episodes.advanced``."""


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
    values = base.parse_options(f"gymnax:{env_id}", options, {**arguments, **fields})
    env, params = gymnax.make(env_id, **{k: v for k, v in values.items() if k in arguments})
    return env, params.replace(
        **{k: v for k, v in values.items() if k in fields and k not in arguments}
    )


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
    if isinstance(made, tuple):
        env, params = made
    else:
        env = made
        params = None
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
            adapted = _one_agent(env, params, env_id, backend, wrappers, contract)
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


def _one_agent(
    env: Environment,
    params: PyTree,
    env_id: str,
    backend: str,
    wrappers: Wrappers,
    contract: Contract,
) -> DeviceEnv:
    """Wraps a gymnax-style environment object.

    gymnax's own ``step`` resets in the same step and hides the last observation; here the reset
    takes the next step. Frames are stacked elsewhere. Arguments and errors are those of ``adapt``.
    """
    name = contract.name
    params, (native_obs, native_action), action_space, *first, info = of_env(contract, env, params)
    observation = base.policy_space(native_obs, name, "observations", first[0])
    native_mask = masks.of_gymnax(env, first[1], info, plain(native_obs), plain(native_action))
    observation, mask = masks.with_mask(observation, action_space, native_mask)
    observe = masks.observer(native_mask, native_obs)
    limit = getattr(params, "max_steps_in_episode", None)
    limit = wrappers.limit(None if limit is None else int(limit))
    metrics = episodes.parse(wrappers.info_metrics)
    episodes.check_known(metrics, episodes.numbers(info), name)
    if isinstance(env, libraries.Adapted):
        family = env.family
    else:
        family = family_of(env, "other")
    side_to_move = getattr(env, "side_to_move", None)
    spec = EnvSpec(
        env_id, backend, family, observation, action_space, limit, mask=mask, unread_mask=native_mask.unread,
        info_metrics=metrics, fps=_fps(env, params, family, wrappers.action_repeat),
        both_sides=side_to_move is not None, tuples=tuples(plain(native_obs), plain(native_action), native_mask),
    )  # fmt: skip

    def reported(info: PyTree) -> dict[str, jax.Array]:
        known = episodes.numbers(info) if metrics else {}
        return {
            metric: jnp.float32(known[episodes.field(metric)]).reshape(()) for metric in metrics
        }

    def reset_all(keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = jax.vmap(env.reset_env, (0, None))(keys, params)
        obs = jax.vmap(observe)(obs, state)
        # Some environments start from Python numbers:
        # give every leaf a dtype and a row per environment.
        return obs, jax.tree.map(lambda x: jnp.broadcast_to(x, jnp.shape(x) or keys.shape), state)

    def nothing(like: jax.Array) -> dict[str, jax.Array]:
        return {metric: jnp.full_like(like, jnp.nan) for metric in metrics}

    def reset(keys: jax.Array) -> tuple[State, PyTree]:
        obs, state = reset_all(keys)
        none = jnp.zeros(keys.shape, jnp.float32)
        return State(state, obs, none > 0, none, none.astype(jnp.int32), nothing(none)), obs

    def step_once(key: jax.Array, env_state: PyTree, action: PyTree) -> tuple[PyTree, ...]:
        *stepped, reward, terminated, info = env.step_env(
            key, env_state, unnamed(native_action, action), params
        )
        # The contract allows for dtypes that those of a reset can hold.
        obs, env_state = jax.tree.map(
            lambda x, like: jnp.asarray(x).astype(like.dtype), stepped, first
        )
        over = terminated, env.is_truncated(env_state, params)
        return observe(obs, env_state), env_state, jnp.float32(reward), *over, reported(info)

    def step_one(
        key: jax.Array, env_state: PyTree, action: PyTree, *, limited: bool = True
    ) -> tuple[PyTree, ...]:
        action = spaces.clipped(action_space, action)
        if wrappers.action_repeat == 1:
            return step_once(key, env_state, action)
        keys = jax.random.split(key, wrappers.action_repeat)

        def again(now: tuple[PyTree, ...], key: jax.Array) -> tuple[tuple[PyTree, ...], None]:
            _, state, reward, terminated, truncated, info = now
            obs, state, more, *flags, news = step_once(key, state, action)
            # the episode has ended: keep its outcome
            if limited:
                over = terminated | truncated
            else:
                over = terminated
            new = obs, state, reward + more, *flags, episodes.advanced(info, news)
            return jax.tree.map(lambda x, y: jnp.where(over, x, y), now, new), None

        first = jax.tree.map(jnp.asarray, step_once(keys[0], env_state, action))
        return jax.lax.scan(again, first, keys[1:])[0]

    def step(state: State, action: PyTree, keys: jax.Array) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys)
        outcomes = jax.vmap(step_one)(keys[:, 0], state.env, action)
        next_obs, next_env, reward, terminated, truncated, info = outcomes

        def started(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
            return base.rows_where(ended, reset_all(keys), stepped)

        obs, env_state = base.restarted(started, keys[:, 1], state.ended, (next_obs, next_env))
        truncated = wrappers.cut(truncated, state.episode_length + 1)
        valid, terminated, truncated = base.outcome(state.ended, terminated, truncated)
        reward = jnp.where(valid, reward, 0.0)
        episode_return = jnp.where(valid, state.episode_return + reward, 0.0)
        episode_length = jnp.where(valid, state.episode_length + 1, 0)
        info = base.rows_where(valid, episodes.advanced(state.info, info), nothing(reward))
        ended = terminated | truncated
        statistics = episodes.ended_episodes(ended, episode_return, episode_length, info)
        new_state = State(env_state, obs, ended, episode_return, episode_length, info)
        return new_state, Timestep(obs, reward, terminated, truncated, valid), statistics

    def discount(state: PyTree, new: PyTree, over: jax.Array) -> jax.Array:
        turns = side_to_move is not None and side_to_move(state) != side_to_move(new)
        return jnp.where(over, 0.0, jnp.where(turns, -1.0, 1.0))

    def simulated(state: PyTree, action: PyTree, key: jax.Array) -> Simulated:
        obs, new, reward, terminated, *_ = step_one(key, state, action, limited=False)
        return Simulated(new, obs, reward, discount(state, new, terminated))

    simulate = jax.tree_util.Partial(simulated)

    named: Any = env  # its methods ``outcomes`` and ``starts`` are optional

    def outcomes(state: PyTree, action: PyTree) -> tuple[jax.Array, Simulated]:
        given = named.outcomes(state, unnamed(native_action, action), params)
        probability, obs, new, reward, over = _parts(
            given, "outcomes", "probability, obs, state, reward, terminated"
        )
        obs, new = jax.tree.map(
            lambda x, like: jnp.asarray(x).astype(like.dtype), (obs, new), tuple(first)
        )
        going = jax.vmap(discount, (None, 0, 0))(state, new, jnp.asarray(over))
        return probability, Simulated(new, jax.vmap(observe)(obs, new), jnp.float32(reward), going)

    def starts() -> tuple[jax.Array, PyTree, PyTree]:
        probability, obs, state = _parts(named.starts(params), "starts", "probability, obs, state")
        return probability, state, jax.vmap(observe)(obs, state)

    return DeviceEnv(
        spec, reset, step, own_render(env, params), lambda state: Simulator(state.env, simulate),
        outcomes if hasattr(env, "outcomes") and wrappers.action_repeat == 1 else None,
        starts if hasattr(env, "starts") else None,
    )  # fmt: skip


def _parts(given: Any, method: str, names: str) -> tuple[Any, ...]:
    """Returns the parts that an environment's optional method has returned.

    Raises:
      ConfigError: it has returned others.
    """
    if not isinstance(given, tuple) or len(given) != names.count(",") + 1:
        raise ConfigError(f"{method} of an environment returns ({names})")
    return given


def _fps(env: Any, params: Any, family: str, action_repeat: int) -> float | None:
    """Returns ``EnvSpec.fps``: the environment's ``render_fps``,
    or by the seconds of a step of classic control.
    """
    fields = ("tau", "dt") if family == "classic_control" else ()
    seconds = next(
        (float(getattr(params, field)) for field in fields if hasattr(params, field)), 0.0
    )
    fps = render_fps(env) or (1 / seconds if seconds > 0 else None)
    return fps and fps / action_repeat


class HostGymnax:
    """gymnax environments stepped from the host, with one jitted call per step: a ``HostEnv``.

    It uses the keys of the compiled rollout, so both give the same experience for the same actions.
    """

    def __init__(self, env: DeviceEnv, num_envs: int, key: jax.Array, first: int = 0) -> None:
        """Compiles the programs; the states stay on JAX's default device.

        Args:
          key: the key of the environment stream; for several runs side by side, an array of keys.
          first: the index of the first environment within the run.
        """
        self.spec = env.spec
        self.num_envs = num_envs
        self._draw = env.render
        self._steps = self._resets = 0
        self._key = key
        self._first = np.int32(first)
        self._reset, self._step = _programs(env.reset, env.step, num_envs)

    def reset(self) -> PyTree:
        self._state, obs = self._reset(self._key, self._first, rng.rollout_step(self._resets))
        self._resets += 1
        obs = jax.tree.map(np.array, obs)
        base.check_finite(self.spec, self._steps, "observation", obs)
        return obs

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        action = base.checked_action(self.spec, action, self._steps)
        self._state, *outputs = self._step(
            self._state, action, self._key, self._first, np.uint32(self._steps)
        )
        step, ended = jax.tree.map(np.array, outputs)
        values = over_policies(lambda step: (step.obs, step.reward), 2)(self.spec.keyed(step))
        for field, value in zip(("observation", "reward"), values, strict=True):
            base.check_finite(self.spec, self._steps, field, self.spec.bare(value))
        self._steps += 1
        return step, ended

    @property
    def state(self) -> PyTree:
        """The environments' state, until the next step: that of ``DeviceEnv``."""
        return self._state

    def render(self, index: int) -> np.ndarray:
        # the stacks are second
        if self.spec.frame_stack == 1:
            state = self._state
        else:
            state = self._state[0]
        place = index // self.spec.num_agents
        env_state = jax.tree.map(lambda x: np.asarray(x[place]), state.env)
        rows = {name: place * spec.num_agents for name, spec in self.spec.by_policy.items()}
        row_of = over_policies(lambda row, obs: jax.tree.map(lambda x: np.asarray(x[row]), obs))
        obs = self.spec.bare(row_of(rows, self.spec.keyed(state.obs)))
        return draw(self.spec, env_state, obs, self._draw)

    def close(self) -> None:
        self._state = None


@functools.lru_cache(maxsize=8)  # environments recreated for each evaluation compile once
def _programs(env_reset: Any, env_step: Any, num_envs: int) -> tuple[Any, Any]:
    """Compiles reset ``(key, first, steps) -> (state, obs)`` and step
    ``(state, action, key, first, steps) -> ...``.
    """

    def keys(key: jax.Array, first: jax.Array, steps: jax.Array) -> jax.Array:
        index = first + jnp.arange(num_envs // key.size, dtype=jnp.int32)
        return jax.vmap(lambda key: rng.per_index(jax.random.fold_in(key, steps), index))(
            key.reshape(-1)
        ).reshape(-1)

    reset = jax.jit(lambda *index: env_reset(keys(*index)))
    return reset, jax.jit(
        lambda state, action, *index: env_step(state, action, keys(*index)), donate_argnums=0
    )
