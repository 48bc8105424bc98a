"""Environments by name: gymnax and EnvPool behind one spec and one autoreset convention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_dist import rng
from jaxrl_dist.config import ConfigError, did_you_mean
from jaxrl_dist.envs import envpool, gymnax
from jaxrl_dist.envs.base import DeviceEnv, HostEnv
from jaxrl_dist.types import EnvSpec

__all__ = ["BACKENDS", "DeviceEnv", "EnvSource", "HostEnv", "find"]

BACKENDS = {"gymnax": gymnax, "envpool": envpool}


class EnvSource(NamedTuple):
    """An environment that can be made as often as needed, on the device or on the host."""

    spec: EnvSpec
    options: Mapping[str, str]
    atari_preset: str | None

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
        """``num_envs`` environments on the host; those for evaluation play full Atari games."""
        if self.spec.backend == "gymnax":
            return gymnax.HostGymnax(self.device(), num_envs, rng.stream(seed, rng.Stream.ENV))
        keywords = envpool.options(self.spec.id, self.options, self.atari_preset, training=training)
        return envpool.EnvPool(self.spec.id, num_envs, seed, keywords)


def find(env: str, options: Mapping[str, str] = {}, atari_preset: str | None = None) -> EnvSource:
    """The environment that ``[gymnax:|envpool:]ID`` names; without a prefix gymnax's if it has the id, else EnvPool's.

    Atari environments take the ``baselines`` preset unless another is named.

    Raises:
      ConfigError: no such environment, an option it does not have, or spaces that no policy handles.
    """
    prefix, colon, env_id = env.rpartition(":")
    if colon and prefix not in BACKENDS:
        raise ConfigError(
            f"--env {env}: unknown backend {prefix!r}{did_you_mean(prefix, BACKENDS)}; gymnax and envpool work"
        )
    backends = [prefix] if colon else list(BACKENDS)
    backend = next((name for name in backends if env_id in BACKENDS[name].ids()), None)
    if backend is None:
        known = [known_id for name in backends for known_id in BACKENDS[name].ids()]
        where = prefix or "gymnax or envpool"
        raise ConfigError(
            f"--env {env}: {where} has no such environment{did_you_mean(env_id, known)}; see: jaxrl-dist list envs"
        )
    if backend == "gymnax":
        if atari_preset is not None:
            raise ConfigError(f"--atari-preset {atari_preset} needs an Atari environment, and gymnax:{env_id} is none")
        return EnvSource(_checked(gymnax.make(env_id, options).spec), options, None)
    if atari_preset is None and envpool.family(env_id) == "atari":
        atari_preset = "baselines"
    spec = envpool.spec(env_id, envpool.options(env_id, options, atari_preset, training=True))
    return EnvSource(_checked(spec), options, atari_preset)


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
