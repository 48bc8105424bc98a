"""The interface of every environment backend: environments that reset on the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh
from jaxrl_dist.envs.native import env_label
from jaxrl_dist.simulator import Simulated, Simulator
from jaxrl_dist.types import Array, EnvSpec, EpisodeStats, PyTree, Timestep


class DeviceEnv(NamedTuple):
    """Environments as pure functions over a batch of any size, for use in a jitted program."""

    spec: EnvSpec
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    """``(keys [B]) -> (state, obs [B, ...])``."""
    step: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, Timestep, EpisodeStats]]
    """``(state, action [B, ...], keys [B]) -> (state, step, episodes)``; the statistics have an
    entry per environment, ``[B]``, and their count ``episodes`` is 1 where an episode ended in this
    step."""
    render: Callable[[PyTree], Any] | None = None
    """Draws one native state, ``[H, W, 3]`` uint8; None: it cannot."""
    simulate: Callable[[PyTree], Simulator] | None = None
    """``(state) -> simulator`` of the rows' states; None: policies cannot plan in it."""
    outcomes: Callable[[PyTree, PyTree], tuple[jax.Array, Simulated]] | None = None
    """``(state, action) -> (probability [K], simulated [K])``: all that a step of one environment
    may bring; None: the environment does not list it."""
    starts: Callable[[], tuple[jax.Array, PyTree, PyTree]] | None = None
    """``() -> (probability [N], state [N], obs [N])``: all first states; None: the environment does
    not list them."""


class Wrappers(NamedTuple):
    """Settings of the wrappers between environment and policy, the same for every backend;
    fields as in ``Train``.
    """

    frame_stack: int | None = None
    action_repeat: int = 1
    time_limit: int | None = None
    hide: str | None = None
    policies: Mapping[str, str] = {}
    joint: Sequence[str] = ()
    """Policies whose agents act as one; "" if there is one policy."""
    agent_ids: bool = False
    info_metrics: str | None = None

    def limit(self, raw_steps: int | None) -> int | None:
        """Returns the time limit in env steps;
        ``raw_steps`` is the environment's limit before action repeat.
        """
        limits = [] if self.time_limit is None else [self.time_limit]
        if raw_steps is not None:
            limits.append(-(-raw_steps // self.action_repeat))
        return min(limits, default=None)

    def cut(self, truncated: jax.Array, steps: jax.Array) -> jax.Array:
        """Returns ``truncated``, with the episodes that
        ``steps`` env steps bring to the flag's limit.
        """
        if self.time_limit is None:
            return truncated
        return truncated | (steps >= self.time_limit)

    @property
    def own_limit(self) -> int | None:
        """The time limit in raw environment steps, before action repeat."""
        if self.time_limit is None:
            return None
        return self.time_limit * self.action_repeat


UNWRAPPED = Wrappers()


def label_of(spec: EnvSpec) -> str:
    """Returns an environment's name for messages; see ``native.env_label``."""
    return env_label(spec.backend, spec.id)


class EnvSlice(NamedTuple):
    """An actor's part of a run's environments: ``first .. first + size - 1`` of ``total``."""

    first: int
    size: int
    total: int

    @classmethod
    def all(cls, num_envs: int) -> EnvSlice:
        """Returns the share of an actor that has all environments."""
        return cls(0, num_envs, num_envs)

    def seeds(self, seed: int) -> list[int]:
        """Returns one seed per environment, below 2^31,
        which depends on the environment's index within the run.
        """
        words = np.random.SeedSequence(seed).generate_state(self.total) & 0x7FFFFFFF
        return [int(word) for word in words[self.first : self.first + self.size]]


class HostEnv(Protocol):
    """A batch of environments on the host, stepped with numpy arrays.

    If ``spec.frame_stack`` is more than 1, the observations are either single frames,
    ``frames.Frame``, or full stacks.
    """

    spec: EnvSpec
    num_envs: int

    def reset(self) -> PyTree:
        """Starts an episode in each environment and returns the first observations ``[B, ...]``."""

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        """Steps all environments; arrays as in ``DeviceEnv.step``.

        Raises:
          ValueError: an action is outside the action space; the message names environment and step.
          EnvError: an environment's own code failed, or returned NaN or infinity.
          TimeoutError: an environment has not answered in time.
        """

    def close(self) -> None:
        """Closes the environments and ends their threads."""


class DrawnEnv(HostEnv, Protocol):
    """A ``HostEnv`` that can be drawn, if it was made with ``drawn=True``."""

    def render(self, index: int) -> np.ndarray:
        """Draws one environment in its current state, ``[H, W, 3]`` uint8.

        Raises:
          ConfigError: the environment cannot be drawn.
          TimeoutError: the environment has not answered in time.
        """


def outcome(resetting: Array, terminated: Array, truncated: Array) -> tuple[Array, Array, Array]:
    """Returns ``(valid, terminated, truncated)`` of a step, by the convention of ``Timestep``;
    all are ``[B]`` bool.

    ``resetting``: where the previous step ended an episode, so that this one is the reset.
    """
    valid = ~resetting
    terminated = terminated & valid
    return valid, terminated, truncated & valid & ~terminated


def rows_where(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """Takes rows of ``x`` where ``condition [B]`` is True, else of ``y``."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        rows = condition.reshape(condition.shape + (1,) * (b.ndim - 1))
        return jnp.where(rows, a.astype(b.dtype), b)

    return jax.tree.map(choose, x, y)


def restarted(
    start: Callable[[jax.Array, jax.Array, PyTree], PyTree],
    keys: jax.Array,
    ended: jax.Array,
    stepped: PyTree,
) -> PyTree:
    """Returns ``start(keys, ended, stepped)``, which replaces the rows that begin a new episode.

    On CPUs resets run only when an environment needs one, which makes stepping up to twice as fast.
    A GPU would wait for the host at each condition, and steps so many environments that some have
    ended anyway.

    Args:
      ended: ``[B]`` bool, where the previous step ended an episode; if nowhere,
        ``start`` returns ``stepped``.
    """

    def if_any(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
        return jax.lax.cond(
            mesh.any_member(jnp.any(ended)), start, lambda *rows: rows[2], keys, ended, stepped
        )

    return jax.lax.platform_dependent(keys, ended, stepped, cpu=if_any, default=start)
