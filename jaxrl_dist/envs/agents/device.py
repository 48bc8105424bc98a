"""Multi-agent environments: each agent is a row of its policy's batch.

Rows are environment-major, ``[B * k]`` for ``B`` environments of ``k`` agents. So a device holds
whole environments, and learners need no special case. With several policies, each has the rows of
its agents. An agent whose episode has ended while the others go on has ``valid`` False until the
environment resets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh, rng
from jaxrl_dist.envs import episodes, masks
from jaxrl_dist.envs.agents import groups
from jaxrl_dist.envs.agents.groups import Group, Groups, Team, TeamEnv
from jaxrl_dist.envs.base import DeviceEnv, Wrappers, outcome, restarted, rows_where
from jaxrl_dist.envs.contract import Contract, of_library, zero_action
from jaxrl_dist.envs.conversion import policy_space, space_of
from jaxrl_dist.envs.drawing import own_render
from jaxrl_dist.envs.native import (
    Agent,
    Mask,
    PlainSpace,
    check_agents,
    env_label,
    named,
    plain,
    unnamed,
)
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.spaces import STATE, Space, clipped
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep


class State(NamedTuple):
    """A batch of ``B`` environments of ``k`` agents."""

    env: PyTree
    """[B, ...]."""
    obs: PyTree
    """[B * k, ...]; with several policies, a dict keyed by policy."""
    ended: jax.Array
    """[B] bool: the next step is a reset."""
    steps: jax.Array
    """[B] int32, of the episode."""
    info: PyTree
    """[B, K] float32, keyed by metric of the info; see ``episodes.advanced``."""
    gone: jax.Array
    """[B * k] bool: the agent's episode has ended."""
    episode_return: jax.Array
    """[B * k] float32."""
    episode_length: jax.Array
    """[B * k] int32."""


def from_team(
    team: Team, env_id: str, backend: str, wrappers: Wrappers, contract: Contract | None = None
) -> DeviceEnv:
    """Makes the agents of an environment the rows of a batch.

    With ``wrappers.policies``, actions, observations, time steps and episodes are dicts keyed by
    policy, and a policy's rows are its agents. The agents of a policy in ``wrappers.joint`` share
    one row. Its reward is the mean of the rewards of all of them, also of agents whose episodes
    have ended, until the last agent's episode ends.

    Raises:
      ConfigError: as ``groups.divided``.
      EnvError: as ``contract.of_env``.
    """
    env = team.env
    agents = list(env.agents)
    name = env_label(backend, env_id)
    contract = contract or Contract(name)
    limit = wrappers.limit(team.time_limit)
    obs, state, info = _traced(contract, env)
    metrics = episodes.parse(wrappers.info_metrics)
    episodes.check_known(metrics, episodes.numbers(info, [*map(str, agents)]), name)

    def spec_of_one(agents: Sequence[Agent]) -> tuple[EnvSpec, Mask]:
        observation, action, mask = _spaces(env, agents, obs, state, name)
        spec = EnvSpec(
            env_id, backend, team.family, observation, action, limit, info_metrics=metrics
        )
        return spec, mask

    def whole_state(obs: PyTree) -> jax.Array:
        return groups.whole_state(jax.tree.map(lambda x: x[None], obs), agents)

    size = jax.eval_shape(whole_state, obs).size
    divided = groups.divided(
        agents, name, wrappers, spec_of_one, size, shows_state=team.shows_state
    )
    rows = _Rows(env, divided, limit)
    simulate = rows.simulate if rows.can_simulate else None
    return DeviceEnv(divided.spec, rows.reset, rows.step, team.render or own_render(env), simulate)


class _Rows:
    """Environments whose rows are agents, as pure functions over a batch."""

    def __init__(self, env: TeamEnv, divided: Groups, limit: int | None) -> None:
        """``limit``: env steps after which an episode is truncated."""
        self._env = env
        self._groups = divided
        self._limit = limit
        self._count = len(divided.agents)
        self._rows = divided.spec.num_agents
        self._simulate: Callable[[PyTree], Simulator] | None = getattr(env, "simulate", None)

    @property
    def can_simulate(self) -> bool:
        """Whether it is a game whose ``env`` simulates moves as all its agents see them,
        with one policy.
        """
        groups = self._groups.by_policy.values()
        as_alone = all(group.added <= {masks.PART} and not group.joint for group in groups)
        return as_alone and not self._groups.spec.policies and self._simulate is not None

    def simulate(self, state: State) -> Simulator:
        """Returns the simulator of the rows, each with the state of its environment."""
        assert self._simulate is not None
        simulator = self._simulate(state.env)
        return simulator._replace(
            state=jax.tree.map(lambda x: jnp.repeat(x, self._rows, axis=0), simulator.state)
        )

    def reset(self, keys: jax.Array) -> tuple[State, PyTree]:
        keys = keys[:: self._rows]
        obs, env_state = self._reset_all(keys)
        of_agents = jnp.zeros(len(keys) * self._count, jnp.float32)
        ended = jnp.zeros(len(keys), bool)
        state = State(
            env_state,
            obs,
            ended,
            steps=jnp.zeros_like(ended, jnp.int32),
            info={
                metric: jnp.full((len(keys), self._count), jnp.nan)
                for metric in self._groups.spec.info_metrics
            },
            gone=jnp.zeros_like(of_agents, bool),
            episode_return=of_agents,
            episode_length=jnp.zeros_like(of_agents, jnp.int32),
        )
        return state, obs

    def step(
        self, state: State, action: PyTree, keys: jax.Array
    ) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys[:: self._rows])
        step_all = jax.vmap(lambda key, *arguments: self._env.step_env(rng.raw(key), *arguments))
        obs, env_state, reward, dones, news = step_all(keys[:, 0], state.env, self._actions(action))
        stepped = jax.tree.map(
            lambda new, old: new.astype(old.dtype),
            (self._observe(obs, env_state), env_state),
            (state.obs, state.env),
        )
        obs, env_state = restarted(self._started, keys[:, 1], state.ended, stepped)
        steps = jnp.where(state.ended, 0, state.steps + 1)
        if self._limit is None:
            timed = jnp.zeros_like(state.ended)
        else:
            timed = steps >= self._limit
        over = dones["__all__"].astype(bool)
        resetting = state.ended[:, None]
        gone, episode_return, episode_length = (
            x.reshape(-1, self._count)
            for x in (state.gone, state.episode_return, state.episode_length)
        )
        terminated = self._stacked(dones).astype(bool) | over[:, None]
        valid, terminated, truncated = outcome(resetting | gone, terminated, timed[:, None])
        gone = ~resetting & (gone | terminated | truncated)
        ended = ~state.ended & (over | timed | jnp.all(gone, axis=1))
        rewards = jnp.where(
            self._groups.pays(valid), self._stacked(reward).astype(jnp.float32), 0.0
        )
        episode_return = jnp.where(resetting, 0, episode_return) + rewards
        episode_length = jnp.where(resetting, 0, episode_length) + valid
        info = {metric: jnp.where(resetting, jnp.nan, x) for metric, x in state.info.items()}
        info = episodes.advanced(info, self._metrics(news, valid, ~resetting))
        new = State(
            env_state,
            obs,
            ended,
            steps,
            info,
            gone.reshape(-1),
            episode_return.reshape(-1),
            episode_length.reshape(-1),
        )
        reported = episodes.reported(ended, info)

        def of_group(group: Group, obs: PyTree) -> tuple[Timestep, EpisodeStats]:
            step = group.step(obs, rewards, terminated, truncated, valid)
            returns = group.of_all(episode_return)
            lengths = group.of_all(episode_length)
            if group.joint:
                returns = returns.mean(axis=1)
                lengths = lengths.max(axis=1)
            statistics = episodes.ended_episodes(
                step.terminated | step.truncated, returns.reshape(-1), lengths.reshape(-1)
            )
            return step, statistics._replace(info=group.info(reported))

        spec = self._groups.spec
        of_groups = mesh.over_policies(of_group, outputs=2)
        timesteps, statistics = of_groups(self._groups.by_policy, spec.keyed(obs))
        return new, spec.bare(timesteps), spec.bare(statistics)

    def _metrics(self, info: PyTree, valid: jax.Array, going: jax.Array) -> dict[str, jax.Array]:
        """Returns a step's metrics of the info, ``[B, K]``, of an agent while it is ``valid``.

        Metrics of the whole environment count for all agents while it is ``going``, ``[B, 1]``.
        """
        agents = [*map(str, self._groups.agents)]
        names = self._groups.spec.info_metrics

        def of_env(info: PyTree, valid: jax.Array, going: jax.Array) -> dict[str, jax.Array]:
            numbers = episodes.numbers(info, agents)
            metrics = {}
            for metric in names:
                value = jnp.float32(numbers[episodes.field(metric)]).reshape(-1)
                counts = valid if len(value) == len(agents) else going
                metrics[metric] = jnp.where(counts, value, jnp.nan)
            return metrics

        return jax.vmap(of_env)(info, valid, going) if names else {}

    def _stacked(self, values: Mapping[Agent, jax.Array]) -> jax.Array:
        """Returns numbers keyed by agent as ``[B, K]``."""
        return groups.stacked(self._groups.agents, values).reshape(-1, self._count)

    def _reset_all(self, keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = jax.vmap(lambda key: self._env.reset(rng.raw(key)))(keys)
        return self._observe(obs, state), jax.tree.map(
            lambda x: jnp.broadcast_to(x, jnp.shape(x) or keys.shape), state
        )

    def _started(self, keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
        """Resets the environments that have ended."""

        def of_group(group: Group, new: PyTree, old: PyTree) -> PyTree:
            return rows_where(jnp.repeat(ended, group.spec.num_agents), new, old)

        obs, env_state = self._reset_all(keys)
        before, env_before = stepped
        spec = self._groups.spec
        rows = mesh.over_policies(of_group)
        obs = rows(self._groups.by_policy, spec.keyed(obs), spec.keyed(before))
        return spec.bare(obs), rows_where(ended, env_state, env_before)

    def _actions(self, action: PyTree) -> dict[Agent, PyTree]:
        """Returns the action of each agent as its environment takes it, ``[B, ...]``."""
        actions = {}
        by_policy = self._groups.spec.keyed(action)
        for policy, group in self._groups.by_policy.items():
            native_space = self._env.action_space(group.agents[0])
            of_agents = group.actions(clipped(group.spec.action, by_policy[policy]))
            for agent, chosen in of_agents.items():
                actions[agent] = unnamed(native_space, chosen)
        return actions

    def _observe(self, obs: Mapping[Agent, PyTree], state: PyTree) -> PyTree:
        """Returns the agents' observations, ``[B * k, ...]``; with several policies,
        a dict keyed by policy.
        """

        def of_group(group: Group) -> PyTree:
            rows = groups.in_rows(group.agents, obs)
            legal = None
            if masks.PART in group.added:
                all_legal = jax.vmap(getattr(self._env, group.mask.name))(state)
                legal = groups.in_rows(group.agents, all_legal).astype(bool)
            whole = None
            if STATE in group.added:
                whole = groups.whole_state(obs, self._groups.agents)
            native_space = self._env.observation_space(group.agents[0])
            return group.observation(named(native_space, rows), legal, whole)

        return self._groups.spec.bare(mesh.over_policies(of_group)(self._groups.by_policy))


def _spaces(
    env: TeamEnv, agents: Sequence[Agent], obs: PyTree, state: PyTree, name: str
) -> tuple[Space, Space, Mask]:
    """Returns what each of a policy's agents sees and does, and where its legal actions are.

    Args:
      obs: shapes and dtypes of the observations of all agents; ``state`` likewise.
      name: the environment's, for errors.

    Raises:
      ConfigError: the agents have different spaces, or spaces that no policy supports.
    """
    observations = {agent: plain(env.observation_space(agent)) for agent in agents}
    actions = {agent: plain(env.action_space(agent)) for agent in agents}
    groups.check_same(name, "observations", observations)
    groups.check_same(name, "actions", actions)
    first = agents[0]
    observation = observations[first]
    # some libraries' spaces have other dtypes and shapes than their observations
    if observation.kind == "Box":
        observation = observation._replace(
            shape=tuple(obs[first].shape), dtype=obs[first].dtype.name
        )
    return (
        space_of(observation, name, "observations"),
        space_of(actions[first], name, "actions"),
        _mask(env, agents, state, observation, actions[first]),
    )


def _mask(
    env: TeamEnv,
    agents: Sequence[Agent],
    state: PyTree,
    observation: PlainSpace,
    action: PlainSpace,
) -> Mask:
    """Returns where the legal actions of agents with these spaces are."""
    part = masks.of_parts(observation, action)
    if part.where or action.kind != "Discrete":
        return part
    legal = _legal_actions(env, state)
    if legal is None:
        return part
    method, shapes = legal
    mask = Mask("method", method)
    if not isinstance(shapes, dict) or not shapes.keys() >= set(agents):
        return mask._replace(unread=f"its {method} does not answer for each agent: not read")
    sizes = {shapes[agent].size for agent in agents}
    if sizes != {action.num_choices}:
        return mask._replace(unread=masks.misfit(f"its {method}", max(sizes), action))
    return mask


def _legal_actions(env: TeamEnv, state: PyTree) -> tuple[str, PyTree] | None:
    """Returns the name of the environment's method for legal actions, if it has one that works,
    and their shapes.
    """
    for name in masks.NAMES:
        method = getattr(env, name, None)
        if callable(method) and _takes_one(method):
            with contextlib.suppress(NotImplementedError):
                return name, jax.eval_shape(method, state)
    return None


def _takes_one(method: Callable[..., object]) -> bool:
    """Returns whether a method can be called with the state alone;
    another one may be about one agent.
    """
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def _traced(contract: Contract, env: TeamEnv) -> tuple[PyTree, PyTree, PyTree]:
    """Traces a reset and a step of a multi-agent environment in JaxMARL's style,
    and checks all that both return.

    Returns the observations and the state of the reset, and the info of the step.

    Raises:
      ConfigError: no policy here supports an agent's actions.
      EnvError: as ``contract.of_env``.
    """
    agents = list(env.agents)
    key = jax.eval_shape(lambda: jax.random.key(0))
    fault = partial(contract.stop, "agents")
    if not agents:
        raise contract.stop("agents", "it has no agents")
    first = contract.trace("reset", env, lambda key: env.reset(rng.raw(key)), key)
    obs, state = contract.returned("reset", first, ("observations", "state"))
    check_agents(fault, "reset", agents, observation=obs)
    contract.arrays(state)
    contract.halt()
    native = {agent: env.action_space(agent) for agent in agents}
    actions = {
        agent: zero_action(space, policy_space(space, contract.name, "actions"))
        for agent, space in native.items()
    }
    step = contract.trace(
        "step_env", env, lambda key, *now: env.step_env(rng.raw(key), *now), key, state, actions
    )
    names = ("observations", "state", "rewards", "dones", "info")
    next_obs, next_state, rewards, dones, info = contract.returned("step_env", step, names)
    check_agents(fault, "step_env", agents, observation=next_obs, reward=rewards)
    check_agents(fault, "step_env", [*agents, "__all__"], done=dones)
    if not of_library(env.observation_space):
        for agent in agents:
            space = env.observation_space(agent)
            contract.observation(f"{agent} in reset", obs[agent], space)
            contract.observation(f"{agent} in step_env", next_obs[agent], space)
            contract.number(f"the reward of {agent}", rewards[agent])
            contract.flag(f"the done of {agent}", dones[agent])
        contract.flag("the done of __all__", dones["__all__"])
    before = {agent: obs[agent] for agent in agents}
    after = {agent: next_obs[agent] for agent in agents}
    contract.same("the observations", before, after, "reset")
    contract.same("the state", state, next_state, "reset")
    contract.halt()
    return obs, state, info
