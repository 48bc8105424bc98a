"""QMIX and VDN: the values of a team's actions, mixed from its agents' values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

from jaxrl_dist.algorithms import exploration
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.replayed import num_actions, transitions, value_learner
from jaxrl_dist.checks import check_used, flag
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, packing, spaces
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class QMIX(DQN, n_step=1):
    """Deep Q-learning for a team with a shared reward (Rashid et al. 2018, https://arxiv.org/abs/1803.11485).

    The agents share a value network, which also reads the agent's id. A mixing network combines the values of the
    chosen actions; its weights depend on the state of the whole environment and are not negative. So each agent's best
    action is also the team's, and agents act independently. The reward is the mean of the agents' rewards.
    """

    mixer: Literal["qmix", "vdn"] = "qmix"
    """How to combine agents' values into the team's: a mixing network, or their sum (VDN, Sunehag et al. 2017)."""
    mixing_size: int = setting(32, low=1, high=2**16)
    """Units of the mixing network (Rashid et al. 2018, appendix C)."""

    joint: ClassVar[bool] = True  # the agents of an environment act as one: see ``envs.groups``

    def validate(self) -> None:
        super().validate()
        check_used(self, "mixing_size", there=self.mixer == "qmix", needed="--mixer qmix")
        others = {"num_atoms": 1, "noisy": False, "parameter_noise": False, "core": "none"}
        for name, value in others.items():
            if getattr(self, name) != value:
                raise ConfigError(f"{flag(name)} does not work with a mixer: leave it out, or train dqn")

    def make(self, spec: EnvSpec) -> Algorithm:
        team = _team_of(self, spec)
        network = networks.q_network(
            self, team.observation, team.num_actions, num_atoms=1, dueling=self.dueling, noisy=False
        )
        mixing = networks.mixing_network(self.mixing_size, team.size, team.state_size)

        def init(key: jax.Array) -> PyTree:
            if self.mixer == "vdn":
                return {"q": network.init(key), "mixer": {}}
            return {"q": network.init(key), "mixer": mixing.init(jax.random.fold_in(key, 1))}

        def values(params: PyTree, obs: PyTree) -> jax.Array:
            """The values ``[N, k, A]`` of each agent's actions."""
            each = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), team.agents(obs))
            return network.apply(params["q"], each, None)[..., 0].reshape(-1, team.size, team.num_actions)

        def mixed(params: PyTree, chosen: jax.Array, obs: PyTree) -> jax.Array:
            """The team's values ``[N]``, from those ``[N, k]`` of the agents' chosen actions."""
            if self.mixer == "vdn":
                return jnp.sum(chosen, axis=-1)
            return mixing.apply(params["mixer"], team.state(obs), chosen)

        schedule = optax.linear_schedule(self.epsilon_start, self.epsilon_end, max(self.epsilon_steps, 1))

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            q, legal = values(variables.params, obs), team.legal(obs)
            if context.keys is None:
                return team.to_env(distributions.EpsilonGreedy(q, 0.0, legal).mode()), core, {}
            keys = jax.vmap(lambda key: jax.random.split(key, team.size))(context.keys)
            epsilon = core[:, None] if self.epsilon_ladder else schedule(context.env_step)
            if self.ez_greedy:
                action, core = exploration.ez_greedy(q, epsilon, legal, keys, core)
                return team.to_env(action), core, {}
            return team.to_env(distributions.EpsilonGreedy(q, epsilon, legal).sample(keys)), core, {}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> dict[str, jax.Array]:
            return transitions(rollout, self.discount)

        def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            obs, next_obs = batch["obs"], batch["next_obs"]
            chosen = packing.take_along_last(values(variables.params, obs), team.from_env(batch["action"]))
            q = mixed(variables.params, chosen, obs)
            bootstrap = values(context.target, next_obs)
            choosing = values(variables.params, next_obs) if self.double else bootstrap
            best = jnp.argmax(observations.masked(choosing, team.legal(next_obs)), axis=-1)
            next_q = mixed(context.target, packing.take_along_last(bootstrap, best), next_obs)
            error = jax.lax.stop_gradient(self.bellman(batch["reward"], batch["discount"], next_q)) - q
            losses = self.error_loss(error)  # squared, it is equation 6
            return losses, batch["valid"], Aux({"loss/q": losses, "q/mean": q}, jax.lax.stop_gradient(jnp.abs(error)))

        return Algorithm(
            policy=policy,
            postprocess=postprocess,
            loss=loss,
            window=self.n_step,
            **value_learner(self, network._replace(init=init)),
            initial_core=self.exploration_state(team.size),
        )


class _Team(NamedTuple):
    """Observations and actions of a team of ``k`` agents."""

    size: int  # k
    num_actions: int
    observation: spaces.Space  # of one agent
    state_size: int
    agents: Callable[[PyTree], PyTree]  # (obs [N, ...]) -> [N, k, ...]
    state: Callable[[PyTree], jax.Array]  # (obs) -> [N, state_size]
    legal: Callable[[PyTree], jax.Array | None]  # (obs) -> [N, k, A]
    to_env: Callable[[jax.Array], jax.Array]  # (actions [N, k]) -> the environment's
    from_env: Callable[[jax.Array], jax.Array]  # the inverse


def _team_of(config: QMIX, spec: EnvSpec) -> _Team:
    """Returns the team that acts as one in ``envs.groups``; an environment of one agent has a team of one.

    Raises:
      ConfigError: actions are not discrete.
    """
    if isinstance(spec.observation, dict) and "agents" in spec.observation:
        assert isinstance(spec.action, spaces.MultiDiscrete), "agents that act as one have discrete actions"
        size, actions, state_space = len(spec.action.nvec), spec.action.nvec[0], spec.observation["state"]
        each = jax.tree.map(lambda x: spaces.Box(x.shape[1:], x.dtype, x.low[0], x.high[0]), spec.observation["agents"])

        def agents(obs: PyTree) -> PyTree:
            return obs["agents"]

        def state_of(obs: PyTree) -> PyTree:
            return obs["state"]

        def action(action: jax.Array) -> jax.Array:
            return action

        from_env = action
    else:
        size, actions = 1, num_actions(config, spec)
        each = state_space = observations.seen(spec)

        def agents(obs: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x[:, None], state_of(obs))

        def state_of(obs: PyTree) -> PyTree:
            return {name: obs[name] for name in each} if isinstance(each, dict) else obs

        def action(action: jax.Array) -> jax.Array:
            return action[:, 0]

        def from_env(action: jax.Array) -> jax.Array:
            return action[:, None]

    def state(obs: PyTree) -> jax.Array:
        read = observations.preprocess(state_of(obs), state_space, jnp.float32)
        return observations.side_by_side(read, state_space)

    def legal(obs: PyTree) -> jax.Array | None:
        found = observations.legal(spec, obs)
        return None if found is None else found.reshape(-1, size, actions)

    state_size = jax.eval_shape(state, spaces.zeros(spec.observation, 1)).shape[-1]
    return _Team(size, actions, each, state_size, agents, state, legal, action, from_env)
