"""Environments of several agents, in JaxMARL's style."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole


class CartPoles:
    """Poles side by side, each with an agent; the environment resets once all have fallen.
    Time limit: 500 steps.
    """

    def __init__(self, num_agents: int = 2, time_limit: int = 500) -> None:
        self.agents = [f"pole_{index}" for index in range(num_agents)]
        self.env, self.time_limit = CartPole(), time_limit
        self.params = self.env.default_params

    def reset(self, key: jax.Array) -> Any:
        keys = [key, *jax.random.split(key, len(self.agents) - 1)]
        made = {
            agent: self.env.reset_env(own, self.params)
            for agent, own in zip(self.agents, keys, strict=True)
        }
        return self.split(made), {
            agent: (state, jnp.array(False)) for agent, (_, state) in made.items()
        }

    def step_env(self, key: jax.Array, state: Any, actions: Any) -> Any:
        stepped, rewards, dones = {}, {}, {}
        for agent in self.agents:
            before, fallen = state[agent]
            obs, after, reward, done, _ = self.env.step_env(
                key, before, actions[agent], self.params
            )
            stepped[agent] = obs, (after, fallen | done)
            rewards[agent] = reward
            dones[agent] = fallen | done
        dones["__all__"] = jnp.all(jnp.stack(list(dones.values())))
        return (
            self.split(stepped),
            {agent: state for agent, (_, state) in stepped.items()},
            rewards,
            dones,
            {},
        )

    def split(self, made: Any) -> Any:
        return {agent: obs for agent, (obs, _) in made.items()}

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space(self.params)

    def action_space(self, agent: str) -> Any:
        return self.env.action_space(self.params)


class State(NamedTuple):
    places: jax.Array
    time: jax.Array


class Meeting:
    """Two agents on a line who are paid alike for meeting at the place that only the state shows.

    The observation is an agent's own place; moving off the line is illegal.
    ``world_state`` has the goal.
    """

    agents = ("left", "right")
    time_limit = 6

    def reset(self, key: jax.Array) -> Any:
        state = State(jnp.array([0, 4, 2], jnp.int32), jnp.int32(0))
        return self.shown(state), state

    def step_env(self, key: jax.Array, state: State, actions: Any) -> Any:
        moves = jnp.stack([actions["left"], actions["right"]]) - 1
        places = state.places.at[:2].add(moves)
        there = jnp.all(places[:2] == places[2])
        reward = jnp.where(there, 1.0, -0.1)
        state = State(places, state.time + 1)
        dones = {"left": there, "right": there, "__all__": there}
        return self.shown(state), state, {"left": reward, "right": reward}, dones, {}

    def shown(self, state: State) -> Any:
        places = state.places.astype(jnp.float32)
        return {"left": places[:1], "right": places[1:2], "world_state": places}

    def get_avail_actions(self, state: State) -> Any:
        return {
            agent: jnp.array([place > 0, True, place < 4])
            for agent, place in zip(self.agents, state.places, strict=False)
        }

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 4, (1,), jnp.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)


class Unequal(Meeting):
    """The right agent may also jump."""

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3 + (agent == "right"))


class Spoilt(Meeting):
    """Shows NaN once the agents have come closer."""

    def shown(self, state: State) -> Any:
        obs = super().shown(state)
        return {**obs, "right": jnp.where(state.time > 2, jnp.nan, obs["right"])}


class NoMove(Meeting):
    """Allows no action."""

    def get_avail_actions(self, state: State) -> Any:
        return {agent: jnp.zeros(3, bool) for agent in self.agents}


class ShortMask(Meeting):
    """Says of two actions of three whether they are legal."""

    def get_avail_actions(self, state: State) -> Any:
        return {agent: jnp.ones(2, bool) for agent in self.agents}


class Unlike:
    """Agents that do not touch each other, with different observations and actions,
    paid for standing at their goals.

    Nothing is random, so what an agent meets does not depend on which others there are.
    """

    time_limit = 5

    def __init__(self, *agents: str) -> None:
        self.agents = agents or ("short", "long_1", "long_2")

    def reset(self, key: jax.Array) -> Any:
        places = {agent: jnp.int32(0) for agent in self.agents}
        return self.shown(places), (places, jnp.int32(0))

    def step_env(self, key: jax.Array, state: Any, actions: Any) -> Any:
        places = {
            agent: jnp.clip(state[0][agent] + actions[agent] - 1, 0, 4) for agent in self.agents
        }
        rewards = {agent: -jnp.abs(places[agent] - 3.0) for agent in self.agents}
        dones = dict.fromkeys((*self.agents, "__all__"), jnp.array(False))
        return self.shown(places), (places, state[1] + 1), rewards, dones, {}

    def shown(self, places: Any) -> Any:
        one = {agent: jnp.array([place / 4.0], jnp.float32) for agent, place in places.items()}
        return {
            agent: x if agent == "short" else jnp.concatenate([x, 1 - x])
            for agent, x in one.items()
        }

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (1 + (agent != "short"),), jnp.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3 + (agent != "short"))


class Outlived(Unlike):
    """The first agent's episode ends after two steps, and the others' never."""

    time_limit: Any = None

    def step_env(self, key: jax.Array, state: Any, actions: Any) -> Any:
        obs, state, rewards, dones, info = super().step_env(key, state, actions)
        return obs, state, rewards, {**dones, self.agents[0]: state[1] >= 2}, info

    def render(self, state: Any) -> Any:
        return jnp.zeros((2, 2, 3), jnp.uint8)


class Reporting(Outlived):
    """Reports the time as the environment's, and each agent's place in both ways."""

    time_limit = 4

    def step_env(self, key: jax.Array, state: Any, actions: Any) -> Any:
        *step, _ = super().step_env(key, state, actions)
        places, time = step[1]
        info = {
            "time": time,
            "place": places,
            "places": jnp.stack([*places.values()]),
            "other": jnp.ones(7),
        }
        return *step, {**info, "late": jnp.where(time < 2, jnp.nan, time)}


class TwoSteps:
    """The two-step game of Rashid et al. (2018, section 5),
    whose optimum is 8 and needs both agents' second action.

    In the first step the first agent chooses a matrix game. One pays 7 whatever the agents do; the
    other pays ``[[0, 1], [1, 8]]``. Both agents see which step it is and which game they play.
    """

    agents = ("first", "second")

    def reset(self, key: jax.Array) -> Any:
        return self.shown(jnp.int32(0)), jnp.int32(0)

    def step_env(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        first, second = actions["first"], actions["second"]
        game = jnp.array([[0.0, 1.0], [1.0, 8.0]])[first, second]
        reward = jnp.where(state == 0, 0.0, jnp.where(state == 1, 7.0, game))
        done = state > 0
        state = jnp.where(done, state, 1 + first).astype(jnp.int32)
        return self.shown(state), state, dict.fromkeys(self.agents, reward), self.over(done), {}

    def over(self, done: jax.Array) -> Any:
        return dict.fromkeys((*self.agents, "__all__"), done)

    def shown(self, state: jax.Array) -> Any:
        return dict.fromkeys((*self.agents, "world_state"), jax.nn.one_hot(state, 3))

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (3,), jnp.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)


class Sacrifice(TwoSteps):
    """The first agent may die in the first step; then both are paid 10 in the second, and else
    6.
    """

    def step_env(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        reward, done = jnp.array([0.0, 6.0, 10.0])[state], state > 0
        state = jnp.where(done, state, 1 + actions["first"]).astype(jnp.int32)
        dones = {**self.over(done), "first": state == 2}
        return self.shown(state), state, dict.fromkeys(self.agents, reward), dones, {}


class Echo:
    """Two agents see a bit each, and must name it; a step later, where both see nothing,
    they are paid 1 if both did.

    Only the state shows what they named. So a critic without it expects the same pay after every
    action: one-step advantages (``gae_lambda`` 0) do not depend on actions then, and its squared
    error in the second step is the variance of the pay. With the state they are the pay's own, and
    the error is 0.
    """

    agents = ("left", "right")

    def __init__(self, shows_state: bool = True) -> None:
        self.shows_state = shows_state

    def reset(self, key: jax.Array) -> Any:
        state = jnp.append(jax.random.rademacher(key, (2,), jnp.float32), jnp.zeros(2))
        return self.shown(state), state

    def step_env(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        named = 2.0 * jnp.stack([actions["left"], actions["right"]]) - 1
        done, right = state[3] > 0, jnp.all(named == state[:2])
        reward = jnp.where(done, state[2], 0.0)
        state = jnp.array([0.0, 0.0, right, 1.0])
        return self.shown(state), state, dict.fromkeys(self.agents, reward), self.over(done), {}

    def over(self, done: jax.Array) -> Any:
        return dict.fromkeys((*self.agents, "__all__"), done)

    def shown(self, state: jax.Array) -> Any:
        return {"left": state[:1], "right": state[1:2], "world_state": state}

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (1,), jnp.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)


class Recall(Echo):
    """Two agents see a bit each, and must name it two steps later, where they see nothing:
    1 is paid if both do.
    """

    def reset(self, key: jax.Array) -> Any:
        state = jnp.append(jax.random.rademacher(key, (2,), jnp.float32), 0.0)
        return self.shown(state), state

    def step_env(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        named, done = 2.0 * jnp.stack([actions["left"], actions["right"]]) - 1, state[2] == 2
        reward = jnp.where(done & jnp.all(named == state[:2]), 1.0, 0.0)
        state = state.at[2].add(1)
        return self.shown(state), state, dict.fromkeys(self.agents, reward), self.over(done), {}

    def shown(self, state: jax.Array) -> Any:
        return super().shown(jnp.append(state[:2] * (state[2] == 0), state)) | {
            "world_state": state
        }
