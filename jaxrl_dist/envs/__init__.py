"""Environments by name: gymnax, EnvPool and Gymnasium behind one spec and one autoreset convention."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Literal, NamedTuple

from jaxrl_dist import config, rng
from jaxrl_dist.config import ConfigError, did_you_mean, split_env
from jaxrl_dist.envs import envpool, gymnasium, gymnax
from jaxrl_dist.envs.base import DeviceEnv, HostEnv
from jaxrl_dist.types import EnvSpec

__all__ = ["BACKENDS", "DeviceEnv", "EnvSource", "HostEnv", "find"]

_MODULES: dict[str, ModuleType] = {"gymnax": gymnax, "envpool": envpool, "gymnasium": gymnasium}
BACKENDS = {name: _MODULES[name] for name in config.BACKENDS}


class EnvSource(NamedTuple):
    """An environment that can be made as often as needed, on the device or on the host."""

    spec: EnvSpec
    options: Mapping[str, str]
    atari_preset: str | None = None
    workers: Literal["threads", "processes"] = "threads"
    timeout: float = 120.0

    def device(self) -> DeviceEnv:
        """The environment as pure functions.

        Raises:
          ConfigError: the backend runs on the host only.
        """
        if self.spec.backend != "gymnax":
            raise ConfigError(
                f"{self.spec.backend}:{self.spec.id} runs on the host, so --plan on_device cannot compile it; "
                "use --plan synchronous"
            )
        return gymnax.make(self.spec.id, self.options)

    def host(self, num_envs: int, seed: int, *, training: bool = True) -> HostEnv:
        """``num_envs`` environments on the host; those for evaluation play full Atari games.

        Raises:
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        if self.spec.backend == "gymnax":
            return gymnax.HostGymnax(self.device(), num_envs, rng.stream(seed, rng.Stream.ENV))
        if self.spec.backend == "gymnasium":
            keywords = gymnasium.options(self.spec.id, self.options)
            return gymnasium.Gymnasium(self.spec, num_envs, seed, keywords, self.workers, self.timeout)
        keywords = envpool.options(self.spec.id, self.options, self.atari_preset, training=training)
        return envpool.EnvPool(self.spec.id, num_envs, seed, keywords, self.timeout)


def find(
    env: str,
    options: Mapping[str, str] = {},
    atari_preset: str | None = None,
    workers: Literal["threads", "processes"] = "threads",
    timeout: float = 120.0,
) -> EnvSource:
    """The environment that ``[gymnax:|envpool:|gymnasium:]ID`` or ``[gymnasium:]MODULE:NAME`` names.

    Without a prefix it is gymnax's if that has the id, else EnvPool's, else Gymnasium's. ``MODULE:NAME`` imports the
    module, and is code that runs: take it from the user, never from a file. EnvPool's Atari environments take the
    ``baselines`` preset unless another is named.

    Args:
      workers: what steps Gymnasium environments.
      timeout: seconds in which an environment on the host must answer.

    Raises:
      ConfigError: no such environment, an option it does not have, or spaces that no policy handles.
      EnvError: a Gymnasium environment's own code failed.
      TimeoutError: a Gymnasium environment has not answered in time.
    """
    prefix, module, env_id = split_env(env)
    backends = [prefix] if prefix else list(BACKENDS)
    backend = "gymnasium" if module else next((name for name in backends if env_id in BACKENDS[name].ids()), None)
    if backend is None:
        known = [known_id for name in backends for known_id in BACKENDS[name].ids()]
        where = prefix or "gymnax, envpool or gymnasium"
        raise ConfigError(
            f"--env {env}: {where} has no such environment{did_you_mean(env_id, known)}; see: jaxrl-dist list envs"
        )
    if workers != "threads" and backend != "gymnasium":
        raise ConfigError(f"--env-workers {workers} needs a Gymnasium environment, and {backend}:{env_id} is none")
    if atari_preset is None and backend == "envpool" and envpool.family(env_id) == "atari":
        atari_preset = "baselines"
    if atari_preset is not None and backend != "envpool":
        raise ConfigError(
            f"--atari-preset {atari_preset} needs an Atari environment of EnvPool, and {backend}:{env_id} is none"
        )
    if backend == "gymnax":
        spec = gymnax.make(env_id, options).spec
    elif backend == "envpool":
        spec = envpool.spec(env_id, envpool.options(env_id, options, atari_preset, training=True))
    else:
        spec = gymnasium.spec(f"{module}:{env_id}" if module else env_id, options, timeout)
    return EnvSource(_checked(spec), options, atari_preset, workers, timeout)


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
