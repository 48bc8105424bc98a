"""EnvPool environments: C++ environments on the host, stepped from a separate thread."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.envs import base, checking, conversion, env_options, episodes, goals, masks
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers
from jaxrl_dist.envs.host.calls import Caller
from jaxrl_dist.envs.native import check_counted, counted, plain
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory.frames import Frame
from jaxrl_dist.spaces import write_rows
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

ATARI_PRESETS: dict[str, dict[str, float]] = {
    # OpenAI baselines' wrappers, the protocol of Mnih et al. (2015): deterministic,
    # random no-ops at the start.
    "baselines": {
        "repeat_action_probability": 0.0,
        "noop_max": 30,
        "use_fire_reset": True,
        "episodic_life": True,
        "reward_clip": True,
        "max_episode_steps": 27_000,
    },
    # Machado et al. (2018), "Revisiting the Arcade Learning Environment", section 5:
    # sticky actions, the full game.
    "machado": {
        "repeat_action_probability": 0.25,
        "noop_max": 1,
        "use_fire_reset": False,
        "episodic_life": False,
        "reward_clip": False,
        "max_episode_steps": 27_000,  # 108,000 frames, four per step
    },
}
ATARI_TRAINING_ONLY = {"episodic_life": False, "reward_clip": False}
"""Options that evaluation turns off, to play full games for their unclipped score."""

_RESERVED = {
    "num_envs",
    "batch_size",
    "seed",
    "env_seed",
    "base_path",
    "max_num_players",
    "gym_reset_return_info",
}
_POSITIVE = {"frame_skip", "img_height", "img_width", "noop_max", "size", "stack_num"}
"""Options whose value 0 crashes the process."""
_MAX_THREADS = 1024
"""Limit on threads: EnvPool crashes the process when the system refuses a thread."""
NO_LIMIT = 2**31 - 1
"""EnvPool's value for no time limit."""


def _registry() -> Any:
    import envpool  # imported here: it takes two seconds, which a gymnax run need not wait for

    return envpool.registration.registry


_WARNINGS_LOCK = threading.Lock()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides gymnasium's warnings that float64 bounds lose precision.

    Runs in one thread at a time: warning filters belong to the process,
    so two threads would restore a mixture.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _make(env_id: str, seeds: Sequence[int], options: Mapping[str, object]) -> Any:
    with _without_warnings():  # the spaces are built on first access, with warnings
        envs = _registry().make_gymnasium(env_id, num_envs=len(seeds), seed=list(seeds), **options)
        _ = envs.observation_space, envs.action_space
    return envs


def ids() -> list[str]:
    """Returns EnvPool's ids, in its order, without those that reset in the step that ends an
    episode.
    """
    return [env_id for env_id in _registry().specs if "AutoReset" not in env_id]


def spec(env_id: str, options: Mapping[str, object], wrappers: Wrappers = UNWRAPPED) -> EnvSpec:
    """Reads the spec of ``env_id`` with the given keyword arguments, without making an environment.

    Raises:
      ConfigError: the options are invalid, a system library is missing, no policy here supports the
        spaces, or there are several players.
    """
    name = f"envpool:{env_id}"
    with _without_warnings():
        try:
            native = _registry().make_spec(env_id, **options)
            native_observation = plain(native.observation_space)
            native_action = plain(native.action_space)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"{name} cannot be made with these --env-options: {error}") from error
        except ImportError as error:  # such as Procgen without Qt
            raise ConfigError(f"{name} cannot be made on this machine: {error}") from error
    kinds = "Discrete", "MultiDiscrete", "Box", "Dict"
    plain_observation = check_counted(masks.with_arrays(native_observation), name, "observations")
    plain_action = check_counted(counted(native_action), name, "actions")
    observation = conversion.space_of(plain_observation, name, "observations", kinds)
    action = conversion.space_of(plain_action, name, "actions", kinds)
    native_mask = masks.of_parts(plain_observation, plain_action)
    observation, mask = masks.with_mask(observation, action, native_mask)
    limit = getattr(native.config, "max_episode_steps", None)
    # BabyAI's 0: the level has its limit
    if limit == NO_LIMIT or (limit == 0 and "max_episode_steps" not in options):
        limit = None
    if getattr(native.config, "max_num_players", 1) > 1:
        raise ConfigError(f"{name} has several players; use an environment with one")
    metrics = episodes.parse(wrappers.info_metrics)
    numbers = [key for key, array in native.state_array_spec.items() if array.shape == [-1]]
    episodes.check_known(metrics, _names_in_info(numbers), name)
    atari = family(env_id) == "atari"
    return EnvSpec(
        env_id,
        "envpool",
        family(env_id),
        observation,
        action,
        max_episode_steps=wrappers.limit(limit),
        frame_stack=native.config.stack_num if atari else 1,
        info_metrics=metrics,
        mask=mask,
        unread_mask=native_mask.unread or masks.of_keys(native._state_keys),
        goals=goals.known(env_id),
    )


def _names_in_info(keys: Sequence[str]) -> list[str]:
    """Returns the names in the info, without names of nested dicts, of EnvPool's ``keys``."""
    names = [key.removeprefix("info:") for key in keys if key.startswith("info:")]
    return [name for name in names if ":" not in name and "." not in name]


def options(
    env_id: str,
    texts: Mapping[str, str],
    preset: str | None,
    wrappers: Wrappers = UNWRAPPED,
    *,
    training: bool,
) -> dict[str, object]:
    """Builds EnvPool's keyword arguments; ``--env-options`` override ``--atari-preset``.

    On Atari, two wrappers become options: the time limit of a game and the number of frames in a
    stack.

    Raises:
      ConfigError: unknown option, a preset for an environment that is not Atari,
        or contradictory settings.
    """
    name = f"envpool:{env_id}"
    config = _registry().make_spec(env_id).config
    defaults = {key: value for key, value in config._asdict().items() if key not in _RESERVED}
    chosen: dict[str, Any] = {}
    if preset is not None:
        if family(env_id) != "atari":
            raise ConfigError(
                f"--atari-preset {preset} needs an Atari environment, but {name} is not one"
            )
        chosen.update(ATARI_PRESETS[preset])
        if not training:
            chosen.update(ATARI_TRAINING_ONLY)
    given = env_options.parse_options(name, texts, defaults)
    _check_ranges(name, given, defaults)
    chosen.update(given)
    if family(env_id) != "atari":
        return chosen
    frame_stack = wrappers.frame_stack
    if frame_stack is not None:
        chosen.setdefault("stack_num", frame_stack)
    if frame_stack is not None and chosen["stack_num"] != frame_stack:
        raise ConfigError(
            f"--frame-stack {frame_stack} contradicts --env-options "
            f"stack_num={texts['stack_num']}; remove one"
        )
    if wrappers.own_limit is not None:
        limit = chosen.get("max_episode_steps", defaults["max_episode_steps"])
        chosen["max_episode_steps"] = min(limit, wrappers.own_limit)
    return chosen


def _check_ranges(name: str, values: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Checks numbers that EnvPool uses unchecked for the sizes of arrays, threads and images.

    Raises:
      ConfigError: a number is too small or too large.
    """
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        default = defaults[key]
        if isinstance(default, int) and default < 0:  # -1 means no value
            continue
        low = 1 if key in _POSITIVE else 0
        if value < low:
            raise ConfigError(f"--env-options {key}={value} of {name}: {low} or more works")
        if key == "num_threads" and value > _MAX_THREADS:
            raise ConfigError(
                f"--env-options num_threads={value} of {name}: at most {_MAX_THREADS} work, and 0 "
                "stands for one a core"
            )


def default_preset(env_id: str) -> str | None:
    """Returns the default Atari preset; None if the environment is not Atari."""
    if family(env_id) == "atari":
        return "baselines"
    return None


def family(env_id: str) -> str:
    """Returns EnvPool's package of the environment, such as ``atari`` or ``classic_control``."""
    return str(_registry().specs[env_id][0]).split(".")[1]


class _Stepped(NamedTuple):
    """What EnvPool's ``step`` returns, ``[B, ...]`` each."""

    obs: PyTree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: Mapping[str, PyTree]


class EnvPool:
    """``num_envs`` EnvPool environments: a ``HostEnv``.

    EnvPool resets on the next step by itself. Its calls run in a separate thread, because it
    ignores Ctrl-C while it steps; the caller waits with a time-out. Atari frames are stacked
    elsewhere.

    Episodes are truncated here at the time limit of the spec: many of EnvPool's environments ignore
    theirs, and rewards of others depend on it. Atari counts the steps of games, which lost lives do
    not end, by itself.
    """

    def __init__(
        self,
        env_id: str,
        seeds: Sequence[int],
        options: Mapping[str, object],
        timeout: float = 120.0,
        wrappers: Wrappers = UNWRAPPED,
        *,
        drawn: bool = False,
    ) -> None:
        """Makes the environments.

        Args:
          seeds: one per environment.
          options: EnvPool's keyword arguments.
          timeout: seconds within which each call must return.
          wrappers: only ``action_repeat`` and ``time_limit`` are applied here.
          drawn: whether ``render`` will be called.
        """
        self.spec = spec(env_id, options, wrappers)
        self.num_envs = len(seeds)
        self._action_repeat = wrappers.action_repeat
        self._steps = 0
        if self.spec.family == "atari":
            self._limit = np.inf
        else:
            self._limit = self.spec.max_episode_steps or np.inf
        keywords = self._keywords(options, drawn)
        self._worker = Caller(f"envpool:{env_id}", timeout)
        try:
            self._envs = self._worker.call(lambda: _make(env_id, seeds, keywords))
        except BaseException:
            self._worker.stop()
            raise
        self._begin()
        self._lives = np.zeros(self.num_envs, np.int32)

    def _keywords(self, options: Mapping[str, object], drawn: bool) -> dict[str, object]:
        """Returns EnvPool's keyword arguments with a number of threads."""
        keywords = dict(options)
        if not keywords.get("num_threads"):
            keywords["num_threads"] = min(self.num_envs, len(os.sched_getaffinity(0)))
        if self.spec.frame_stack > 1:
            keywords["stack_num"] = 1
        if drawn:
            keywords["render_mode"] = "rgb_array"
        return keywords

    def _begin(self) -> None:
        self._ended = np.zeros(self.num_envs, bool)
        self._cut = np.zeros(self.num_envs, bool)  # where EnvPool does not reset by itself
        self._episodes = episodes.EpisodeCounter(self.num_envs, self.spec.info_metrics)

    def reset(self) -> PyTree:
        obs, info = self._worker.call(self._envs.reset)
        self._begin()
        return self._observation(obs, info, np.ones(self.num_envs, bool))

    def step(self, action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
        action = checking.checked_action(self.spec, action, self._steps)
        obs, reward, terminated, truncated, info = self._worker.call(lambda: self._advance(action))
        self._cut = ~(self._ended | terminated | truncated) & (
            self._episodes.length + 1 >= self._limit
        )
        valid, terminated, truncated = base.outcome(self._ended, terminated, truncated | self._cut)
        self._ended = terminated | truncated
        if self.spec.family == "atari":
            # info holds the unclipped reward, and whether the whole game is over
            raw_reward = info.get(f"reward{episodes.SUM}", info["reward"])
            over = truncated | (terminated & (info["terminated"] != 0))
        else:
            raw_reward = reward
            over = self._ended
        metrics = {
            metric: info.get(metric, info[episodes.field(metric)])
            for metric in self.spec.info_metrics
        }
        ended = self._episodes.add(raw_reward, valid, over, metrics)
        reward = np.where(valid, reward, 0).astype(np.float32)
        observation = self._observation(obs, info, ~valid)
        checking.check_finite(self.spec, self._steps, "reward", reward)
        self._steps += 1
        return Timestep(observation, reward, terminated, truncated, valid), ended

    def render(self, index: int) -> np.ndarray:
        try:
            return self._worker.call(lambda: self._envs.render(env_ids=np.array([index])))[0]
        except RuntimeError as error:
            raise ConfigError(f"envpool:{self.spec.id} cannot be drawn: {error}") from error

    def close(self) -> None:
        try:
            if not self._worker.hangs:
                self._worker.call(self._envs.close)
        finally:
            self._worker.stop()
            del self._envs  # EnvPool's own threads end with the last reference

    def _advance(self, action: np.ndarray) -> _Stepped:
        """Steps EnvPool once per repeat of the action; environments whose episode has ended
        wait.
        """
        first = self._first(action)
        if self._action_repeat == 1:
            return first
        obs, reward, terminated, truncated = jax.tree.map(np.copy, first[:-1])  # see _observation
        info = {name: x.copy() for name, x in first.info.items() if isinstance(x, np.ndarray)}
        summed = [metric for metric in self.spec.info_metrics if metric.endswith(episodes.SUM)]
        sums = {
            metric: info[episodes.field(metric)].copy()
            for metric in {f"reward{episodes.SUM}", *summed}
            if episodes.field(metric) in info
        }
        going = ~self._ended
        for _ in range(self._action_repeat - 1):
            going &= ~(terminated | truncated)
            if not going.any():
                break
            ids = np.flatnonzero(going)
            stepped = _Stepped(*self._envs.step(action[ids], ids))
            write_rows(ids, obs, stepped.obs)
            reward[ids] += stepped.reward
            terminated[ids] = stepped.terminated
            truncated[ids] = stepped.truncated
            for metric, total in sums.items():
                total[ids] += stepped.info[episodes.field(metric)]
            for name, value in info.items():
                value[ids] = stepped.info[name]
        return _Stepped(obs, reward, terminated, truncated, info | sums)

    def _first(self, action: np.ndarray) -> _Stepped:
        """Steps EnvPool once; resets the environments whose episode it has not ended itself."""
        if not self._cut.any():
            return _Stepped(*self._envs.step(action))
        cut = np.flatnonzero(self._cut)
        others = np.flatnonzero(~self._cut)
        obs, info = jax.tree.map(np.copy, self._envs.reset(cut))  # see _observation
        no = np.zeros(len(cut), bool)
        begun = _Stepped(obs, no.astype(np.float32), no, no, info)
        if not len(others):
            return begun
        place = np.argsort(np.concatenate([cut, others]))
        stepped = _Stepped(*self._envs.step(action[others], others))
        return jax.tree.map(lambda *rows: np.concatenate(rows)[place], begun, stepped)

    def _observation(
        self, obs: PyTree, info: Mapping[str, PyTree], resetting: np.ndarray
    ) -> PyTree:
        # Always copy: EnvPool may reuse its buffers while a device still reads them.
        obs = jax.tree.map(
            lambda space, part: np.array(part, dtype=space.dtype), self.spec.observation, obs
        )
        checking.check_finite(self.spec, self._steps, "observation", obs)
        if self.spec.frame_stack == 1:  # masks become vectors
            return jax.tree.map(
                lambda space, part: part.reshape(-1, *space.shape), self.spec.observation, obs
            )
        # EnvPool's own stacks continue over a lost life and restart with each game, as does
        # ``elapsed_step``. The exception is a game that ends during the no-ops of a reset: only the
        # number of lives shows it.
        fresh = (info["elapsed_step"] == 0) | (resetting & (info["lives"] > self._lives))
        self._lives = info["lives"].copy()
        return Frame(obs, fresh)
