"""What users write besides the functions of an ``Algorithm``: hyperparameters, torsos,
cores, environments.

A class of yours may inherit the protocol that it fulfils;
type checkers then compare each method with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from jaxrl_dist.heavy import jax
from jaxrl_dist.types import Algorithm, Array, EnvSpec, PyTree


class Hyperparameters(Protocol):
    """The config of an algorithm: a frozen dataclass whose fields become flags.
    It may also have ``Traits``.
    """

    def make(self, spec: EnvSpec) -> Algorithm:
        """Returns the algorithm for an environment;
        raises ``ConfigError`` if it does not support its spaces.
        """


class Traits(NamedTuple):
    """What runs read of a config of hyperparameters: attributes that it may lack,
    with their values if it does.
    """

    validate: Callable[[], None] = lambda: None
    """Raises ``ConfigError`` if a value is out of range."""
    preset: Callable[[EnvSpec], dict[str, Any]] = lambda spec: {}
    """Of the class: ``(spec) -> values`` of its fields and of ``Train`` that suit an
    environment."""
    recurrent_preset: Callable[[dict[str, Any]], dict[str, Any]] = lambda preset: preset
    """Of the class: ``(preset) -> preset`` for a run that sets ``core``."""
    joint: bool = False
    """Of the class: whether the agents of an environment act as one, on the observations of all."""
    discount: Any = None
    """Discount factor, a number that may be traced; ``--scale-rewards`` needs one."""
    core: Any = "none"
    """The recurrent core; a name other than ``none``, or functions."""
    core_inputs: str = "none"
    """What a core reads beside the features;
    who calls a trained policy passes a ``reward`` that it names."""
    hidden: tuple[str, ...] = ()
    """Parts of a Dict observation that a trained policy does not need."""
    learning_rate_steps: int | None = None
    """Env steps after which step sizes are 0: a longer run gets a warning."""
    learning_starts: int = 0
    """Env steps before the first update; a profile sets it to 0."""
    replay_capacity: int | None = None
    """Agent steps that the memory holds; a default is rounded down to what the environments
    divide."""
    replay_ratio: float | None = None
    """Updates per agent step; a default is rounded down to
    a whole number of updates after each rollout."""
    num_minibatches: int | None = None
    """Updates of a pass over a rollout; a default is rounded down to what divides the rollout."""

    @classmethod
    def of(cls, config: object) -> Traits:
        """Returns the traits of a config, or of its class."""
        return cls(**{name: getattr(config, name) for name in cls._fields if hasattr(config, name)})


class Torso(Protocol):
    """A network that reads preprocessed observations ``x [N, ...]``, or a dict of them;
    flax modules fulfil it.
    """

    def init(self, key: jax.Array, x: PyTree, /) -> PyTree:
        """Returns parameters; ``x`` has one row."""

    def apply(self, params: PyTree, x: PyTree, /) -> Any:
        """Returns features ``[N, width]``."""


TorsoLike: TypeAlias = (
    "Torso | tuple[Callable[[jax.Array, PyTree], PyTree], Callable[[PyTree, PyTree], Any]]"
)
"""A torso, or its methods as the pair ``(init, apply)``."""


class Core(Protocol):
    """A recurrent core, which gives a policy a memory;
    each episode begins with the state of ``initial``.
    """

    def init(self, key: jax.Array, features: jax.Array, /) -> PyTree:
        """Returns parameters; ``features`` has one row."""

    def step(
        self, params: PyTree, features: jax.Array, state: PyTree, /
    ) -> tuple[jax.Array, PyTree]:
        """Returns the output ``[B, H]`` and the next state ``[B, ...]`` for ``features [B, D]``."""

    def initial(self, num_envs: int, /) -> PyTree:
        """Returns the state ``[num_envs, ...]`` at the start of an episode."""


CoreLike: TypeAlias = (
    "Core | tuple[Callable[[jax.Array, jax.Array], PyTree], "
    "Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, PyTree]], Callable[[int], PyTree]]"
)
"""A core, or its methods as ``(init, step, initial)``."""


class Environment(Protocol):
    """One environment of pure functions, in the style of gymnax;
    ``jaxrl-dist check-env`` checks what types cannot.

    States and parameters are trees of arrays. A step does not reset.
    """

    @property
    def default_params(self) -> PyTree:
        """The parameters, unless they come with the environment, as ``(env, params)``."""

    def reset_env(self, key: jax.Array, params: PyTree, /) -> tuple[PyTree, PyTree]:
        """Returns ``(obs, state)`` at the start of an episode."""

    def step_env(
        self, key: jax.Array, state: PyTree, action: PyTree, params: PyTree, /
    ) -> tuple[PyTree, PyTree, Array, Array, Mapping[str, Any]]:
        """Returns ``(obs, state, reward, terminated, info)``."""

    def is_truncated(self, state: PyTree, params: PyTree, /) -> Array:
        """Returns whether a time limit ends the episode in this state."""

    def observation_space(self, params: PyTree, /) -> Any:
        """Returns the space of observations, gymnax's or Gymnasium's."""

    def action_space(self, params: PyTree, /) -> Any:
        """Returns the space of actions."""
