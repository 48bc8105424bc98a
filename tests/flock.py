"""Environments of PettingZoo's parallel API, which need no PettingZoo."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces


class Flock:
    """Birds on a line who fly home, to place 4; whoever is there leaves,
    and after six steps all are stopped.

    A bird sees its place and the time. Flying off the line is illegal.
    ``late`` joins after the first step.
    """

    metadata: ClassVar[dict[str, Any]] = {}
    possible_agents = ("bird_0", "bird_1", "late")
    joins = 1

    def __init__(self, masks: str = "info") -> None:
        self.masks = masks

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        places = spaces.Box(0, 6, (2,), np.float32)
        mask = spaces.Box(0, 1, (3,), np.int8)
        return (
            spaces.Dict({"observation": places, "action_mask": mask})
            if self.masks.endswith("part")
            else places
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3, start=-1)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed) if seed is not None else self.rng
        self.places = {agent: int(self.rng.integers(0, 3)) for agent in self.possible_agents}
        self.time, self.agents = 0, list(self.possible_agents[:2])
        return self.seen(self.agents)

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        self.time += 1
        for agent, move in actions.items():
            self.places[agent] = int(np.clip(self.places[agent] + move, 0, 4))
        there = list(self.agents)
        home = {agent: self.places[agent] == 4 for agent in there}
        rewards = {
            agent: 1.0 if home[agent] else -0.1 * (1 + self.possible_agents.index(agent))
            for agent in there
        }
        late = {agent: self.time == 6 and not home[agent] for agent in there}
        self.agents = [agent for agent in there if not home[agent] and not late[agent]]
        joining = ["late"] if self.time == self.joins else []
        self.agents += joining
        obs, infos = self.seen([*there, *joining])
        return obs, rewards, home, late, infos

    def seen(self, agents: Any) -> Any:
        obs = {agent: np.array([self.places[agent], self.time], np.float32) for agent in agents}
        legal = {agent: np.array([self.places[agent] > 0, True, True], np.int8) for agent in agents}
        if self.masks in ("no info", "no part"):
            legal = {agent: np.zeros(3, np.int8) for agent in agents}
        if self.masks.endswith("part"):
            return {
                agent: {"observation": obs[agent], "action_mask": legal[agent]} for agent in agents
            }, {}
        if self.masks == "indices":
            return obs, {agent: {"legal_actions": np.flatnonzero(legal[agent])} for agent in agents}
        if self.masks == "spoilt" and self.time == 2:
            legal = {agent: np.flatnonzero(legal[agent]) for agent in agents}
        told = self.masks in ("info", "spoilt", "no info") or (
            self.masks == "once" and not self.time
        )
        return obs, {agent: {"action_mask": legal[agent]} if told else {} for agent in agents}

    def render(self) -> np.ndarray:
        picture = np.zeros((3, 5, 3), np.uint8)
        for row, agent in enumerate(self.possible_agents):
            picture[row, self.places[agent]] = 255
        return picture

    def close(self) -> None:
        pass


class Strict(Flock):
    """Raises an error at an illegal move."""

    def step(self, actions: Any) -> Any:
        assert all(move >= 0 or self.places[agent] > 0 for agent, move in actions.items()), (
            "an illegal move"
        )
        return super().step(actions)


class Unequal(Flock):
    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3 + (agent == "late"))


class Bounded(Flock):
    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 7 + (agent == "late"), (2,), np.float32)


class Reporting(Flock):
    """Reports the places of all that were there, and the time for the flock."""

    def step(self, actions: Any) -> Any:
        there = list(self.agents)
        *step, infos = super().step(actions)
        places = {agent: {"place": np.array([self.places[agent]])} for agent in there}
        return *step, {
            **{agent: infos[agent] | places.get(agent, {}) for agent in infos},
            "wind": self.time,
        }


class Lingering(Flock):
    """Lists birds that have left, and pays them, until the reset."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.left: list[str] = []
        return super().reset(seed, options)

    def step(self, actions: Any) -> Any:
        self.agents = there = [agent for agent in self.agents if agent not in self.left]
        obs, rewards, home, late, infos = super().step({agent: actions[agent] for agent in there})
        rewards, home = (
            rewards | dict.fromkeys(self.left, 1.0),
            home | dict.fromkeys(self.left, True),
        )
        self.left += [agent for agent in there if agent not in self.agents]
        self.agents = [*self.agents, *self.left]
        return obs, rewards, home, late, infos


class Silent(Flock):
    """Birds leave without a flag."""

    def step(self, actions: Any) -> Any:
        obs, rewards, _, _, infos = super().step(actions)
        return (
            obs,
            rewards,
            dict.fromkeys(self.agents, False),
            dict.fromkeys(self.agents, False),
            infos,
        )


class Faulty(Flock):
    """Does one thing wrong, in its reset or in its second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        out = super().reset(seed, options)
        if self.how == "nobody":
            self.agents = []
        if self.how == "blind reset":
            del out[0]["bird_1"]
        return out[0] if self.how == "old reset" else out

    def step(self, actions: Any) -> Any:
        out = super().step(actions)
        # bird_1 lacks this part of what is returned
        if self.time == 2 and self.how.startswith("part "):
            del out[int(self.how[5:])]["bird_1"]
        if self.time == 1 and self.how == "blind late":
            del out[0]["late"]
        if self.time == 6 and self.how.endswith(" end"):
            del out[self.how == "unpaid end"]["bird_1"]
        if self.how in ("nan pay", "text pay"):
            out[1]["bird_1"] = float("nan") if self.how == "nan pay" else "1"
        return out[:4] if self.how == "old step" else out


class Counting(Flock):
    acted: ClassVar[list[int]] = []  # the number of agents in each step of an environment

    def step(self, actions: Any) -> Any:
        self.acted.append(len(actions))
        return super().step(actions)


class Late(Flock):
    joins = 4


class Never(Flock):
    joins = 99


class Knockout:
    """A game of PettingZoo's AEC API: three players in turn add 1 or 2 to a pile;
    who reaches 4 is out and pays 1.

    The next player is out instead if the mover adds 2 to a pile of 1. The last player gets 2.
    Adding 2 to an empty pile is illegal. A player sees the pile and its own number.
    """

    metadata: ClassVar[dict[str, Any]] = {}
    possible_agents = ("p0", "p1", "p2")

    def __init__(self, masks: str = "part") -> None:
        self.masks = masks

    def agent_iter(self) -> Any:
        while self.agents:
            yield self.agent_selection

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(0, 9, (2,), np.float32)
        mask = spaces.Box(0, 1, (2,), np.int8)
        return (
            spaces.Dict({"observation": seen, "action_mask": mask})
            if self.masks == "part"
            else seen
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def legal(self) -> np.ndarray:
        return np.array([True, self.pile > 0], np.int8)

    def observe(self, agent: str) -> Any:
        seen = np.array([self.pile, self.possible_agents.index(agent)], np.float32)
        # as in PettingZoo's classic games
        mask = self.legal() * np.int8(agent == self.agent_selection)
        return {"observation": seen, "action_mask": mask} if self.masks == "part" else seen

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.pile = list(self.possible_agents), 0
        self.agent_selection = self.following = "p0"
        self._told({})

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover]:
            assert action is None
            self.agents.remove(mover)
            for told in (self.terminations, self.truncations, self.rewards, self.infos):
                del told[mover]
            self.agent_selection = next(
                iter([x for x in self.agents if self.terminations[x]] or [self.following]), ""
            )
            return
        assert self.masks == "none" or self.legal()[action]
        nexts = [
            self.agents[(self.agents.index(mover) + k) % len(self.agents)]
            for k in range(len(self.agents))
        ]
        hit, self.pile = self.pile == 1 and action == 1, self.pile + int(action) + 1
        out = [nexts[1]] if hit else [mover] if self.pile >= 4 else []
        self.pile = 0 if out else self.pile
        left = [agent for agent in nexts if agent not in out]
        rewards = dict.fromkeys(out, -1.0) | (dict.fromkeys(left, 2.0) if len(left) == 1 else {})
        self.following = next(agent for agent in [*nexts[1:], mover] if agent not in out)
        over = out + (left if len(left) == 1 else [])
        self.agent_selection = over[0] if over else self.following
        self._told(rewards, over)

    def _told(self, rewards: Any, over: Any = ()) -> None:
        self.rewards = {agent: rewards.get(agent, 0.0) for agent in self.agents}
        self.terminations = {agent: agent in over for agent in self.agents}
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self.masks == "info":
            self.infos[self.following]["action_mask"] = self.legal()

    def last(self) -> Any:
        agent = self.agent_selection
        return (
            self.observe(agent),
            self.rewards[agent],
            self.terminations[agent],
            False,
            self.infos[agent],
        )

    def render(self) -> None:
        return None

    render_mode = None

    @property
    def unwrapped(self) -> Any:
        return self

    def close(self) -> None:
        pass


class Sticks:
    """Two players in turn take one to three of seven to ten sticks; who takes the last one wins."""

    metadata: ClassVar[dict[str, Any]] = {}
    possible_agents = ("first", "second")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(0, 10, (1,), np.float32)
        return spaces.Dict({"observation": seen, "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed) if seed is not None else self.rng
        self.sticks, self.turn, self.agents = (
            int(self.rng.integers(7, 11)),
            0,
            list(self.possible_agents),
        )
        return self.seen(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        there, moving = list(self.agents), self.possible_agents[self.turn]
        self.sticks, self.turn = self.sticks - 1 - int(actions[moving]), 1 - self.turn
        over = dict.fromkeys(there, self.sticks == 0)
        rewards = {agent: (1.0 if agent == moving else -1.0) * over[agent] for agent in there}
        obs = self.seen()
        self.agents = [] if self.sticks == 0 else there
        return obs, rewards, over, dict.fromkeys(there, False), {agent: {} for agent in there}

    def seen(self) -> Any:
        legal = {agent: np.array([1, 0, 0], np.int8) for agent in self.agents}  # who waits
        legal[self.possible_agents[self.turn]] = (np.arange(3) < max(self.sticks, 1)).astype(
            np.int8
        )
        sticks = np.array([self.sticks], np.float32)
        return {
            agent: {"observation": sticks, "action_mask": legal[agent]} for agent in self.agents
        }

    def close(self) -> None:
        pass
