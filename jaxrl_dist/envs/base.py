"""What every environment backend offers: a vector of environments that reset on the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.envs.native import PlainSpace
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import Algorithm, Array, EnvSpec, EpisodeStats, PyTree, Timestep


class DeviceEnv(NamedTuple):
    """Environments that run inside a jitted program, as pure functions over a batch of any size."""

    spec: EnvSpec
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    """``(keys [B]) -> (state, obs [B, ...])``."""
    step: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, Timestep, EpisodeStats]]
    """``(state, action [B, ...], keys [B]) -> (state, step, episodes)``; ``episodes`` holds one entry per
    environment, ``[B]``, with ``episodes`` 1 where one ended in this step."""


class Wrappers(NamedTuple):
    """What stands between an environment and a policy, on every backend alike; fields as those of ``Train``."""

    frame_stack: int | None = None
    action_repeat: int = 1
    time_limit: int | None = None

    def limit(self, own: int | None) -> int | None:
        """The time limit in env steps, where the environment's ``own`` is in its steps."""
        own = None if own is None else -(-own // self.action_repeat)
        return min((limit for limit in (own, self.time_limit) if limit is not None), default=None)

    @property
    def own_limit(self) -> int | None:
        """The time limit in the environment's own steps."""
        return None if self.time_limit is None else self.time_limit * self.action_repeat


UNWRAPPED = Wrappers()


class Share(NamedTuple):
    """Which of a run's environments an actor has: ``first .. first + size - 1`` of ``total``."""

    first: int
    size: int
    total: int

    @classmethod
    def all(cls, num_envs: int) -> Share:
        """That of an actor that has them all."""
        return cls(0, num_envs, num_envs)

    def seeds(self, seed: int) -> list[int]:
        """A seed for each of its environments, by their numbers among all of the run; below 2^31."""
        words = np.random.SeedSequence(seed).generate_state(self.total) & 0x7FFFFFFF
        return [int(word) for word in words[self.first : self.first + self.size]]

    def initial_core(self, algorithm: Algorithm) -> PyTree:
        """The policy state ``[size, ...]`` with which their episodes begin."""
        core = algorithm.initial_core(self.total)
        return jax.tree.map(lambda x: jnp.copy(x[self.first : self.first + self.size]), core)


class HostEnv(Protocol):
    """A batch of environments that lives on the host and is stepped with numpy arrays.

    Where ``spec.frame_stack`` is more than 1, its observations are single frames, ``frames.Frame``, or stacks already.
    """

    spec: EnvSpec
    num_envs: int

    def reset(self) -> PyTree:
        """Starts an episode in each environment and returns the first observations ``[B, ...]``."""

    def step(self, action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
        """Steps all environments; arrays as in ``DeviceEnv.step``.

        Raises:
          ValueError: an action lies outside the action space; the message names environment and step.
          EnvError: an environment's own code failed, or gave what is no finite number.
          TimeoutError: an environment has not answered in time.
        """

    def close(self) -> None:
        """Ends the environments and their threads."""


class DrawnEnv(HostEnv, Protocol):
    """A ``HostEnv`` that can be drawn, where it was made to be."""

    def render(self, index: int) -> np.ndarray:
        """A picture of one environment as it is now, ``[H, W, 3]`` uint8.

        Raises:
          ConfigError: it cannot be drawn.
          TimeoutError: it has not answered in time.
        """


def space_of(
    space: PlainSpace,
    name: str,
    what: str,
    kinds: Sequence[str] = ("Discrete", "MultiDiscrete", "MultiBinary", "Box"),
) -> Space:
    """A space as policies see it; numbers of 64 bits become 32.

    Args:
      name: of the environment, with its backend.
      what: ``observations`` or ``actions``.
      kinds: those that the backend's adapter handles.

    Raises:
      ConfigError: it is of another kind.
    """
    if space.kind not in kinds:
        others = "wrappers such as FlattenObservation make a Box of others"
        if what == "actions":
            others = "a gymnasium.ActionWrapper can offer one of these instead"
        advice = f", and {others}" if "MultiBinary" in kinds else ""
        raise ConfigError(f"{name} has {space.kind} {what}; {', '.join(kinds[:-1])} and {kinds[-1]} work{advice}")
    if space.kind == "Discrete":
        return Discrete(space.sizes[0])
    if space.kind != "Box":
        return MultiDiscrete(tuple(space.sizes))
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(space.dtype)))
    low, high = (np.broadcast_to(np.asarray(bound), space.shape) for bound in (space.low, space.high))
    if np.issubdtype(dtype, np.integer):
        low, high = (np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max) for bound in (low, high))
    with np.errstate(over="ignore"):  # what does not fit float32 is infinite
        return Box(tuple(space.shape), dtype, low.astype(dtype), high.astype(dtype))


def outcome(resetting: Array, terminated: Array, truncated: Array) -> tuple[Array, Array, Array]:
    """``(valid, terminated, truncated)`` of a step, by the convention of ``Timestep``; all are ``[B]`` bool.

    Args:
      resetting: where the step before has ended an episode, so that this one is spent on the reset.
    """
    valid = ~resetting
    terminated = terminated & valid
    return valid, terminated, truncated & valid & ~terminated


def awaited(wait: Callable[[float], Any], seconds: float) -> Any:
    """What ``wait`` gives within so many seconds, or what is false.

    It waits in naps. Where this process is stopped meanwhile, as by Ctrl-Z, that costs one nap and not all of the time:
    what it waits for may have been stopped with it.
    """
    for _ in range(NAPS):
        if answer := wait(seconds / NAPS):
            return answer
    return wait(0.0)


NAPS = 20
"""Into which ``awaited`` divides its time."""


class EpisodeCounter:
    """Adds up the episodes under way in ``B`` environments on the host."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs, np.float32)
        self._length = np.zeros(num_envs, np.int32)

    def add(self, reward: np.ndarray, valid: np.ndarray, over: np.ndarray) -> EpisodeStats:
        """Counts one step, and gives the statistics ``[B]`` of the episodes that it ended.

        Args:
          reward: ``[B]``, raw; counts where ``valid``.
          over: ``[B]`` bool, where an episode has ended.
        """
        self._return += np.where(valid, reward, 0)
        self._length += valid
        episodes = EpisodeStats(
            episodes=over.astype(np.float32),
            return_sum=np.where(over, self._return, 0).astype(np.float32),
            length_sum=np.where(over, self._length, 0).astype(np.float32),
            return_min=np.where(over, self._return, np.inf).astype(np.float32),
            return_max=np.where(over, self._return, -np.inf).astype(np.float32),
        )
        self._return = np.where(over, 0, self._return).astype(np.float32)
        self._length = np.where(over, 0, self._length).astype(np.int32)
        return episodes


def checked_action(spec: EnvSpec, action: np.ndarray, step: int) -> np.ndarray:
    """Clips continuous actions ``[B, ...]`` to their bounds; an environment might accept anything, or die of it.

    Raises:
      ValueError: an action is not finite, or not one of the discrete ones.
    """
    space, action = spec.action, np.asarray(action)
    if isinstance(space, Box):
        bad = ~np.isfinite(action)
        action = np.clip(action, space.low, space.high)
    else:
        bad = (action < 0) | (action >= np.asarray(space.n if isinstance(space, Discrete) else space.nvec))
    if bad.any():
        index = int(np.argwhere(bad)[0, 0])
        raise ValueError(
            f"{spec.backend}:{spec.id}: action {action[index]} of environment {index} at step {step} lies outside "
            f"{space}"
        )
    return action


def check_finite(spec: EnvSpec, step: int, field: str, values: np.ndarray) -> None:
    """Checks what environments on the host gave back at a step; whole numbers are finite always.

    Args:
      step: counted from the start of this session; the first reset counts as step 0.
      field: ``observation`` or ``reward``.
      values: ``[B, ...]``.

    Raises:
      EnvError: NaN or infinity; names the first environment.
    """
    if values.dtype.kind in "biu" or np.isfinite(values).all():
        return
    index = int(np.argwhere(~np.isfinite(values))[0, 0])
    raise not_finite(spec, index, step, field, values[index])


def not_finite(spec: EnvSpec, index: int, step: int, field: str, value: Any = None) -> EnvError:
    """The error of environment ``index`` that gave NaN or infinity; ``value`` is what it gave, where it is at hand."""
    kind = "an observation" if field == "observation" else f"a {field}"
    shown = "" if value is None else f": {' '.join(str(value).split())[:80]}"
    return EnvError(
        f"{spec.backend}:{spec.id}: environment {index} at step {step} gave {kind} that is not finite{shown}"
    )


def parse_option(env: str, key: str, text: str, default: Any) -> Any:
    """Reads the text of one ``--env-options`` entry as the type of its default.

    Raises:
      ConfigError: the text is no such value.
    """
    kind = type(default)
    try:
        if isinstance(default, (bool, np.bool_)):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, np.integer)):
            return int(text)
        if isinstance(default, (float, np.floating)):
            if math.isfinite(number := float(text)):
                return number
            raise ValueError
        if isinstance(default, str):
            return text
    except (KeyError, ValueError):
        raise ConfigError(
            f"--env-options {key} of {env} must be a {kind.__name__} such as {default}, not {text!r}"
        ) from None
    raise ConfigError(f"--env-options {key} of {env} is a {kind.__name__}, which cannot be set from the command line")


def parse_options(env: str, options: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads ``--env-options`` by the names and types of an environment's defaults.

    Raises:
      ConfigError: an unknown name or an unreadable value.
    """
    for key in options:
        if key not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise ConfigError(f"{env} has no option {key!r}{did_you_mean(key, defaults)}; it has: {known}")
    return {key: parse_option(env, key, text, defaults[key]) for key, text in options.items()}
