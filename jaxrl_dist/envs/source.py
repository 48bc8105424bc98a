"""Finds environments by name: gymnax, EnvPool and Gymnasium share one spec and one autoreset convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_dist import rng
from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config import train
from jaxrl_dist.config.train import LIBRARIES, OBJECT, env_name, split_env
from jaxrl_dist.envs import hidden, stacks
from jaxrl_dist.envs.agents import host as rows
from jaxrl_dist.envs.agents.groups import Groups
from jaxrl_dist.envs.base import UNWRAPPED, DeviceEnv, DrawnEnv, EnvSlice, HostEnv, Wrappers
from jaxrl_dist.envs.device import gymnax, libraries
from jaxrl_dist.envs.host import envpool, gymnasium, vector
from jaxrl_dist.envs.native import NO_MASK, Mask, is_gymnax
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves
from jaxrl_dist.types import EnvSpec

__all__ = ["BACKENDS", "DeviceEnv", "DrawnEnv", "EnvSource", "HostEnv", "Wrappers", "find", "locate"]

_MODULES: dict[str, ModuleType] = {"gymnax": gymnax, "envpool": envpool, "gymnasium": gymnasium}
BACKENDS = {name: _MODULES[name] for name in train.BACKENDS}


class EnvSource(NamedTuple):
    """Makes an environment any number of times, on the device or on the host."""

    spec: EnvSpec
    """The spec with all wrappers applied."""
    options: Mapping[str, str]
    atari_preset: str | None = None
    workers: Literal["threads", "processes"] = "threads"
    timeout: float = 120.0
    wrappers: Wrappers = UNWRAPPED
    pure: DeviceEnv | None = None
    """The environment as pure functions with all wrappers; None if it runs on the host only."""
    mask: Mask = NO_MASK
    """Where a Gymnasium environment says which actions are legal."""
    team: Groups | None = None
    """The agents of a PettingZoo environment; None for other environments."""
    native: EnvSpec | None = None
    """The spec before the wrappers ``hide`` and ``frame_stack``; None: they change nothing."""

    @property
    def is_pure(self) -> bool:
        """Whether the environment is pure functions, which run on any device; if not, it runs on the host."""
        return self.pure is not None

    def device(self) -> DeviceEnv:
        """Returns the environment as pure functions.

        Raises:
          ConfigError: the backend runs on the host only.
        """
        if self.pure is None:
            raise ConfigError(
                f"{self.spec.backend}:{self.spec.id} runs on the host, so --plan on_device cannot compile it; "
                "use --plan synchronous"
            )
        return self.pure

    def host(
        self, share: EnvSlice | int, seed: int | Sequence[int], *, training: bool = True, drawn: bool = False
    ) -> DrawnEnv:
        """Makes environments on the host.

        Args:
          share: the part of the run's environments to make, or their number to make all. A seed depends on
            ``seed`` and on the environment's index within the run, not on the share.
          seed: the run's seed; for several runs, whose environments follow each other, a list of seeds.
          training: False for evaluation, which plays full Atari games.
          drawn: whether ``render`` will be called.

        Raises:
          ConfigError: ``drawn`` is set and the environment cannot be drawn.
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        share = EnvSlice.all(share) if isinstance(share, int) else share
        runs = seed if isinstance(seed, Sequence) else [seed]
        if self.pure is not None:
            keys = jnp.stack([rng.stream(seed, rng.Stream.ENV) for seed in runs])
            return gymnax.HostGymnax(self.pure, share.size * len(runs), keys, share.first)
        env_id, wrappers = self.spec.id, self.wrappers
        envs = EnvSlice._make(number // self.spec.num_agents for number in share)
        seeds = [seed for run in runs for seed in envs.seeds(run)]
        if self.spec.backend == "gymnasium":
            keywords = gymnasium.options(env_id, self.options)
            how = self.workers, self.timeout, wrappers, self.mask
            make = vector.drawn if drawn else vector.Gymnasium
            if self.team is not None:
                env: DrawnEnv = rows.Rows(make(rows.whole(self.team), seeds, keywords, *how), self.team)
            else:
                env = make(self.native or self.spec, seeds, keywords, *how)
        else:
            keywords = envpool.options(env_id, self.options, self.atari_preset, wrappers, training=training)
            env = envpool.EnvPool(env_id, seeds, keywords, self.timeout, wrappers, drawn=drawn)
        if wrappers.hide is not None:
            env = hidden.Hidden(env, wrappers.hide)
        return env if env.spec.frame_stack == self.spec.frame_stack else stacks.Stacked(env, self.spec)


def find(
    env: Any,
    options: Mapping[str, str] = {},
    atari_preset: str | None = None,
    workers: Literal["threads", "processes"] = "threads",
    timeout: float = 120.0,
    wrappers: Wrappers = UNWRAPPED,
) -> EnvSource:
    """Finds an environment by ``[gymnax:|envpool:|gymnasium:]ID`` or ``[gymnax:|gymnasium:]MODULE:NAME``, or in one of
    ``config.LIBRARIES`` by ``LIBRARY:ID``.

    Without a prefix, the first of gymnax, EnvPool and Gymnasium that has the id provides it. ``MODULE:NAME`` imports
    and runs code: take it from the user, never from a file. The object that it makes determines the backend. EnvPool's
    Atari environments use the ``baselines`` preset by default.

    Args:
      env: a name, a gymnax-style environment object (see ``native.is_gymnax``) or a function that returns one. For a
        function with a name, prefer ``config.named_env``, because any process can find it.
      options: ``--env-options``.
      atari_preset: ``baselines`` or ``machado``, for EnvPool's Atari environments.
      workers: step Gymnasium environments in threads or in processes.
      timeout: seconds within which an environment on the host must answer.
      wrappers: settings of the wrappers between environment and policy.

    Raises:
      ConfigError: unknown environment, unknown option, no policy supports the spaces, or the observations cannot be
        stacked.
      EnvError: an environment's own code failed.
      TimeoutError: a Gymnasium environment has not answered in time.
    """
    if isinstance(env, str):
        found, mask = _of_name(env, options, atari_preset, workers, timeout, wrappers)
    else:
        found, mask = _of_object(env, options, wrappers), NO_MASK
    team = found if isinstance(found, Groups) else None
    made = found.spec if isinstance(found, Groups) else found
    _check_agents(env, _spec(made), wrappers)
    native = None if isinstance(made, DeviceEnv) else made
    if wrappers.hide is not None:
        made = hidden.hidden(made, wrappers.hide)
    if wrappers.frame_stack is not None:
        made = stacks.stacked(made, wrappers.frame_stack)
    pure = made if isinstance(made, DeviceEnv) else None
    spec = _checked(_spec(made))
    atari_preset = _settings(spec, workers, atari_preset)
    return EnvSource(spec, options, atari_preset, workers, timeout, wrappers, pure, mask, team, native)


def _spec(made: EnvSpec | DeviceEnv) -> EnvSpec:
    return made.spec if isinstance(made, DeviceEnv) else made


def _check_agents(env: Any, spec: EnvSpec, wrappers: Wrappers) -> None:
    """Raises ``ConfigError`` for settings of several agents where there is one."""
    if wrappers.policies and not spec.policies:
        raise ConfigError(f"--policies are for environments of several agents, and {env_name(env)} has one")
    if wrappers.agent_ids and not (spec.num_agents > 1 or spec.policies or wrappers.joint):
        raise ConfigError(f"--agent-ids is for environments of several agents, and {env_name(env)} has one")


def _settings(spec: EnvSpec, workers: str, atari_preset: str | None) -> str | None:
    """Returns the Atari preset after checking the settings of one backend.

    Raises:
      ConfigError: they are those of another backend.
    """
    name = f"{spec.backend}:{spec.id}"
    if workers != "threads" and spec.backend != "gymnasium":
        raise ConfigError(f"--env-workers {workers} needs a Gymnasium environment, and {name} is none")
    if spec.backend == "envpool":
        return atari_preset or envpool.default_preset(spec.id)
    if atari_preset is not None:
        raise ConfigError(f"--atari-preset {atari_preset} needs an Atari environment of EnvPool, and {name} is none")
    return None


class Located(NamedTuple):
    """The backend and id of an environment's name."""

    backend: str
    """For ``MODULE:NAME`` it is ``gymnasium`` until the environment is made."""
    name: str
    """``ID`` or ``MODULE:NAME``."""
    made_by: str | None = None
    """The backend that the user named as a prefix of ``MODULE:NAME``; None: either."""


def locate(env: str) -> Located:
    """Finds the backend of a name, without importing the user's module.

    Raises:
      ConfigError: unknown environment.
    """
    prefix, module, env_id = split_env(env)
    if module == OBJECT:
        raise ConfigError(f"--env {env} names an object handed over from Python, which cannot be found by its name")
    backends = [prefix] if prefix else list(BACKENDS)
    if prefix in LIBRARIES:
        libraries.check(prefix, env_id)
        return Located(prefix, env_id)
    if module is not None:
        return Located("gymnasium", f"{module}:{env_id}", prefix)
    backend = next((name for name in backends if env_id in BACKENDS[name].ids()), None)
    if backend is None:
        known = [known_id for name in backends for known_id in BACKENDS[name].ids()]
        where = prefix or "gymnax, envpool or gymnasium"
        raise ConfigError(
            f"--env {env}: {where} has no such environment{did_you_mean(env_id, known)}; see: jaxrl-dist list envs"
        )
    return Located(backend, env_id)


def _of_name(
    env: str,
    options: Mapping[str, str],
    atari_preset: str | None,
    workers: Literal["threads", "processes"],
    timeout: float,
    wrappers: Wrappers,
) -> tuple[EnvSpec | DeviceEnv | Groups, Mask]:
    backend, name, made_by = locate(env)
    if backend == "gymnax":
        return gymnax.make(name, options, wrappers), NO_MASK
    if backend in LIBRARIES:
        return gymnax.adapt(libraries.make(backend, name, options), name, backend, wrappers), NO_MASK
    if backend == "envpool":
        preset = atari_preset or envpool.default_preset(name)
        keywords = envpool.options(name, options, preset, wrappers, training=True)
        return envpool.spec(name, keywords, wrappers), NO_MASK

    found = gymnasium.look(name, options, timeout, workers, lambda made: gymnax.adapt(made, name, "gymnax", wrappers))
    if made_by not in (None, "gymnax" if isinstance(found, DeviceEnv) else "gymnasium"):
        raise ConfigError(f"--env {env} makes no {made_by} environment; --env {name} finds out which it is")
    if isinstance(found, DeviceEnv):
        return found, NO_MASK
    if found.agents:
        return rows.divided(name, found, wrappers), NO_MASK
    return gymnasium.spec(name, found, wrappers), NO_MASK if found.mask.unread else found.mask


def _of_object(env: Any, options: Mapping[str, str], wrappers: Wrappers) -> DeviceEnv:
    name = env_name(env)
    if options:
        raise ConfigError(f"env_options are for environments that are found by name, and {name} has none")
    made = env() if callable(env) and not is_gymnax(env) else env
    if not is_gymnax(made):
        kind = type(made).__name__
        what = f"not a {kind}" if made is env else f"and this function, which no module has by name, returns a {kind}"
        raise ConfigError(
            f"env must be a name, or a gymnax-style environment with reset_env and step_env, {what}; to train on a "
            "gymnasium.Env, pass a function of a module or notebook that makes it: def make() and env=make"
        )
    return gymnax.adapt(made, name, "gymnax", wrappers)


def _checked(spec: EnvSpec) -> EnvSpec:
    """Returns the spec after checking that options have left it valid.

    Raises:
      ConfigError: the time limit is below one step, or observations are empty.
    """
    if spec.max_episode_steps is not None and spec.max_episode_steps < 1:
        raise ConfigError(f"{spec.backend}:{spec.id}: a time limit of {spec.max_episode_steps} steps; 1 or more works")
    for path, part in leaves(spec.observation).items():
        if any(size < 1 for size in part.shape):
            where = f" at {path}" if path else ""
            raise ConfigError(f"{spec.backend}:{spec.id}: observations of shape {part.shape}{where} hold nothing")
    return spec
