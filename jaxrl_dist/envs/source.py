"""Finds environments by name: all libraries share one spec and one autoreset convention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_dist import rng
from jaxrl_dist.checks import did_you_mean, install_extra, no_env
from jaxrl_dist.config import envs
from jaxrl_dist.config.envs import LIBRARIES, OBJECT, REMOTE, env_name, split_env
from jaxrl_dist.envs import drawing
from jaxrl_dist.envs import wrappers as wrapping
from jaxrl_dist.envs.agents import host as rows
from jaxrl_dist.envs.agents.groups import Groups
from jaxrl_dist.envs.base import (
    UNWRAPPED,
    DeviceEnv,
    DrawnEnv,
    EnvSlice,
    HostEnv,
    Wrappers,
    label_of,
)
from jaxrl_dist.envs.device import gymnax, libraries
from jaxrl_dist.envs.device.hosted import HostGymnax
from jaxrl_dist.envs.host import envpool, gymnasium, remote, vector
from jaxrl_dist.envs.native import NO_MASK, Description, Mask, is_gymnax
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves
from jaxrl_dist.types import EnvSpec

__all__ = [
    "BACKENDS",
    "DeviceEnv",
    "DrawnEnv",
    "EnvSource",
    "HostEnv",
    "Wrappers",
    "find",
    "locate",
]

RECORDS = "records"
"""The backend of what a data set says about its environment, in which nobody can play."""
BACKENDS: dict[str, ModuleType] = dict(
    zip(envs.BACKENDS, (gymnax, envpool, gymnasium), strict=True)
)


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
    """The spec before the wrappers ``hide`` and ``frame_stack``; None: not known."""

    @property
    def is_pure(self) -> bool:
        """Whether the environment is pure functions, which run on any device; if not,
        it runs on the host.
        """
        return self.pure is not None

    def device(self) -> DeviceEnv:
        """Returns the environment as pure functions.

        Raises:
          ConfigError: the backend runs on the host only.
        """
        if self.pure is None:
            raise ConfigError(
                f"{label_of(self.spec)} runs on the host, where --plan on_device cannot compile "
                "it; use --plan synchronous"
            )
        return self.pure

    def host(
        self,
        share: EnvSlice | int,
        seed: int | Sequence[int],
        *,
        training: bool = True,
        drawn: bool = False,
    ) -> DrawnEnv:
        """Makes environments on the host.

        Args:
          share: the part of the run's environments to make, or their number to make all. A seed
            depends on ``seed`` and on the environment's index within the run, not on the share.
          seed: the run's seed; for several runs, whose environments follow each other,
            a list of seeds.
          training: False for evaluation, which plays full Atari games.
          drawn: whether ``render`` will be called.

        Raises:
          ConfigError: ``drawn`` is set and the environment cannot be drawn.
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        if self.spec.backend == RECORDS:
            raise ConfigError(
                "this run has learnt from records without an environment; name one with --env"
            )
        if isinstance(share, int):
            share = EnvSlice.all(share)
        run_seeds = seed if isinstance(seed, Sequence) else [seed]
        if self.pure is not None:
            if drawn:
                drawing.check_drawable(self.pure.spec, self.pure.render)
            keys = jnp.stack([rng.stream(run_seed, rng.Stream.ENV) for run_seed in run_seeds])
            return HostGymnax(self.pure, share.size * len(run_seeds), keys, share.first)
        agents = self.spec.num_agents
        env_share = EnvSlice(share.first // agents, share.size // agents, share.total // agents)
        seeds = [env_seed for run_seed in run_seeds for env_seed in env_share.seeds(run_seed)]
        if self.spec.backend == "gymnasium":
            env = self._gymnasium(seeds, drawn=drawn)
        elif self.spec.backend == REMOTE:
            assert self.native is not None, "find() has it"
            env = remote.Remote(self.native, len(seeds), self.options, self.timeout, drawn=drawn)
        else:
            env = self._envpool(seeds, drawn=drawn, training=training)
        return wrapping.on_host(env, self.wrappers)

    def _envpool(self, seeds: Sequence[int], *, drawn: bool, training: bool) -> DrawnEnv:
        env_id = self.spec.id
        keywords = envpool.options(
            env_id, self.options, self.atari_preset, self.wrappers, training=training
        )
        return envpool.EnvPool(env_id, seeds, keywords, self.timeout, self.wrappers, drawn=drawn)

    def _gymnasium(self, seeds: Sequence[int], *, drawn: bool) -> DrawnEnv:
        make: Callable[..., DrawnEnv] = vector.drawn if drawn else vector.Gymnasium
        env = make(
            rows.whole(self.team) if self.team else self.native,
            seeds,
            gymnasium.options(self.spec.id, self.options),
            workers=self.workers,
            timeout=self.timeout,
            wrappers=self.wrappers,
            mask=self.mask,
            agents=self.team.agents if self.team else (),
        )
        return rows.Rows(env, self.team) if self.team else env


def find(
    env: Any,
    options: Mapping[str, str] = {},
    atari_preset: str | None = None,
    workers: Literal["threads", "processes"] = "threads",
    timeout: float = 120.0,
    wrappers: Wrappers = UNWRAPPED,
) -> EnvSource:
    """Finds an environment by ``[gymnax:|envpool:|gymnasium:]ID`` or
    ``[gymnax:|gymnasium:]MODULE:NAME``, or in one of ``config.envs.LIBRARIES`` by ``LIBRARY:ID``;
    ``remote:HOST:PORT`` is played by clients.

    Without a prefix, the first of gymnax, EnvPool and Gymnasium that has the id provides it.
    ``MODULE:NAME`` imports and runs code: take it from the user, never from a file. The object that
    it makes determines the backend. EnvPool's Atari environments use the ``baselines`` preset by
    default.

    Args:
      env: a name, a gymnax-style environment object (see ``native.is_gymnax``) or a function that
        returns one. For a function with a name, prefer ``config.envs.named_env``,
        because any process can find it.
      options: ``--env-options``.
      atari_preset: ``baselines`` or ``machado``, for EnvPool's Atari environments.
      workers: step Gymnasium environments in threads or in processes.
      timeout: seconds within which an environment on the host must answer.
      wrappers: settings of the wrappers between environment and policy.

    Raises:
      ConfigError: unknown environment, unknown option, no policy supports the spaces, or the
        observations cannot be stacked.
      EnvError: an environment's own code failed.
      TimeoutError: a Gymnasium environment has not answered in time.
    """
    made: EnvSpec | DeviceEnv | Groups
    mask = NO_MASK
    name = env_name(env)
    backend, env_id, made_by = locate(env) if isinstance(env, str) else Located("", name)
    if backend == "envpool":
        atari_preset = atari_preset or envpool.default_preset(env_id)
        keywords = envpool.options(env_id, options, atari_preset, wrappers, training=True)
        made = envpool.spec(env_id, keywords, wrappers)
    elif backend == "gymnasium":
        adapt = partial(gymnax.adapt, env_id=env_id, backend="gymnax", wrappers=wrappers)
        result = gymnasium.describe_or_adapt(env_id, options, timeout, workers, adapt)
        made, mask = _adapted(env_id, result, wrappers)
    elif backend == REMOTE:
        made, options = remote.find(env_id, options, timeout, wrappers)
    else:
        native = _native(backend, env, env_id, options)
        made = gymnax.adapt(native, env_id, backend or "gymnax", wrappers)
    whole = made if isinstance(made, EnvSpec) else made.spec
    if made_by not in (None, whole.backend):
        raise ConfigError(
            f"--env {name} makes no {made_by} environment; --env {env_id} finds out which it is"
        )
    _check_settings(name, whole, workers, atari_preset, wrappers)
    spec = _checked(wrapping.wrapped(whole, wrappers)[0])
    pure = wrapping.on_device(made, wrappers) if isinstance(made, DeviceEnv) else None
    team = made if isinstance(made, Groups) else None
    return EnvSource(
        spec, options, atari_preset, workers, timeout, wrappers, pure, mask, team, whole
    )


def _check_settings(
    name: str, spec: EnvSpec, workers: str, atari_preset: str | None, wrappers: Wrappers
) -> None:
    """Raises ``ConfigError`` for settings of several agents where there is one,
    and for those of another backend.
    """
    if wrappers.policies and not spec.policies:
        raise ConfigError(
            f"several policies need an environment of several agents, but {name} has one"
        )
    if wrappers.agent_ids and spec.num_agents == 1 and not (spec.policies or wrappers.joint):
        raise ConfigError(f"--agent-ids needs an environment of several agents, but {name} has one")
    if workers != "threads" and spec.backend != "gymnasium":
        raise ConfigError(
            f"--env-workers {workers} needs a Gymnasium environment, but {label_of(spec)} is not "
            "one"
        )
    if atari_preset is not None and spec.backend != "envpool":
        raise ConfigError(
            f"--atari-preset {atari_preset} needs an Atari environment of EnvPool, but "
            f"{label_of(spec)} is not one"
        )


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
        raise ConfigError(f"--env {env} was a Python object, which cannot be found by its name")
    backends = [prefix] if prefix else list(BACKENDS)
    if prefix == REMOTE:
        return Located(prefix, env_id)
    if prefix in LIBRARIES:
        libraries.library_with(prefix, env_id)
        return Located(prefix, env_id)
    if module is not None:
        return Located("gymnasium", f"{module}:{env_id}", prefix)
    for backend in backends:
        if backend == "envpool":
            _check_envpool(env, prefix, env_id)
        if env_id in BACKENDS[backend].ids():
            return Located(backend, env_id)
    known = [known_id for name in backends for known_id in BACKENDS[name].ids()]
    where = prefix or "gymnax, envpool or gymnasium"
    near = did_you_mean(env_id, known) if prefix else _near(env_id, known)
    raise ConfigError(
        f"--env {env}: {where} has no such environment{near}; see: jaxrl-dist list envs"
    )


def _check_envpool(env: str, prefix: str | None, env_id: str) -> None:
    """Refuses an environment where EnvPool is missing.

    A name without a prefix that gymnax does not have could be EnvPool's. It never stands for
    Gymnasium's environment of that name, whose rewards may differ: what a name means does not
    depend on what is installed.

    Raises:
      ConfigError: it is missing.
    """
    if libraries.installed("envpool"):
        return
    install = install_extra("envpool")
    if prefix:
        raise ConfigError(f"--env {env}: EnvPool is not installed: {install}")
    is_atari = env_id.endswith("-v5")
    near = "" if is_atari else _near(env_id, gymnax.ids())
    other = f", or name gymnasium:{env_id}" if env_id in gymnasium.ids() else ""
    raise ConfigError(
        f"--env {env}: gymnax has no such environment{near}, and EnvPool, which is tried next, "
        f"is not installed: {install}{other}"
    )


def _near(env_id: str, known: Sequence[str]) -> str:
    """Returns a hint: the name nearest to one without a prefix,
    or the same name in another library, if there is one.

    That search imports libraries, which takes seconds: it begins where no name is near, or where
    the name has an underscore, as theirs do.
    """
    near = did_you_mean(env_id, known)
    if near and "_" not in env_id:
        return near
    for library in filter(libraries.installed, LIBRARIES):
        with contextlib.suppress(ConfigError):  # it cannot be imported
            if env_id in libraries.load(library).ids():
                return f" (did you mean '{library}:{env_id}'?)"
    return near


def _adapted(
    env_id: str, result: Description | DeviceEnv, wrappers: Wrappers
) -> tuple[EnvSpec | DeviceEnv | Groups, Mask]:
    """Returns what policies see of the result of ``gymnasium.describe_or_adapt``,
    and the mask that they read.
    """
    if isinstance(result, DeviceEnv):
        return result, NO_MASK
    if result.agents:
        return rows.divided(env_id, result, wrappers), NO_MASK
    mask = NO_MASK if result.mask.unread else result.mask
    return gymnasium.spec(env_id, result, wrappers), mask


def _native(backend: str, env: Any, env_id: str, options: Mapping[str, str]) -> Any:
    """Makes the environment of a JAX library or, without a backend, returns that of the user."""
    if not backend:
        return _object(env, options)
    if backend == "gymnax":
        return gymnax.native(env_id, options)
    return libraries.make(backend, env_id, options)


def _object(env: Any, options: Mapping[str, str]) -> Any:
    """Returns the gymnax-style environment that the user has passed, or whose function."""
    if options:
        raise ConfigError(
            f"env_options need an environment with a name, but {env_name(env)} has none"
        )
    if is_gymnax(env):
        return env
    if not callable(env):
        raise no_env(f"not a {type(env).__name__}")
    made = env()
    if not is_gymnax(made):
        raise no_env(
            f"but this function, which no module has by name, returns a {type(made).__name__}"
        )
    return made


def _checked(spec: EnvSpec) -> EnvSpec:
    """Returns the spec after checking that options have left it valid.

    Raises:
      ConfigError: the time limit is below one step, or observations are empty.
    """
    if spec.max_episode_steps is not None and spec.max_episode_steps < 1:
        raise ConfigError(
            f"{label_of(spec)} has a time limit of {spec.max_episode_steps} steps; set it to 1 or "
            "more"
        )
    for path, part in leaves(spec.observation).items():
        if any(size < 1 for size in part.shape):
            where = f" at {path}" if path else ""
            raise ConfigError(
                f"{label_of(spec)}: observations of shape {part.shape}{where} hold nothing"
            )
    return spec
