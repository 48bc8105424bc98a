"""Environments by name: gymnax, EnvPool and Gymnasium behind one spec and one autoreset convention."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple

from jaxrl_dist import config, rng
from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config import OBJECT, env_name, split_env
from jaxrl_dist.envs import envpool, gymnasium, gymnax, stacks, vector
from jaxrl_dist.envs.base import UNWRAPPED, DeviceEnv, DrawnEnv, HostEnv, Share, Wrappers
from jaxrl_dist.envs.native import is_gymnax
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import EnvSpec

__all__ = ["BACKENDS", "DeviceEnv", "DrawnEnv", "EnvSource", "HostEnv", "Wrappers", "find", "locate"]

_MODULES: dict[str, ModuleType] = {"gymnax": gymnax, "envpool": envpool, "gymnasium": gymnasium}
BACKENDS = {name: _MODULES[name] for name in config.BACKENDS}


class EnvSource(NamedTuple):
    """An environment that can be made as often as needed, on the device or on the host."""

    spec: EnvSpec
    """With all wrappers."""
    options: Mapping[str, str]
    atari_preset: str | None = None
    workers: Literal["threads", "processes"] = "threads"
    timeout: float = 120.0
    wrappers: Wrappers = UNWRAPPED
    pure: DeviceEnv | None = None
    """The environment itself, where it is pure functions, with all wrappers."""

    @property
    def is_pure(self) -> bool:
        """Whether it is pure functions, which run on any device; else it lives on the host."""
        return self.pure is not None

    def device(self) -> DeviceEnv:
        """The environment as pure functions.

        Raises:
          ConfigError: the backend runs on the host only.
        """
        if self.pure is None:
            raise ConfigError(
                f"{self.spec.backend}:{self.spec.id} runs on the host, so --plan on_device cannot compile it; "
                "use --plan synchronous"
            )
        return self.pure

    def host(self, share: Share | int, seed: int, *, training: bool = True, drawn: bool = False) -> DrawnEnv:
        """Environments on the host; those for evaluation play full Atari games.

        Args:
          share: which of a run's environments, or how many there are if it is all of them. An environment's seed
            depends on ``seed`` and on its number among all of the run, and not on the share.
          drawn: whether they are to be drawn.

        Raises:
          ConfigError: they are to be drawn and cannot be.
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        share = Share.all(share) if isinstance(share, int) else share
        if self.pure is not None:
            return gymnax.HostGymnax(self.pure, share.size, rng.stream(seed, rng.Stream.ENV), share.first)
        env_id, wrappers = self.spec.id, self.wrappers
        if self.spec.backend == "gymnasium":
            keywords = gymnasium.options(env_id, self.options)
            how = self.workers, self.timeout, wrappers, training and share.first == 0
            make = vector.drawn if drawn else vector.Gymnasium
            env: DrawnEnv = make(stacks.unstacked(self.spec), share.seeds(seed), keywords, *how)
        else:
            keywords = envpool.options(env_id, self.options, self.atari_preset, wrappers, training=training)
            env = envpool.EnvPool(env_id, share.seeds(seed), keywords, self.timeout, wrappers, drawn=drawn)
        return env if env.spec.frame_stack == self.spec.frame_stack else stacks.Stacked(env, self.spec)


def find(
    env: Any,
    options: Mapping[str, str] = {},
    atari_preset: str | None = None,
    workers: Literal["threads", "processes"] = "threads",
    timeout: float = 120.0,
    wrappers: Wrappers = UNWRAPPED,
) -> EnvSource:
    """The environment that ``[gymnax:|envpool:|gymnasium:]ID`` or ``[gymnax:|gymnasium:]MODULE:NAME`` names.

    Without a prefix it is gymnax's if that has the id, else EnvPool's, else Gymnasium's. ``MODULE:NAME`` imports the
    module, and is code that runs: take it from the user, never from a file. What it makes says which kind it is.
    EnvPool's Atari environments take the ``baselines`` preset unless another is named.

    Args:
      env: a name, or a gymnax-style environment itself; see ``native.is_gymnax``.
      workers: what steps Gymnasium environments.
      timeout: seconds in which an environment on the host must answer.
      wrappers: what stands between the environment and a policy.

    Raises:
      ConfigError: no such environment, an option it does not have, spaces that no policy handles, or observations that
        cannot be stacked.
      EnvError: an environment's own code failed.
      TimeoutError: a Gymnasium environment has not answered in time.
    """
    if isinstance(env, str):
        found = _of_name(env, options, atari_preset, workers, timeout, wrappers)
    else:
        found = _of_object(env, options, wrappers)
    if wrappers.frame_stack is not None:
        found = stacks.stacked(found, wrappers.frame_stack)
    pure = found if isinstance(found, DeviceEnv) else None
    spec = _checked(found.spec if isinstance(found, DeviceEnv) else found)
    name = f"{spec.backend}:{spec.id}"
    if workers != "threads" and spec.backend != "gymnasium":
        raise ConfigError(f"--env-workers {workers} needs a Gymnasium environment, and {name} is none")
    if spec.backend == "envpool":
        atari_preset = atari_preset or envpool.default_preset(spec.id)
    elif atari_preset is not None:
        raise ConfigError(f"--atari-preset {atari_preset} needs an Atari environment of EnvPool, and {name} is none")
    return EnvSource(spec, options, atari_preset, workers, timeout, wrappers, pure)


class Place(NamedTuple):
    """Where an environment's name leads."""

    backend: str
    """Of a module's function ``gymnasium``, before it is known what it makes."""
    name: str
    """``ID`` or ``MODULE:NAME``."""
    made_by: str | None = None
    """The backend that the user says a module's function makes environments of; None: either."""


def locate(env: str) -> Place:
    """Finds the backend of a name; imports no module of the user's.

    Raises:
      ConfigError: there is no such environment.
    """
    prefix, module, env_id = split_env(env)
    if module == OBJECT:
        raise ConfigError(f"--env {env} names an object handed over from Python, which cannot be found by its name")
    backends = [prefix] if prefix else list(BACKENDS)
    if module is not None:
        return Place("gymnasium", f"{module}:{env_id}", prefix)
    backend = next((name for name in backends if env_id in BACKENDS[name].ids()), None)
    if backend is None:
        known = [known_id for name in backends for known_id in BACKENDS[name].ids()]
        where = prefix or "gymnax, envpool or gymnasium"
        raise ConfigError(
            f"--env {env}: {where} has no such environment{did_you_mean(env_id, known)}; see: jaxrl-dist list envs"
        )
    return Place(backend, env_id)


def _of_name(
    env: str,
    options: Mapping[str, str],
    atari_preset: str | None,
    workers: Literal["threads", "processes"],
    timeout: float,
    wrappers: Wrappers,
) -> EnvSpec | DeviceEnv:
    backend, name, made_by = locate(env)
    if backend == "gymnax":
        return gymnax.make(name, options, wrappers)
    if backend == "envpool":
        preset = atari_preset or envpool.default_preset(name)
        return envpool.spec(name, envpool.options(name, options, preset, wrappers, training=True), wrappers)

    found = gymnasium.look(name, options, timeout, workers, lambda made: gymnax.from_object(name, made, wrappers))
    if made_by not in (None, "gymnax" if isinstance(found, DeviceEnv) else "gymnasium"):
        raise ConfigError(f"--env {env} makes no {made_by} environment; --env {name} finds out which it is")
    return found if isinstance(found, DeviceEnv) else gymnasium.spec(name, found, wrappers)


def _of_object(env: Any, options: Mapping[str, str], wrappers: Wrappers) -> DeviceEnv:
    name = env_name(env)
    if not is_gymnax(env):
        raise ConfigError(
            f"env must be a name, or a gymnax-style environment with reset_env and step_env, not {name}; others are "
            "made anew for each copy, by a function that env='my_module:make' names"
        )
    if options:
        raise ConfigError(f"env_options are for environments that are found by name, and {name} is made already")
    return gymnax.from_object(name, env, wrappers)


def _checked(spec: EnvSpec) -> EnvSpec:
    """The spec, if options have not made nonsense of it.

    Raises:
      ConfigError: episodes of no step, or observations of no number.
    """
    if spec.max_episode_steps is not None and spec.max_episode_steps < 1:
        raise ConfigError(f"{spec.backend}:{spec.id}: a time limit of {spec.max_episode_steps} steps; 1 or more works")
    if any(size < 1 for size in spec.observation.shape):
        raise ConfigError(f"{spec.backend}:{spec.id}: observations of shape {spec.observation.shape} hold nothing")
    return spec
