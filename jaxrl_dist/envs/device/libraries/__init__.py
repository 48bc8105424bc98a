"""Environments of JAX libraries, each as a gymnax-style object;
a library is imported only when it is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxrl_dist import rng
from jaxrl_dist.checks import did_you_mean, install_extra
from jaxrl_dist.config.envs import LIBRARIES
from jaxrl_dist.errors import ConfigError, one_line
from jaxrl_dist.types import Array, PyTree

if TYPE_CHECKING:
    from brax.envs import Env
    from mujoco_playground import MjxEnv


class Step(NamedTuple):
    """The result of one step of one environment; fields except ``obs``,
    ``state`` and ``info`` are scalars.
    """

    obs: PyTree
    state: PyTree
    reward: Array
    terminated: Array
    truncated: Array = False
    """True where the library's own time limit has cut the episode."""
    info: Mapping[str, PyTree] = {}


class State(NamedTuple):
    """The state of an ``Adapted`` environment."""

    env: PyTree
    """The library's."""
    steps: jax.Array
    """Int32 scalar."""
    truncated: jax.Array
    """Bool scalar."""


class Params(NamedTuple):
    """The parameters of an ``Adapted`` environment, named as in gymnax."""

    max_steps_in_episode: int | None


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A library's environment behind gymnax's interface; it never resets by itself.

    ``reset_env``, ``step_env`` and ``is_truncated`` are as in gymnax. The time limit is counted
    here, unless the library itself distinguishes truncation from termination.
    """

    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    """``(key) -> (obs, state)``; keys are uint32 arrays,
    because libraries keep them in states, which are saved."""
    step: Callable[[jax.Array, PyTree, PyTree], Step]
    """``(key, state, action) -> step``."""
    observations: spaces.Space
    actions: spaces.Space
    family: str
    """As ``EnvSpec.family``."""
    time_limit: int | None = None
    """Steps after which an episode is truncated."""
    side: Callable[[PyTree], jax.Array] | None = None
    """``(state) -> side``: whose turn it is in a game in which
    the agent moves for both sides; None: another game."""

    @property
    def side_to_move(self) -> Callable[[State], jax.Array] | None:
        side = self.side
        if side is None:
            return None
        return lambda state: side(state.env)

    @property
    def default_params(self) -> Params:
        return Params(self.time_limit)

    def observation_space(self, params: Params) -> spaces.Space:
        return self.observations

    def action_space(self, params: Params) -> spaces.Space:
        return self.actions

    def reset_env(self, key: jax.Array, params: Params) -> tuple[PyTree, State]:
        with theirs():
            obs, state = self.reset(rng.raw(key))
        return obs, State(state, jnp.zeros((), jnp.int32), jnp.zeros((), bool))

    def step_env(
        self, key: jax.Array, state: State, action: PyTree, params: Params
    ) -> tuple[PyTree, State, jax.Array, jax.Array, dict[str, PyTree]]:
        with theirs():
            step = self.step(rng.raw(key), state.env, action)
        steps = state.steps + 1
        truncated = jnp.asarray(step.truncated, bool)
        if params.max_steps_in_episode is not None:
            truncated = truncated | (steps >= params.max_steps_in_episode)
        new = State(step.state, steps, truncated)
        terminated = jnp.asarray(step.terminated).astype(bool)
        return step.obs, new, jnp.float32(step.reward), terminated, dict(step.info)

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        return state.truncated


class Library(Protocol):
    """A module of this folder; its name is the prefix and the name of the package."""

    def ids(self) -> list[str]:
        """Returns the ids of the library's environments."""

    def make(self, env_id: str, options: Mapping[str, str]) -> Adapted:
        """Makes an environment; ``options`` are ``--env-options``.

        Raises:
          ConfigError: unknown option, or spaces that have no counterpart here.
        """


def installed(library: str) -> bool:
    """Returns True if the library, or a backend such as EnvPool, is installed,
    without importing it.
    """
    return importlib.util.find_spec(LIBRARIES.get(library, library)) is not None


def load(library: str) -> Library:
    """Imports the adapter of a library, and the library.

    Raises:
      ConfigError: the library is not installed, or cannot be imported.
    """
    if not installed(library):
        raise ConfigError(
            f"{library}: needs a package that is not installed: {install_extra(library)}"
        )
    try:
        with theirs():
            return cast(Library, importlib.import_module(f"{__name__}.{library}"))
    except Exception as error:  # an outdated library may raise any error with newer dependencies
        raise ConfigError(f"{library}: cannot be imported: {one_line(error)}") from error


def library_with(library: str, env_id: str) -> Library:
    """Returns the adapter of a library that has an environment of this id.

    Raises:
      ConfigError: the id is unknown, or the library is missing.
    """
    module = load(library)
    if env_id not in module.ids():
        raise ConfigError(
            f"--env {library}:{env_id}: {library} has no such environment"
            f"{did_you_mean(env_id, module.ids())}; see: jaxrl-dist list envs {library}"
        )
    return module


def make(library: str, env_id: str, options: Mapping[str, str]) -> Adapted:
    """Makes an environment of a library.

    Raises:
      ConfigError: unknown environment or option, the library is missing,
        or it cannot make this environment here.
    """
    module = library_with(library, env_id)
    try:
        with theirs():
            return module.make(env_id, options)
    except ConfigError:
        raise
    except Exception as error:  # such as a failed download of levels
        raise ConfigError(f"{library}:{env_id} cannot be made here: {one_line(error)}") from error


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """Runs the libraries' own code: hides its output and warnings, and allows rank promotion."""
    silent = cast(Any, io.StringIO())
    first = sys.__stdout__
    # the import of JaxMARL leaves that of the process, not a notebook's
    own = contextlib.redirect_stderr(sys.stderr)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(silent),
        own,
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("ignore")
        sys.__stdout__ = silent  # type: ignore[misc] # where the import of JaxMARL prints to
        try:
            yield
        finally:
            sys.__stdout__ = first  # type: ignore[misc]


def summary() -> list[str]:
    """Returns a line for each library: its prefix,
    and how to list its environments or to install it.
    """
    lines = []
    for library in LIBRARIES:
        advice = install_extra(library)
        if installed(library):
            advice = f"installed; see: jaxrl-dist list envs {library}"
        lines.append(f"{library + ':NAME':15} {advice}")
    return lines


# --- Shared by the adapters -----------------------------------------------------------------------


def defaults_of(function: Callable[..., object]) -> dict[str, object]:
    """Returns the defaults of a function's arguments, by the arguments' names."""
    return {
        argument.name: argument.default
        for argument in inspect.signature(function).parameters.values()
        if argument.default is not argument.empty
    }


def fields_of(params: PyTree) -> dict[str, object]:
    """Returns the fields of a dataclass."""
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def settable(values: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Returns the values that a text can set."""
    return {
        name: value for name, value in values.items() if isinstance(value, bool | int | float | str)
    }


def one_hot(obs: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Converts a grid of categories ``[H, W, len(sizes)]``
    to an image ``[H, W, sum(sizes)]``, bool.

    Args:
      sizes: the number of categories of each channel.
    """
    channels = [jax.nn.one_hot(obs[..., i], size, dtype=bool) for i, size in enumerate(sizes)]
    return jnp.concatenate(channels, axis=-1)


def bool_space(shape: tuple[int, ...]) -> spaces.Box:
    """Returns the space of arrays of bool: images of categories, and action masks."""
    return spaces.Box(0, 1, shape, np.bool_)  # type: ignore[arg-type]


def adapted(env: Env | MjxEnv, family: str, limit: int) -> Adapted:
    """Adapts an environment of Brax or MuJoCo Playground, whose actions are -1 .. 1.

    Args:
      family: as ``EnvSpec.family``.
      limit: steps after which an episode is truncated.
        A ``time_out`` in the state's info may mean the end of the task.
    """

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state = env.reset(key)
        return state.obs, state

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> Step:
        state = env.step(state, action)
        return Step(state.obs, state, state.reward, state.done, info=state.metrics)

    return Adapted(
        reset, step, _space(env.observation_size), _box(env.action_size, 1.0), family, limit
    )


Size = int | tuple[int, ...]


def _space(size: Size | Mapping[str, Size]) -> spaces.Space:
    if isinstance(size, Mapping):
        return spaces.Dict({name: _box(shape, np.inf) for name, shape in size.items()})
    return _box(size, np.inf)


def _box(shape: Size, bound: float) -> spaces.Box:
    return spaces.Box(-bound, bound, tuple(np.atleast_1d(shape)), np.float32)
