"""Adapts PettingZoo's multi-agent environments to Gymnasium:
one observation holds those of all agents.

So worker threads and processes step them like others, and ``host.Rows`` makes each agent a row of
its policy's batch. This module imports no JAX, because worker processes import it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from jaxrl_dist.envs.masks import NAMES, PART, flat, of_parts, of_value
from jaxrl_dist.envs.native import (
    NO_MASK,
    Description,
    Mask,
    check_agents,
    flag,
    number,
    plain,
    render_fps,
    returned,
)

OBS = "obs"
THERE = "there"
FLAGS = ("terminated", "truncated")
"""Parts of the observation: what agents see, whether each was there before the step,
and how its episode ends."""

RETURNED = ("observations", "rewards", "terminations", "truncations", "infos")
"""What ``step`` of an environment returns, each keyed by agent;
``reset`` returns the first and the last."""


def is_parallel(made: Any) -> bool:
    """Returns True for an environment of PettingZoo's parallel API, or of its AEC API."""
    wanted = ("possible_agents", "reset", "step", "observation_space", "action_space")
    complete = not isinstance(made, type) and all(hasattr(made, name) for name in wanted)
    return complete and callable(made.observation_space) and not isinstance(made, gymnasium.Env)


class Parallel(gymnasium.Env[Any, Any]):
    """A PettingZoo environment as one Gymnasium environment, with all agents side by side.

    The observation is a dict of ``reward`` and flags, ``[k]`` each, ``obs`` keyed by agent and, if
    infos have legal actions, ``mask`` keyed by agent. The action is a dict keyed by agent. The
    episode ends once no agent is left. For an absent agent, the observation is zero and the action
    is ignored. An agent is absent from its flag until the reset, even if the environment still
    lists it. One that leaves without a flag is truncated. Other agents need an observation, and for
    a step a reward and both flags; else ``reset`` and ``step`` raise an error.
    """

    def __init__(self, env: Any) -> None:
        """Adapts ``env``; PettingZoo converts one of the AEC API, see ``InTurns``."""
        self.env = env = _in_parallel(env)
        self.agents = list(env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        self.metadata = env.metadata
        self._obs_space = {agent: env.observation_space(agent) for agent in self.agents}
        self._act_space = {agent: env.action_space(agent) for agent in self.agents}
        self._gone: set[Any] = set()  # whose flags have said so since the reset
        self._offered = self._masks_of_infos(self._begin(seed=0)[1])
        self._masks = {agent: mask.name for agent, mask in self._offered.items() if not mask.unread}
        count = len(self.agents)
        parts: dict[str, spaces.Space[Any]] = {
            OBS: _by_name(self._obs_space),
            "reward": spaces.Box(-np.inf, np.inf, (count,), np.float32),
            **{name: spaces.MultiBinary(count) for name in (THERE, *FLAGS)},
        }
        if self._masks:
            sizes = {agent: (int(self._act_space[agent].n),) for agent in self._masks}
            parts[PART] = _by_name(
                {
                    agent: spaces.Box(0, 1, size, np.bool_)  # type: ignore[arg-type]
                    for agent, size in sizes.items()
                }
            )
        self.observation_space = spaces.Dict(parts)
        self.action_space = _by_name(self._act_space)

    def _masks_of_infos(self, infos: Any) -> dict[Any, Mask]:
        """Returns each agent's mask in its info;
        agents that join late have that of others with as many actions.
        """
        sizes = {
            agent: int(space.n)
            for agent, space in self._act_space.items()
            if isinstance(space, spaces.Discrete)
        }
        by_size: dict[int, Mask] = {}
        for agent, size in sizes.items():
            for name in filter(infos.get(agent, {}).__contains__, reversed(NAMES)):
                mask = of_value("info", name, infos[agent][name], plain(self._act_space[agent]))
                if not mask.unread or size not in by_size:
                    by_size[size] = mask
        return {agent: by_size[size] for agent, size in sizes.items() if size in by_size}

    def masks(self) -> dict[str, Mask]:
        """Returns where the environment itself gives each agent's legal actions."""
        masks = {}
        for agent, space in self._obs_space.items():
            part = of_parts(plain(space), plain(self._act_space[agent]))
            of_info = agent in self._masks or not part.where
            if of_info:
                masks[str(agent)] = self._offered.get(agent, NO_MASK)
            else:
                masks[str(agent)] = part
        return masks

    def description(self) -> Description:
        """Returns the description, with the spaces and masks of the agents by their names."""
        observation = plain(_by_name(self._obs_space))
        action = plain(self.action_space)
        masks = {
            name: Mask("info", PART) if mask.where == "info" and not mask.unread else mask
            for name, mask in self.masks().items()
        }
        kind = type(self.env.unwrapped if isinstance(self.env, InTurns) else self.env).__name__
        return Description(
            kind, True, False, observation, action, "pettingzoo", agents=masks, fps=render_fps(self)
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._all(*self._begin(seed=seed, options=options), {}, {}, {}, []), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        present = self.going()
        chosen = {agent: action[str(agent)] for agent in self.env.agents}
        whole = {
            agent: int(chosen[agent])
            for agent in chosen
            if isinstance(self._act_space[agent], spaces.Discrete)
        }
        actions = {**chosen, **whole}  # some environments need Python's int
        obs, rewards, terminated, truncated, infos = returned(
            "step", self.env.step(actions), RETURNED
        )
        listed = self.going()
        flags = {"termination": terminated, "truncation": truncated}
        check_agents(ValueError, "step", listed, observation=obs)
        check_agents(
            ValueError, "step", list(filter(present.__contains__, listed)), reward=rewards, **flags
        )
        flagged = [agent for agent in present if terminated.get(agent) or truncated.get(agent)]
        check_agents(ValueError, "step", flagged, reward=rewards)
        check_agents(
            ValueError, "step", itertools.filterfalse(terminated.get, flagged), observation=obs
        )
        self._gone.update(flagged)
        going = self.going()
        unflagged = [agent for agent in present if agent not in {*going, *self._gone}]
        truncated = {**truncated, **dict.fromkeys(unflagged, True)}
        info = {
            str(name): x for name, x in infos.items() if name in present or name not in self.agents
        }
        return (
            self._all(obs, infos, rewards, terminated, truncated, present),
            0.0,
            not going,
            False,
            info,
        )

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _begin(self, **keywords: Any) -> tuple[Any, Any]:
        """Resets the environment and returns its observations and infos.

        Raises:
          TypeError: it returns something else.
          ValueError: it has no agents then, or an agent has no observation.
        """
        obs, infos = returned("reset", self.env.reset(**keywords), (RETURNED[0], RETURNED[-1]))
        self._gone = set()
        if not self.env.agents:
            raise ValueError("reset leaves env.agents empty, and nobody can act")
        check_agents(ValueError, "reset", self.env.agents, observation=obs)
        return obs, infos

    def going(self) -> list[Any]:
        """Returns the agents whose episodes go on."""
        return [agent for agent in self.env.agents if agent not in self._gone]

    def _all(
        self,
        obs: Any,
        infos: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        present: list[Any],
    ) -> Any:
        """Returns the observation from dicts keyed by agent;
        ``present`` lists the agents that have acted.
        """
        flags = dict(zip(FLAGS, (terminated, truncated), strict=True))
        parts = {
            OBS: {
                str(agent): obs[agent] if agent in obs else _zero(space)
                for agent, space in self._obs_space.items()
            },
            "reward": np.array(
                [_finite(agent, rewards.get(agent, 0.0)) for agent in self.agents], np.float32
            ),
            THERE: np.array([agent in present for agent in self.agents], np.int8),
            **{
                name: np.array(
                    [flag(f"{name} of {agent}", x.get(agent, False)) for agent in self.agents],
                    np.int8,
                )
                for name, x in flags.items()
            },
        }
        if self._masks:
            going = self.going()
            parts[PART] = {
                str(agent): self._legal(agent, infos.get(agent, {}), agent in going)
                for agent in self._masks
            }
        return parts

    def _legal(self, agent: Any, info: Any, going: bool) -> np.ndarray:
        """Returns which of an agent's actions are legal, ``[n]`` bool.

        Without a mask all are (``InTurns`` gives one to who waits);
        none is for an agent whose episode has ended.

        Raises:
          ValueError: the agent's episode goes on, and its mask is not zeros and ones,
            or has changed its size.
        """
        name = self._masks[agent]
        size = int(self._act_space[agent].n)
        mask = info.get(name)
        if (flags := flat(mask, size)) is not None:
            return flags
        if going and mask is not None:
            subject = f"the info of {agent} gave {mask!r:.80} as {name!r}"
            raise ValueError(f"{subject}, not {size} zeros and ones that say what is legal")
        return np.full(size, going)


def _in_parallel(env: Any) -> Any:
    """Returns an environment of the parallel API; PettingZoo converts one of the AEC API."""
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "(?s)The base environment .* does not have a `render_mode` defined"
        )
        if env.metadata.get("is_parallelizable", False):
            return aec_to_parallel(env)
        return InTurns(env)


class InTurns:
    """A game in turns, by PettingZoo's ``turn_based_aec_to_parallel``: a step is one agent's,
    and all are paid for it.

    The conversion ignores the actions of agents who are not on the move. Their masks have one legal
    action, the first, so that a policy learns nothing from these steps. A mask is a part of the
    observation, or ``action_mask`` in the info, also where the game has none; actions that are not
    discrete have none.
    """

    def __init__(self, env: Any) -> None:
        from pettingzoo.utils.conversions import turn_based_aec_to_parallel

        self._game = env
        self._parallel = turn_based_aec_to_parallel(env)
        # the part of each agent's observation that is its mask; "" for one in its info
        self._part = {}
        for agent in env.possible_agents:
            space, action = (plain(of(agent)) for of in (env.observation_space, env.action_space))
            mask = of_parts(space, action)
            if action.kind == "Discrete":
                if mask.where and not mask.unread:
                    self._part[agent] = mask.name
                else:
                    self._part[agent] = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)

    def reset(self, **keywords: Any) -> tuple[Any, Any]:
        obs, infos = self._parallel.reset(**keywords)
        return self._masked(obs, infos, ())

    def step(self, actions: Any) -> tuple[Any, ...]:
        obs, rewards, terminated, truncated, infos = self._parallel.step(actions)
        ended = [agent for agent in obs if terminated.get(agent) or truncated.get(agent)]
        # The conversion has observed before those who have ended left,
        # and so before the next one was on the move.
        going = {
            agent: self._game.observe(agent) for agent in self._game.agents if agent not in ended
        }
        obs, infos = self._masked({**obs, **going}, {**infos, **self._game.infos}, ended)
        return obs, rewards, terminated, truncated, infos

    def _masked(self, obs: Any, infos: Any, ended: Sequence[Any]) -> tuple[Any, Any]:
        """Returns observations and infos with the masks of all agents;
        those of agents who have ``ended`` stay.
        """
        obs, infos = dict(obs), {agent: dict(infos.get(agent, {})) for agent in obs}
        for agent, part in self._part.items():
            if agent not in obs or agent in ended:
                continue
            if part:
                if agent != self._game.agent_selection:
                    obs[agent] = {**obs[agent], part: _first(np.asarray(obs[agent][part]))}
                continue
            every = np.ones(int(self._game.action_space(agent).n), np.int8)
            mask = next((infos[agent][name] for name in NAMES if name in infos[agent]), every)
            if agent == self._game.agent_selection:
                infos[agent][NAMES[0]] = mask
            else:
                infos[agent][NAMES[0]] = _first(every)
        return obs, infos


def _first(mask: np.ndarray) -> np.ndarray:
    """Returns a mask like this one with which only the first action is legal."""
    return (np.arange(mask.size) == 0).astype(mask.dtype).reshape(mask.shape)


def _by_name(by_agent: dict[Any, Any]) -> spaces.Dict:
    """Returns a ``Dict`` of these spaces, keyed by the agents' names."""
    return spaces.Dict({str(agent): space for agent, space in by_agent.items()})


def _zero(space: Any) -> Any:
    """Returns the observation of an absent agent: zero, or the start of a discrete space."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        if isinstance(parts, dict):
            return {name: _zero(parts[name]) for name in parts}
        return tuple(map(_zero, parts))
    return np.zeros(space.shape, space.dtype) + getattr(space, "start", 0)


def _finite(agent: Any, reward: Any) -> float:
    """Returns an agent's reward.

    Raises:
      TypeError: it is not a number.
      ValueError: it is NaN or infinite.
    """
    value = number(f"the reward of {agent}", reward)
    if not np.isfinite(value):
        raise ValueError(f"the reward of {agent} is {value}, which is not finite")
    return float(value)
