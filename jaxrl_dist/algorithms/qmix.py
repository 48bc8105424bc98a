"""QMIX and VDN: the values of a team's actions, mixed from its agents' values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from jaxrl_dist.algorithms import sequences
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.replayed import num_actions, value_learner
from jaxrl_dist.checks import check_used, flag
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, networks, observations, packing, returns, spaces
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables


@dataclasses.dataclass(frozen=True)
class QMIX(DQN, n_step=1):
    """Deep Q-learning for a team with a shared reward (Rashid et al. 2018,
    https://arxiv.org/abs/1803.11485).

    The agents share a value network, which also reads the agent's id. A mixing network combines the
    values of the chosen actions; its weights depend on the state of the whole environment and are
    not negative. So each agent's best action is also the team's, and agents act independently. The
    reward is the mean of the agents' rewards.
    """

    mixer: Literal["qmix", "vdn"] = "qmix"
    """How to combine agents' values into the team's: a mixing network,
    or their sum (VDN, Sunehag et al. 2017)."""
    mixing_size: int = setting(32, low=1, high=2**16)
    """Units of the mixing network (Rashid et al. 2018, appendix C)."""

    joint: ClassVar[bool] = True
    """The agents of an environment act as one: see ``envs.groups``."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "mixing_size", active=self.mixer == "qmix", needed="--mixer qmix")
        others = {"num_atoms": 1, "noisy": False, "parameter_noise": False, "cql_weight": None}
        others["munchausen"] = None
        for name, value in others.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{flag(name)} does not work with a mixer; remove it or train dqn"
                )

    def make(self, spec: EnvSpec) -> Algorithm:
        team = _team_of(self, spec)
        action_shape = spaces.zeros(spec.action, 1).shape[1:]
        of_agent = dataclasses.replace(spec, action=spaces.Discrete(team.num_actions))
        network = _of_team(
            networks.q_network(
                self,
                team.observation,
                team.num_actions,
                num_atoms=1,
                dueling=self.dueling,
                noisy=False,
                recurrence=sequences.recurrence(self, of_agent),
            ),
            team,
            rewards=int("reward" in self.core_inputs),
        )

        def state(obs: PyTree) -> jax.Array:
            read = observations.preprocess(
                team.shown(observations.now(obs)), team.state, jnp.float32
            )
            return observations.side_by_side(read, team.state)

        state_size = jax.eval_shape(state, spaces.zeros(spec.observation, 1)).shape[-1]
        mixing = networks.mixing_network(self.mixing_size, team.size, state_size)

        def legal(obs: PyTree) -> jax.Array | None:
            """Which actions ``[N, k, A]`` are legal; None: all are."""
            mask = observations.legal(spec, obs)
            if mask is None:
                return None
            return mask.reshape(-1, team.size, team.num_actions)

        def init(key: jax.Array) -> PyTree:
            if self.mixer == "vdn":
                return {"q": network.init(key), "mixer": {}}
            return {"q": network.init(key), "mixer": mixing.init(jax.random.fold_in(key, 1))}

        def mixed(params: PyTree, chosen: jax.Array, obs: PyTree) -> jax.Array:
            """The team's values ``[N]``, from those ``[N, k]`` of the agents' chosen actions."""
            if self.mixer == "vdn":
                return jnp.sum(chosen, axis=-1)
            return mixing.apply(params["mixer"], state(obs), chosen)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            keys = context.keys
            if keys is not None:
                keys = jax.vmap(lambda key: jax.random.split(key, team.size))(keys)
            values = network.apply(variables.params["q"], obs, None)[..., 0]  # [N, k, A]
            action, core = self.act(values, legal(obs), keys, core, context.env_step)
            return action.reshape(-1, *action_shape), core, {}

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            obs = batch["obs"]
            next_obs = batch["next_obs"]
            params = variables.params
            online, next_online = network.apply_each(params["q"], (obs, None), (next_obs, None))
            bootstrap = network.apply(context.target["q"], next_obs, None)[..., 0]
            if self.double:
                choosing = next_online[..., 0]
            else:
                choosing = bootstrap
            chosen = packing.take_along_last(online[..., 0], batch["action"].reshape(-1, team.size))
            q = mixed(params, chosen, obs)
            best = jnp.argmax(observations.masked(choosing, legal(next_obs)), axis=-1)
            next_q = mixed(context.target, packing.take_along_last(bootstrap, best), next_obs)
            error = returns.constant(self.bellman(batch["reward"], batch["discount"], next_q)) - q
            losses = self.error_loss(error)  # squared, it is equation 6
            return (
                losses,
                batch["valid"],
                Aux({"loss/q": losses, "q/mean": q}, returns.constant(jnp.abs(error))),
            )

        algorithm = Algorithm(
            policy=policy,
            loss=loss,
            **value_learner(self, network._replace(init=init)),
            initial_core=self.exploration_state(team.size),
        )
        return sequences.sequences(self, spec, algorithm, {"q": network}, lambda params: params)


class _Team(NamedTuple):
    """Observations and actions of a team of ``k`` agents."""

    size: int
    """K."""
    num_actions: int
    observation: spaces.Space
    """Of one agent."""
    state: spaces.Space
    rows: Callable[[PyTree], PyTree]
    """(obs [N, ...]) -> observations of the agents, [N * k, ...]."""
    shown: Callable[[PyTree], PyTree]
    """(obs [N, ...]) -> the state."""


def _team_of(config: QMIX, spec: EnvSpec) -> _Team:
    """Returns the team that acts as one in ``envs.groups``;
    an environment of one agent has a team of one.

    Raises:
      ConfigError: actions are not discrete.
    """
    if isinstance(spec.observation, dict) and spaces.AGENTS in spec.observation:
        assert isinstance(spec.action, spaces.MultiDiscrete), (
            "agents that act as one need discrete actions"
        )
        agents = spec.observation[spaces.AGENTS]
        state = spec.observation[spaces.STATE]
        one = jax.tree.map(lambda x: spaces.Box(x.shape[1:], x.dtype, x.low[0], x.high[0]), agents)
        nvec = spec.action.nvec
        return _Team(
            len(nvec),
            nvec[0],
            one,
            state,
            lambda obs: _rows(obs[spaces.AGENTS]),
            lambda obs: obs[spaces.STATE],
        )
    space = observations.input_space(spec)

    def read(obs: PyTree) -> PyTree:
        if isinstance(space, dict):
            return {name: obs[name] for name in space}
        return obs

    return _Team(1, num_actions(config, spec), space, space, read, read)


def _rows(tree: PyTree) -> PyTree:
    """Turns ``[N, k, ...]`` into ``[N * k, ...]``."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _of_team(network: Any, team: _Team, rewards: int) -> Any:
    """Lets the ``Network`` of an agent read observations of teams;
    its outputs and its core are ``[N, k, ...]``.

    Each agent has a core. It reads the agent's last action and the team's reward,
    if ``core_inputs`` name them.

    Args:
      rewards: how many of the core's inputs are rewards.
    """

    def apart(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, team.size, *x.shape[1:]), tree)

    def core_inputs(read: jax.Array | None) -> jax.Array | None:
        """Returns those of each agent, ``[N * k, I]``,
        from the actions of all and the reward, ``[N, I]``.
        """
        if read is None:
            return None
        size = read.shape[-1] - rewards
        rest = jnp.repeat(read[:, size:], team.size, axis=0)
        return jnp.concatenate(
            [read[:, :size].reshape(rest.shape[0], size // team.size), rest], axis=-1
        )

    def of_agents(obs: PyTree) -> PyTree:
        if not isinstance(obs, observations.View):
            return team.rows(obs)
        return observations.View(
            now=team.rows(obs.now),
            obs=jax.vmap(team.rows)(obs.obs),
            valid=jnp.repeat(obs.valid, team.size, axis=1),
            core_inputs=None if obs.core_inputs is None else jax.vmap(core_inputs)(obs.core_inputs),
            core=_rows(obs.core),
            rows=jnp.repeat(obs.rows, team.size, axis=0),
        )

    def apply_each(params: PyTree, *inputs: tuple[Any, ...]) -> list[jax.Array]:
        first_obs = inputs[0][0]
        steps = 1
        if isinstance(first_obs, observations.View):
            steps = first_obs.rows.shape[1]
        outputs = network.apply_each(params, *((of_agents(obs), *more) for obs, *more in inputs))
        by_sequence = (x.reshape(-1, team.size, steps, *x.shape[1:]) for x in outputs)
        return [x.swapaxes(1, 2).reshape(-1, team.size, *x.shape[3:]) for x in by_sequence]

    def advance(params: PyTree, obs: PyTree, core: PyTree, read: jax.Array | None) -> PyTree:
        return apart(network.advance(params, team.rows(obs), _rows(core), core_inputs(read)))

    return network._replace(
        apply=lambda params, *inputs: apply_each(params, inputs)[0],
        advance=advance,
        initial_core=lambda num_envs: apart(network.initial_core(num_envs * team.size)),
        of_sequences=apply_each,
    )
