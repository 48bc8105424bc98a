"""Plays a Gymnasium environment, twice with the same seed and once with another."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as library
import jax
import numpy as np

from jaxrl_dist.commands.check_env.findings import SECONDS, STEPS, Check
from jaxrl_dist.envs import goals, masks
from jaxrl_dist.envs.agents.pettingzoo import OBS, Parallel
from jaxrl_dist.envs.conversion import space_of
from jaxrl_dist.envs.masks import PART
from jaxrl_dist.envs.native import RESET, STEP, Mask, env_label, inside, plain
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, leaves
from jaxrl_dist.types import PyTree

SEED = 0
OTHER_SEED = 1


class _Step(NamedTuple):
    obs: Any
    reward: float
    ended: bool


def check_gymnasium(check: Check, env: Any, make: Callable[[], Any], name: str) -> None:
    """Checks the environment ``env``; ``make`` makes further ones."""
    if not isinstance(env, library.Env):
        kind = type(env).__name__
        raise check.stop(
            "kind", f"is a {kind}, neither a gymnasium.Env nor a gymnax-style environment"
        )
    for role in ("observation", "action"):
        _check_space(check, env, role, name)
    check.halt()
    known = goals.known(name) or getattr(type(env.unwrapped), "goals", None)
    check.goals(getattr(env.observation_space, "spaces", ()), known=known is not None)
    offered = _masks_of(check, env, make())
    player = _Player(check, env, offered)
    played = player.play(SEED, STEPS)
    check.steps = len(played) - 1
    check.ends(player.lengths, player.both, player.truncated, "as truncated")
    twin = _Player(check, make(), offered)
    _check_seeds(check, player, twin, played)
    check.call("close", player.env.close)
    check.call("close", twin.env.close)


def _check_space(check: Check, env: Any, role: str, name: str) -> None:
    space = check.call(f"its {role}_space", getattr, env, f"{role}_space", None)
    if space is None:
        return check.fault(role, f"its {role}_space is missing")
    if not isinstance(space, library.spaces.Space):
        kind = type(space).__name__
        return check.fault(role, f"its {role}_space is a {kind}, not a space of Gymnasium's")
    try:
        parts = leaves(space_of(plain(space), env_label("gymnasium", name), f"{role}s"))
    except ConfigError as error:
        return check.fault(role, error.with_flags)
    for part in parts.values():
        whole = isinstance(part, Box) and not np.issubdtype(part.dtype, np.floating)
        if role == "action" and whole:
            check.fault(role, f"its action_space is a Box of {part.dtype}; a Box of floats works")


def _masks_of(check: Check, env: Any, scout: Any) -> Mapping[str, Mask]:
    """Returns the action mask of each agent, or of ``""``, and adds notes on them.

    Args:
      scout: another environment, which is reset once more than the others.
    """
    if isinstance(scout, Parallel):
        offered = scout.description().agents or {}
        shown = list(scout.masks().values())
    else:
        if problem := inside(env):
            check.notes.append(problem)
        spaces = plain(env.observation_space), plain(env.action_space)
        offered = {"": check.call("reset", masks.of_gymnasium, scout, *spaces)}
        shown = list(offered.values())
    check.call("close", scout.close)
    for mask in dict.fromkeys(shown):
        check.masked(mask)
    return offered


def _check_seeds(check: Check, player: _Player, twin: _Player, played: list[_Step]) -> None:
    """Checks that seeds decide what happens: ``twin`` plays what ``player`` has ``played``."""
    first = player.reset(SEED)
    again = twin.play(SEED, min(len(played) - 1, 200))
    if not _same(played[0].obs, again[0].obs):
        return check.fault(
            "seed", "two environments with the same seed start differently: reset ignores its seed"
        )
    if not _same(played[0].obs, first):
        return check.fault(
            "fresh",
            "reset with the same seed starts differently after some episodes; reset must clear "
            "what they left",
        )
    for step, (now, then) in enumerate(zip(again, played, strict=False)):
        if _same(now, then):
            continue
        if not player.lengths or step <= player.lengths[0]:
            return check.fault(
                "deterministic",
                "the same seed and actions lead elsewhere the second time; draw random numbers "
                "from the seeded generator",
            )
        return check.fault(
            "unseeded",
            "the same seed and actions lead elsewhere after a reset without a seed; continue with "
            "the generator of the last seed",
        )
    other = twin.play(OTHER_SEED, len(again) - 1)
    differ = any(not _same(obs, player.firsts[0]) for obs in player.firsts)
    if differ and all(map(_same, again, other)):
        check.fault(
            "seed",
            "every seed gives the same episodes, which differ from each other: "
            "reset ignores its seed",
        )


def _same(x: PyTree, y: PyTree) -> bool:
    """Returns True if two trees of numbers are equal bit for bit; NaN equals NaN."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(
        np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


def _choose(actions: Any, flags: np.ndarray) -> np.ndarray:
    """Draws an action of several components; where a component has no legal value, any one."""
    sizes = [2] * int(np.prod(actions.shape))
    if hasattr(actions, "nvec"):
        sizes = [int(n) for n in actions.nvec.flat]
    drawn = []
    for component in np.split(flags, np.cumsum(sizes)[:-1]):
        legal = component if component.any() else component + 1
        drawn.append(actions.np_random.choice(np.flatnonzero(legal)))
    action = np.array(drawn).reshape(actions.shape)
    return (action + getattr(actions, "start", 0)).astype(actions.dtype)


class _Player:
    """Plays a Gymnasium environment with random actions, the same ones each time."""

    def __init__(self, check: Check, env: Any, offered: Mapping[str, Mask]) -> None:
        """``offered``: the mask of each agent, or of ""."""
        self.env = env
        self._masks = {
            agent: mask for agent, mask in offered.items() if mask.where and not mask.unread
        }
        self._legal: dict[str, np.ndarray] = {}
        self.firsts: list[Any] = []  # the first observation of each episode
        self.lengths: list[int] = []
        self.both = self.truncated = self._steps = 0
        self._check = check
        self._last: tuple[Any, bytes, str] | None = None

    def play(self, seed: int, steps: int) -> list[_Step]:
        """Plays ``steps`` steps and resets after each episode; the first entry is the first
        reset.
        """
        actions = copy.deepcopy(self.env.action_space)
        actions.seed(0)
        began = time.monotonic()
        played = [_Step(self.reset(seed), 0.0, False)]
        self.firsts.append(played[0].obs)
        length = 0
        for _ in range(steps):
            step = self._step(self._sample(actions))
            length += 1
            played.append(step)
            if step.ended:
                self.lengths.append(length)
                length = 0
                self.firsts.append(self.reset(None))
            if time.monotonic() - began > SECONDS:
                break
        return played

    def _sample(self, actions: library.spaces.Space[Any], agent: str = "") -> Any:
        """Draws a legal action, of each agent."""
        if isinstance(actions, library.spaces.Dict) and not agent:
            return {name: self._sample(space, name) for name, space in actions.items()}
        legal = self._legal.get(agent)
        if legal is None or not legal.any():
            return actions.sample()
        flags = legal.astype(np.int8)
        if isinstance(actions, library.spaces.Discrete):
            return actions.sample(mask=flags)
        return _choose(actions, flags)

    def _read_masks(self, where: str, obs: Any, info: Any, *, ended: bool) -> None:
        """Reads which actions are legal now."""
        for agent, mask in self._masks.items():
            value = self._check.call(
                f"the action mask of {where}", self._mask_of, agent, mask, obs, info
            )
            space = self.env.action_space[agent] if agent else self.env.action_space
            wanted = plain(space).num_choices
            legal = masks.flat(value, wanted)
            if legal is None:
                raise self._check.stop(
                    "mask",
                    f"the action mask of {where} is {value!r:.80}, not {wanted} zeros and ones",
                )
            self._legal[agent] = legal
            if not ended and (not agent or agent in map(str, self.env.going())):
                at = f" {self._steps}" if where == "step" else ""
                self._check.legal(f"{where}{at}{agent and f' for {agent}'}", legal)

    def _mask_of(self, agent: str, mask: Mask, obs: Any, info: Any) -> Any:
        if mask.where == "method":
            return self.env.get_wrapper_attr(mask.name)()
        if agent and mask.where == "info":
            return obs[PART][agent]
        if agent:
            return obs[OBS][agent][mask.name]
        return (obs if mask.where == "part" else info)[mask.name]

    def reset(self, seed: int | None) -> Any:
        """Resets the environment and returns its first observation."""
        if seed is None:
            out = self._check.call("reset()", self.env.reset)
        else:
            out = self._check.call(f"reset(seed={seed})", self.env.reset, seed=seed)
        obs, info = self._check.returned("reset", out, RESET)
        return self._received("reset", obs, info, ended=False)

    def _step(self, action: Any) -> _Step:
        check = self._check
        before = copy.deepcopy(action)
        out = check.call("step", self.env.step, action)
        if not _same(action, before):
            check.fault("action", "step changes the action array that it gets; copy it first")
        obs, reward, terminated, truncated, info = check.returned("step", out, STEP)
        self._steps += 1
        check.number("the reward", reward)
        check.flag("terminated", terminated)
        check.flag("truncated", truncated)
        self.both += bool(np.all(terminated)) and bool(np.all(truncated))
        self.truncated += bool(np.any(truncated))
        number = 0.0
        if "reward" not in check.faults:
            number = float(np.asarray(reward, float).sum())
        ended = bool(np.any(terminated)) or bool(np.any(truncated))
        return _Step(self._received("step", obs, info, ended=ended), number, ended)

    def _received(self, where: str, obs: Any, info: Any, *, ended: bool) -> Any:
        """Checks an observation and its info,
        and that the previous one has not changed since; returns a copy.
        """
        check = self._check
        check.info(where, info)
        if self._last is not None:
            last, content, call = self._last
            if last.tobytes() != content:
                check.fault(
                    "alias",
                    f"the observation of {call} changes with the next call: return a copy of it",
                )
        self._last = None
        if isinstance(obs, np.ndarray) and obs.dtype != object:
            self._last = (obs, obs.tobytes(), where)
        check.observation(where, obs, self.env.observation_space)
        self._read_masks(where, obs, info, ended=ended)
        return copy.deepcopy(obs)
