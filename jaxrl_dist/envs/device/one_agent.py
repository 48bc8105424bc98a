"""A batch of gymnax-style environments of one agent, with next-step autoreset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import spaces
from jaxrl_dist.envs import base, conversion, episodes, masks
from jaxrl_dist.envs.base import DeviceEnv, Wrappers
from jaxrl_dist.envs.contract import Contract, of_env
from jaxrl_dist.envs.device import libraries
from jaxrl_dist.envs.drawing import own_render
from jaxrl_dist.envs.native import family_of, plain, render_fps, tuples, unnamed
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.protocols import Environment
from jaxrl_dist.simulator import Simulated, Simulator
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


class Outcome(NamedTuple):
    """What a step of one environment brings."""

    obs: PyTree
    env: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: dict[str, jax.Array]


def from_env(
    env: Environment,
    params: PyTree,
    env_id: str,
    backend: str,
    wrappers: Wrappers,
    contract: Contract,
) -> DeviceEnv:
    """Adapts a gymnax-style environment object.

    gymnax's own ``step`` resets in the same step and hides the last observation; here the reset
    takes the next step. Frames are stacked elsewhere. Arguments and errors are as for
    ``gymnax.adapt``.
    """
    name = contract.name
    params, (native_obs, native_action), action_space, *first, info = of_env(contract, env, params)
    first_obs, first_state = first
    observation = conversion.policy_space(native_obs, name, "observations", first_obs)
    native_mask = masks.of_gymnax(env, first_state, info, plain(native_obs), plain(native_action))
    observation, mask = masks.with_mask(observation, action_space, native_mask)
    metrics = episodes.parse(wrappers.info_metrics)
    episodes.check_known(metrics, episodes.numbers(info), name)
    family = env.family if isinstance(env, libraries.Adapted) else family_of(env, "other")
    limit = getattr(params, "max_steps_in_episode", None)
    side_to_move = getattr(env, "side_to_move", None)
    spec = EnvSpec(
        env_id,
        backend,
        family,
        observation,
        action_space,
        max_episode_steps=wrappers.limit(None if limit is None else int(limit)),
        mask=mask,
        unread_mask=native_mask.unread,
        info_metrics=metrics,
        fps=_fps(env, params, family, wrappers.action_repeat),
        both_sides=side_to_move is not None,
        tuples=tuples(plain(native_obs), plain(native_action), native_mask),
        goals=getattr(env, "goals", None),
    )
    batch = _Batch(
        env,
        params,
        spec,
        native_action,
        masks.observer(native_mask, native_obs),
        (first_obs, first_state),
        wrappers,
        side_to_move,
    )
    simulate = jax.tree_util.Partial(batch.simulated)
    lists_outcomes = hasattr(env, "outcomes") and wrappers.action_repeat == 1
    return DeviceEnv(
        spec,
        batch.reset,
        batch.step,
        own_render(env, params),
        simulate=lambda state: Simulator(state.env, simulate),
        outcomes=batch.outcomes if lists_outcomes else None,
        starts=batch.starts if hasattr(env, "starts") else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    """The functions of a ``DeviceEnv``."""

    env: Any
    """An ``Environment``, whose methods ``outcomes`` and ``starts`` are optional."""
    params: PyTree
    spec: EnvSpec
    native_action: Any
    """The environment's own action space."""
    observe: Callable[[PyTree, PyTree], PyTree]
    """``(obs, state) -> obs`` with the action mask, if there is one."""
    like: tuple[PyTree, PyTree]
    """Shapes and dtypes of an observation and a state after a reset."""
    wrappers: Wrappers
    side_to_move: Callable[[PyTree], jax.Array] | None
    """As ``DeviceEnv.side``; None: one side moves."""

    def reset(self, keys: jax.Array) -> tuple[State, PyTree]:
        obs, env_state = self._reset_all(keys)
        zeros = jnp.zeros(keys.shape, jnp.float32)
        info = self._no_info(zeros)
        return State(env_state, obs, zeros > 0, zeros, zeros.astype(jnp.int32), info), obs

    def step(
        self, state: State, action: PyTree, keys: jax.Array
    ) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys)
        new: Outcome = jax.vmap(self._step_one)(keys[:, 0], state.env, action)

        def started(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
            return base.rows_where(ended, self._reset_all(keys), stepped)

        obs, env_state = base.restarted(started, keys[:, 1], state.ended, (new.obs, new.env))
        truncated = self.wrappers.cut(new.truncated, state.episode_length + 1)
        valid, terminated, truncated = base.outcome(state.ended, new.terminated, truncated)
        reward = jnp.where(valid, new.reward, 0.0)
        episode_return = jnp.where(valid, state.episode_return + reward, 0.0)
        episode_length = jnp.where(valid, state.episode_length + 1, 0)
        info = base.rows_where(
            valid, episodes.advanced(state.info, new.info), self._no_info(reward)
        )
        ended = terminated | truncated
        statistics = episodes.ended_episodes(ended, episode_return, episode_length, info)
        new_state = State(env_state, obs, ended, episode_return, episode_length, info)
        return new_state, Timestep(obs, reward, terminated, truncated, valid), statistics

    def simulated(self, env_state: PyTree, action: PyTree, key: jax.Array) -> Simulated:
        """Returns a step of the model: of one environment, without the flag's time limit."""
        new = self._step_one(key, env_state, action, limited=False)
        return Simulated(
            new.env, new.obs, new.reward, self._discount(env_state, new.env, new.terminated)
        )

    def outcomes(self, env_state: PyTree, action: PyTree) -> tuple[jax.Array, Simulated]:
        """As ``DeviceEnv.outcomes``."""
        given = self.env.outcomes(env_state, unnamed(self.native_action, action), self.params)
        probability, obs, new, reward, over = _checked(
            given, "outcomes", "probability, obs, state, reward, terminated"
        )
        obs, new = self._as_after_reset((obs, new))
        discount = jax.vmap(self._discount, (None, 0, 0))(env_state, new, jnp.asarray(over))
        obs = jax.vmap(self.observe)(obs, new)
        return probability, Simulated(new, obs, jnp.float32(reward), discount)

    def starts(self) -> tuple[jax.Array, PyTree, PyTree]:
        """As ``DeviceEnv.starts``."""
        given = self.env.starts(self.params)
        probability, obs, env_state = _checked(given, "starts", "probability, obs, state")
        return probability, env_state, jax.vmap(self.observe)(obs, env_state)

    def _reset_all(self, keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, env_state = jax.vmap(self.env.reset_env, (0, None))(keys, self.params)
        obs = jax.vmap(self.observe)(obs, env_state)

        def in_rows(x: jax.Array | float) -> jax.Array:
            """Gives a dtype and a row for each environment to what starts as a Python number."""
            return jnp.broadcast_to(x, jnp.shape(x) or keys.shape)

        return obs, jax.tree.map(in_rows, env_state)

    def _step_one(
        self, key: jax.Array, env_state: PyTree, action: PyTree, *, limited: bool = True
    ) -> Outcome:
        """Steps one environment, repeatedly if the action repeats.

        Args:
          limited: whether a truncation also ends the episode.
        """
        action = spaces.clipped(self.spec.action, action)
        if self.wrappers.action_repeat == 1:
            return self._step_once(key, env_state, action)
        keys = jax.random.split(key, self.wrappers.action_repeat)

        def repeat(now: Outcome, key: jax.Array) -> tuple[Outcome, None]:
            more = self._step_once(key, now.env, action)
            new = more._replace(
                reward=now.reward + more.reward, info=episodes.advanced(now.info, more.info)
            )
            ended = now.terminated | now.truncated if limited else now.terminated
            return jax.tree.map(lambda x, y: jnp.where(ended, x, y), now, new), None

        first = jax.tree.map(jnp.asarray, self._step_once(keys[0], env_state, action))
        return jax.lax.scan(repeat, first, keys[1:])[0]

    def _step_once(self, key: jax.Array, env_state: PyTree, action: PyTree) -> Outcome:
        *stepped, reward, terminated, info = self.env.step_env(
            key, env_state, unnamed(self.native_action, action), self.params
        )
        obs, env_state = self._as_after_reset(tuple(stepped))
        return Outcome(
            self.observe(obs, env_state),
            env_state,
            jnp.float32(reward),
            terminated,
            self.env.is_truncated(env_state, self.params),
            self._metrics_of(info),
        )

    def _as_after_reset(self, stepped: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """Converts dtypes: the contract allows for those that a reset's can hold."""
        return jax.tree.map(lambda x, like: jnp.asarray(x).astype(like.dtype), stepped, self.like)

    def _metrics_of(self, info: PyTree) -> dict[str, jax.Array]:
        metrics = self.spec.info_metrics
        if not metrics:
            return {}
        numbers = episodes.numbers(info)
        return {
            metric: jnp.float32(numbers[episodes.field(metric)]).reshape(()) for metric in metrics
        }

    def _no_info(self, like: jax.Array) -> dict[str, jax.Array]:
        return {metric: jnp.full_like(like, jnp.nan) for metric in self.spec.info_metrics}

    def _discount(self, env_state: PyTree, new: PyTree, over: jax.Array) -> jax.Array:
        """Returns 0 after an end, -1 if the other side of a game moves next, and else 1."""
        going_on: jax.Array | float = 1.0
        if self.side_to_move is not None:
            turns = self.side_to_move(env_state) != self.side_to_move(new)
            going_on = jnp.where(turns, -1.0, 1.0)
        return jnp.where(over, 0.0, going_on)


def _checked(given: object, method: str, names: str) -> tuple[Any, ...]:
    """Returns what an optional method of an environment has returned.

    Raises:
      ConfigError: it is not a tuple of the things named.
    """
    if not isinstance(given, tuple) or len(given) != names.count(",") + 1:
        raise ConfigError(f"{method} of an environment returns ({names})")
    return given


def _fps(env: object, params: object, family: str, action_repeat: int) -> float | None:
    """Returns ``EnvSpec.fps``: the environment's ``render_fps``,
    or by the seconds of a step of classic control.
    """
    fps = render_fps(env)
    if fps is None and family == "classic_control":
        seconds = getattr(params, "tau", getattr(params, "dt", 0.0))
        fps = 1 / seconds if seconds > 0 else None
    return None if fps is None else fps / action_repeat
