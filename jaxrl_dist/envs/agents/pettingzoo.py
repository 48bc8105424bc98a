"""Adapts PettingZoo's multi-agent environments to Gymnasium:
one observation holds the observations of all agents.

So worker threads and processes step them like others, and ``host.Rows`` makes each agent a row of
its policy's batch. This module imports no JAX, because worker processes import it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from jaxrl_dist.envs.masks import NAMES, PART, flat, of_parts, of_value
from jaxrl_dist.envs.native import (
    NO_MASK,
    Agent,
    Description,
    Mask,
    check_agents,
    flag,
    number,
    plain,
    render_fps,
    returned,
)
from jaxrl_dist.types import PyTree

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

OBS = "obs"
THERE = "there"
FLAGS = ("terminated", "truncated")
"""Parts of the observation: what agents see, whether each was there before the step,
and how its episode ends."""

RETURNED = ("observations", "rewards", "terminations", "truncations", "infos")
"""What ``step`` of an environment returns, each keyed by agent;
``reset`` returns the first and the last."""


def is_parallel(made: object) -> bool:
    """Returns True for an environment of PettingZoo's parallel API, or of its AEC API."""
    wanted = ("possible_agents", "reset", "step", "action_space")
    complete = all(hasattr(made, name) for name in wanted)
    spaces_by_agent = callable(getattr(made, "observation_space", None))
    return complete and spaces_by_agent and not isinstance(made, type | gymnasium.Env)


class Parallel(gymnasium.Env[Any, Any]):
    """A PettingZoo environment as one Gymnasium environment, with all agents side by side.

    The observation is a dict of ``reward`` and flags, ``[k]`` each, ``obs`` keyed by agent and, if
    infos have legal actions, ``mask`` keyed by agent. The action is a dict keyed by agent. The
    episode ends once no agent is left. For an absent agent, the observation is zero and the action
    is ignored. An agent is absent from its flag until the reset, even if the environment still
    lists it. One that leaves without a flag is truncated. Other agents need an observation, and for
    a step a reward and both flags; else ``reset`` and ``step`` raise an error.
    """

    def __init__(self, env: ParallelEnv | AECEnv) -> None:
        """Adapts ``env``; PettingZoo converts one of the AEC API, see ``InTurns``."""
        self.env = env = _in_parallel(env)
        self.agents: list[Agent] = list(env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        self.metadata = env.metadata
        self._obs_space = {agent: env.observation_space(agent) for agent in self.agents}
        self._act_space = {agent: env.action_space(agent) for agent in self.agents}
        self._zeros = {agent: _zero(space) for agent, space in self._obs_space.items()}
        self._gone = set[Agent]()
        """Agents whose flags have ended their episodes since the reset."""
        self._offered = self._masks_of_infos(self._begin(seed=0)[1])
        self._masks = {agent: mask.name for agent, mask in self._offered.items() if not mask.unread}
        count = len(self.agents)
        parts: dict[str, spaces.Space] = {
            OBS: _by_name(self._obs_space),
            "reward": spaces.Box(-np.inf, np.inf, (count,), np.float32),
            **{name: spaces.MultiBinary(count) for name in (THERE, *FLAGS)},
        }
        if self._masks:
            legal: dict[Agent, spaces.Space] = {}
            for agent in self._masks:
                size = int(self._act_space[agent].n)
                legal[agent] = spaces.Box(0, 1, (size,), np.bool_)  # type: ignore[arg-type]
            parts[PART] = _by_name(legal)
        self.observation_space = spaces.Dict(parts)
        self.action_space = _by_name(self._act_space)

    def _masks_of_infos(self, infos: Mapping[Agent, Mapping[str, object]]) -> dict[Agent, Mask]:
        """Returns each agent's mask in its info;
        agents that join late have the mask of others with as many actions.
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
            mask = of_parts(plain(space), plain(self._act_space[agent]))
            if agent in self._masks or not mask.where:
                mask = self._offered.get(agent, NO_MASK)
            masks[str(agent)] = mask
        return masks

    def description(self) -> Description:
        """Returns the description, with the spaces and masks of the agents by their names."""
        masks = self.masks()
        for name, mask in masks.items():
            if mask.where == "info" and not mask.unread:
                masks[name] = Mask("info", PART)
        env = self.env.unwrapped if isinstance(self.env, InTurns) else self.env
        return Description(
            type(env).__name__,
            gymnasium=True,
            gymnax=False,
            observation=plain(_by_name(self._obs_space)),
            action=plain(self.action_space),
            family="pettingzoo",
            agents=masks,
            fps=render_fps(self),
        )

    def reset(
        self, *, seed: int | None = None, options: PyTree = None
    ) -> tuple[PyTree, dict[str, object]]:
        obs, infos = self._begin(seed=seed, options=options)
        return self._all(obs, infos, {}, {}, {}, []), {}

    def step(self, action: PyTree) -> tuple[PyTree, float, bool, bool, dict[str, object]]:
        present = self.going()
        actions = {agent: action[str(agent)] for agent in self.env.agents}
        for agent in actions:
            if isinstance(self._act_space[agent], spaces.Discrete):
                actions[agent] = int(actions[agent])  # some environments need Python's int
        obs, rewards, terminated, truncated, infos = self._step(present, actions)
        going = self.going()
        unflagged = [agent for agent in present if agent not in {*going, *self._gone}]
        truncated = {**truncated, **dict.fromkeys(unflagged, True)}
        observation = self._all(obs, infos, rewards, terminated, truncated, present)
        info = {
            str(name): x for name, x in infos.items() if name in present or name not in self.agents
        }
        return observation, 0.0, not going, False, info

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _begin(self, **keywords: object) -> tuple[Mapping[Agent, PyTree], PyTree]:
        """Resets the environment and returns its observations and infos.

        Raises:
          TypeError: it returns something else.
          ValueError: it has no agents then, or an agent has no observation.
        """
        obs, infos = returned("reset", self.env.reset(**keywords), (RETURNED[0], RETURNED[-1]))
        self._gone = set()
        if not self.env.agents:
            raise ValueError("reset leaves env.agents empty, so no agent can act")
        check_agents(ValueError, "reset", self.env.agents, observation=obs)
        return obs, infos

    def _step(self, present: list[Agent], actions: Mapping[Agent, PyTree]) -> tuple[PyTree, ...]:
        """Steps the environment and returns ``RETURNED``; agents with a flag are gone then.

        Raises:
          TypeError: it returns something else.
          ValueError: an agent lacks what it needs.
        """
        values = returned("step", self.env.step(actions), RETURNED)
        obs, rewards, terminated, truncated, _ = values
        listed = self.going()
        staying = [agent for agent in listed if agent in present]
        flags = {"termination": terminated, "truncation": truncated}
        check_agents(ValueError, "step", listed, observation=obs)
        check_agents(ValueError, "step", staying, reward=rewards, **flags)
        flagged = [agent for agent in present if terminated.get(agent) or truncated.get(agent)]
        cut = [agent for agent in flagged if not terminated.get(agent)]
        check_agents(ValueError, "step", flagged, reward=rewards)
        check_agents(ValueError, "step", cut, observation=obs)
        self._gone.update(flagged)
        return values

    def going(self) -> list[Agent]:
        """Returns the agents whose episodes go on."""
        return [agent for agent in self.env.agents if agent not in self._gone]

    def _all(
        self,
        obs: Mapping[Agent, PyTree],
        infos: Mapping[Agent, Mapping[str, object]],
        rewards: Mapping[Agent, object],
        terminated: Mapping[Agent, object],
        truncated: Mapping[Agent, object],
        present: list[Agent],
    ) -> PyTree:
        """Returns the observation from dicts keyed by agent;
        ``present`` lists the agents that have acted.
        """
        payments = [_finite(agent, rewards.get(agent, 0.0)) for agent in self.agents]
        parts = {
            OBS: {str(agent): obs.get(agent, zero) for agent, zero in self._zeros.items()},
            "reward": np.array(payments, np.float32),
            THERE: np.array([agent in present for agent in self.agents], np.int8),
        }
        for name, flags in zip(FLAGS, (terminated, truncated), strict=True):
            truths = [flag(f"{name} of {agent}", flags.get(agent, False)) for agent in self.agents]
            parts[name] = np.array(truths, np.int8)
        if self._masks:
            going = self.going()
            parts[PART] = {
                str(agent): self._legal(agent, infos.get(agent, {}), agent in going)
                for agent in self._masks
            }
        return parts

    def _legal(self, agent: Agent, info: Mapping[str, object], going: bool) -> np.ndarray:
        """Returns which of an agent's actions are legal, ``[n]`` bool.

        Without a mask all are legal (``InTurns`` gives a mask to agents that wait),
        and none for an agent whose episode has ended.

        Raises:
          ValueError: the agent's episode continues, and its mask is not zeros and ones,
            or has changed its size.
        """
        name = self._masks[agent]
        size = int(self._act_space[agent].n)
        mask = info.get(name)
        flags = flat(mask, size)
        if flags is not None:
            return flags
        if going and mask is not None:
            raise ValueError(
                f"the info of {agent} gave {mask!r:.80} as {name!r}, not {size} zeros and ones "
                "that say what is legal"
            )
        return np.full(size, going)


def _in_parallel(env: ParallelEnv | AECEnv) -> ParallelEnv:
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
    """A game in turns, by PettingZoo's ``turn_based_aec_to_parallel``: one agent moves in a step,
    and all are paid for it.

    The conversion ignores the actions of agents who are not on the move. Their masks have one legal
    action, the first, so that a policy learns nothing from these steps. A mask is a part of the
    observation, or ``action_mask`` in the info, even if the game has none; actions that are not
    discrete have no mask.
    """

    def __init__(self, env: AECEnv) -> None:
        from pettingzoo.utils.conversions import turn_based_aec_to_parallel

        self._game = env
        self._parallel = turn_based_aec_to_parallel(env)
        self._part: dict[Agent, str] = {}
        """The part of each agent's observation that is its mask; "" for a mask in its info."""
        for agent in env.possible_agents:
            action = plain(env.action_space(agent))
            if action.kind == "Discrete":
                mask = of_parts(plain(env.observation_space(agent)), action)
                self._part[agent] = "" if mask.unread else mask.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)

    def reset(self, **keywords: object) -> tuple[PyTree, PyTree]:
        obs, infos = self._parallel.reset(**keywords)
        return self._masked(obs, infos, ())

    def step(self, actions: Mapping[Agent, PyTree]) -> tuple[PyTree, ...]:
        obs, rewards, terminated, truncated, infos = self._parallel.step(actions)
        ended = [agent for agent in obs if terminated.get(agent) or truncated.get(agent)]
        # The conversion has observed before agents whose episode has ended left,
        # and so before the next agent was on the move.
        going = {
            agent: self._game.observe(agent) for agent in self._game.agents if agent not in ended
        }
        obs, infos = self._masked({**obs, **going}, {**infos, **self._game.infos}, ended)
        return obs, rewards, terminated, truncated, infos

    def _masked(
        self, obs: Mapping[Agent, PyTree], infos: Mapping[Agent, PyTree], ended: Sequence[Agent]
    ) -> tuple[PyTree, PyTree]:
        """Returns observations and infos with the masks of all agents;
        masks of agents that have ``ended`` stay.
        """
        obs = dict(obs)
        infos = {agent: dict(infos.get(agent, {})) for agent in obs}
        for agent, part in self._part.items():
            if agent not in obs or agent in ended:
                continue
            if part:
                if agent != self._game.agent_selection:
                    obs[agent] = {**obs[agent], part: _first(np.asarray(obs[agent][part]))}
                continue
            every = np.ones(int(self._game.action_space(agent).n), np.int8)
            mask = next((infos[agent][name] for name in NAMES if name in infos[agent]), every)
            on_the_move = agent == self._game.agent_selection
            infos[agent][NAMES[0]] = mask if on_the_move else _first(every)
        return obs, infos


def _first(mask: np.ndarray) -> np.ndarray:
    """Returns a mask like this one with which only the first action is legal."""
    return (np.arange(mask.size) == 0).astype(mask.dtype).reshape(mask.shape)


def _by_name(by_agent: Mapping[Agent, spaces.Space]) -> spaces.Dict:
    """Returns a ``Dict`` of these spaces, keyed by the agents' names."""
    return spaces.Dict({str(agent): space for agent, space in by_agent.items()})


def _zero(space: spaces.Space) -> PyTree:
    """Returns the observation of an absent agent: zero, or the start of a discrete space."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        if isinstance(parts, dict):
            return {name: _zero(parts[name]) for name in parts}
        return tuple(map(_zero, parts))
    zeros = np.zeros(space.shape or (), np.dtype(space.dtype))
    return zeros + getattr(space, "start", 0)


def _finite(agent: Agent, reward: object) -> float:
    """Returns an agent's reward.

    Raises:
      TypeError: it is not a number.
      ValueError: it is NaN or infinite.
    """
    value = number(f"the reward of {agent}", reward)
    if not np.isfinite(value):
        raise ValueError(f"the reward of {agent} is {value}, which is not finite")
    return float(value)
