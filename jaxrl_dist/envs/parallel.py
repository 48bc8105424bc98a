"""PettingZoo's environments of several agents as Gymnasium environments, whose observations hold those of all agents.

So worker threads and processes step them as any other, and ``rows.Rows`` makes each agent a row of the batch. This
module imports no JAX, because worker processes import it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from jaxrl_dist.envs.masks import NAMES, PART, of_parts
from jaxrl_dist.envs.native import Description, Mask, plain
from jaxrl_dist.errors import ConfigError

OBS, THERE, FLAGS = "obs", "there", ("terminated", "truncated")
"""Parts of the observation: what agents see, whether each was there before the step, and how its episode ends."""


def is_parallel(made: Any) -> bool:
    """Returns True for an environment of PettingZoo's parallel API, or of its AEC API."""
    wanted = ("possible_agents", "reset", "step", "observation_space", "action_space")
    there = not isinstance(made, type) and all(hasattr(made, name) for name in wanted)
    return there and callable(made.observation_space) and not isinstance(made, gymnasium.Env)


class Parallel(gymnasium.Env[Any, Any]):
    """The agents of an environment side by side.

    Its observation is a dict of ``obs``, ``reward`` and flags, ``[k, ...]`` each, and ``mask`` if infos have legal
    actions. Its actions are theirs, joined. It ends once no agent is left. What an agent that is not there would see is
    zero, and its action is ignored.
    """

    def __init__(self, env: Any) -> None:
        """Adapts ``env``; one of the AEC API is converted by PettingZoo's ``aec_to_parallel``.

        Raises:
          ConfigError: PettingZoo cannot convert it, agents have different spaces, or spaces that cannot be joined.
        """
        if hasattr(env, "agent_iter"):
            from pettingzoo.utils.conversions import aec_to_parallel

            if not env.metadata.get("is_parallelizable", False):
                raise ConfigError(
                    f"{type(env).__name__} is a game in turns, which PettingZoo's aec_to_parallel does not convert; "
                    "those of pgx: work"
                )
            env = aec_to_parallel(env)
        self.env, self.agents = env, list(env.possible_agents)
        self.render_mode, self.metadata = getattr(env, "render_mode", None), env.metadata
        self._seen, self._acts = (self._common(what) for what in ("observation", "action"))
        self._mask = ""
        if isinstance(self._acts, spaces.Discrete):
            _, infos = env.reset(seed=0)
            info = infos.get(self.agents[0], {})
            self._mask = next((x for x in NAMES if x in info and np.size(info[x]) == self._acts.n), "")
        count = len(self.agents)
        parts: dict[str, spaces.Space[Any]] = {
            OBS: joined(self._seen, count),
            "reward": spaces.Box(-np.inf, np.inf, (count,), np.float32),
            **{name: spaces.MultiBinary(count) for name in (THERE, *FLAGS)},
        }
        if self._mask:
            parts[PART] = spaces.Box(0, 1, (count, int(self._acts.n)), np.bool_)  # type: ignore[arg-type,attr-defined]
        self.observation_space, self.action_space = spaces.Dict(parts), joined(self._acts, count)

    def _common(self, what: str) -> spaces.Space[Any]:
        found = {agent: getattr(self.env, f"{what}_space")(agent) for agent in self.agents}
        first = found[self.agents[0]]
        if other := next((agent for agent, space in found.items() if space != first), None):
            raise ConfigError(
                f"{type(self.env).__name__} has agents with different {what}s ({self.agents[0]}: {first}; {other}: "
                f"{found[other]}); on the host all agents share one policy, which needs equal ones"
            )
        return first

    def description(self) -> Description:
        """Returns the description, with the spaces of one agent."""
        seen, acts = plain(self._seen), plain(self._acts)
        mask = Mask("info", PART) if self._mask else of_parts(seen, acts)
        return Description(
            type(self.env).__name__, True, False, seen, acts, "pettingzoo", mask=mask, agents=len(self.agents)
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._all(obs, infos, {}, {}, {}, []), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        there = list(self.env.agents)
        own = {agent: of_agent(self._acts, action, self.agents.index(agent)) for agent in there}
        obs, rewards, terminated, truncated, infos = self.env.step(own)
        seen = self._all(obs, infos, rewards, terminated, truncated, there)
        return seen, 0.0, not self.env.agents, False, {}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _all(self, obs: Any, infos: Any, rewards: Any, terminated: Any, truncated: Any, there: list[Any]) -> Any:
        """Returns the observation, of dicts by agent; ``there`` are those who have acted."""
        flags = dict(zip(FLAGS, (terminated, truncated), strict=True))
        seen = {
            OBS: stacked(self._seen, [obs.get(agent) for agent in self.agents]),
            "reward": np.array([rewards.get(agent, 0.0) for agent in self.agents], np.float32),
            THERE: np.array([agent in there for agent in self.agents], np.int8),
            **{name: np.array([bool(x.get(agent)) for agent in self.agents], np.int8) for name, x in flags.items()},
        }
        if self._mask:
            legal = [infos.get(agent, {}).get(self._mask) for agent in self.agents]
            none = np.zeros(int(self._acts.n), np.bool_)  # type: ignore[attr-defined]
            seen[PART] = np.stack([none if mask is None else np.asarray(mask, np.bool_) for mask in legal])
        return seen


def joined(space: spaces.Space[Any], count: int) -> spaces.Space[Any]:
    """Returns the space of ``count`` values of a space side by side, ``[count, ...]``; discrete ones are one vector.

    Raises:
      ConfigError: it is of another kind than Box, Discrete, MultiDiscrete, MultiBinary and Dict.
    """
    match space:
        case spaces.Box():
            low, high = (np.stack([bound] * count) for bound in (space.low, space.high))
            return spaces.Box(low, high, dtype=space.dtype)  # type: ignore[arg-type]
        case spaces.Discrete():
            return spaces.MultiDiscrete([int(space.n)] * count)
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(np.tile(space.nvec.reshape(-1), count))
        case spaces.MultiBinary():
            return spaces.MultiBinary(count * int(np.prod(space.shape)))
        case spaces.Dict():
            return spaces.Dict({name: joined(part, count) for name, part in space.items()})
    kind = type(space).__name__
    raise ConfigError(f"agents have {kind} spaces; Box, Discrete, MultiDiscrete, MultiBinary and Dict work")


def stacked(space: spaces.Space[Any], values: list[Any]) -> Any:
    """Returns the values of all agents in ``joined``'s space; None, of one that is not there, becomes zero."""
    if isinstance(space, spaces.Dict):
        return {name: stacked(part, [None if x is None else x[name] for x in values]) for name, part in space.items()}
    start = getattr(space, "start", 0)
    shape, dtype = space.shape or (), space.dtype
    filled = [np.zeros(shape, dtype) if x is None else np.asarray(x) - start for x in values]
    whole = np.stack(filled)
    return whole if isinstance(space, spaces.Box) else whole.reshape(-1)


def of_agent(space: spaces.Space[Any], values: Any, agent: int) -> Any:
    """Returns the value of one agent, of one in ``joined``'s space."""
    if isinstance(space, spaces.Dict):
        return {name: of_agent(part, values[name], agent) for name, part in space.items()}
    if isinstance(space, spaces.Box):
        return values[agent]
    size = int(np.prod(space.shape or ()))
    own = values[agent * size : (agent + 1) * size].reshape(space.shape or ()) + getattr(space, "start", 0)
    return int(own) if isinstance(space, spaces.Discrete) else own.astype(space.dtype)
