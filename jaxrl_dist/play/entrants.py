"""Loads the players of a match, finds the game that they have learnt, and makes them play it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import spaces
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, check_samples
from jaxrl_dist.checks import counted
from jaxrl_dist.config.envs import env_name
from jaxrl_dist.config.train import OWN, Train
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.games import Player
from jaxrl_dist.play.policy import Policy, load_policy
from jaxrl_dist.protocols import Hyperparameters, Traits
from jaxrl_dist.settings.policies import by_policy, learner_name
from jaxrl_dist.settings.still import Random, read_fixed
from jaxrl_dist.settings.stored import stored_config
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.types import Context, EnvSpec, PyTree

RANDOM: Literal["random"] = "random"
"""The player that chooses legal moves at random."""
VIEWS = ("opponents", "state")
"""Options of Pgx that say how an agent sees a game, and not which game it is."""


class Entrant(NamedTuple):
    """A player before the game is known."""

    name: str
    acting: Policy | Player | Literal["random"]
    """Chooses its moves; the policy of a run is loaded."""


# --- Loading --------------------------------------------------------------------------------------


class Loading(NamedTuple):
    """How runs are loaded: the arguments of ``match`` with these names."""

    checkpoint: str | int | None = None
    env: Any = None
    algorithm: type[Hyperparameters] | None = None
    num_simulations: int | None = None


def load(player: object, loading: Loading) -> Entrant:
    """Loads a player as ``match`` takes it.

    Raises:
      ConfigError: it is a run that cannot be loaded.
    """
    if isinstance(player, Player):
        return Entrant(player.name, player)
    if isinstance(player, Policy):
        return Entrant(repr(player), player)
    name = str(player)
    if name == RANDOM:
        return Entrant(name, RANDOM)
    run = read_fixed(name)
    checkpoint: str | int | None = run.checkpoint
    if checkpoint is None and loading.checkpoint is not None:
        checkpoint = loading.checkpoint
        name = f"{run.run_dir}@{checkpoint}"
        if run.policy:
            name += f",{run.policy}"
    config = stored_config(run.run_dir, loading.algorithm, loading.env)
    policy = run.policy or learner_name(config)
    plans = _plans(by_policy(config).get(policy or ""))
    acting = load_policy(
        run.run_dir,
        loading.algorithm,
        env=loading.env,
        policy=policy,
        checkpoint=checkpoint,
        num_simulations=loading.num_simulations if plans else None,
    )
    return Entrant(name, acting)


def check_simulations(num_simulations: int | None, policies: Sequence[Policy]) -> None:
    """Raises ``ConfigError`` if no policy takes the number of simulations."""
    if num_simulations is not None and not any(_plans(policy.config) for policy in policies):
        raise ConfigError(
            f"--num-simulations {num_simulations} does nothing, because no player searches; remove it"
        )


def _plans(config: Train | None) -> bool:
    """Returns whether a config has an algorithm that searches."""
    return config is not None and hasattr(config.algorithm, "num_simulations")


# --- The game -------------------------------------------------------------------------------------


class _Game(NamedTuple):
    env: Any
    """As in ``Train``."""
    options: Mapping[str, str]

    def __str__(self) -> str:
        options = (f"{name}={value}" for name, value in self.options.items())
        return " ".join([env_name(self.env), *options])


def find_game(
    policies: Sequence[Policy], env: Any, env_options: Mapping[str, str] | None
) -> EnvSource:
    """Finds the game that all policies have learnt; ``env`` and ``env_options`` as in ``match``.

    Raises:
      ConfigError: the policies have learnt different games, there is none,
        or it does not work in a match.
    """
    learnt = [_learnt_game(policy.config) for policy in policies]
    if env is None and not learnt:
        raise ConfigError("which game? Such as --env pgx:connect_four")
    for game in learnt:
        other_env = env_name(game.env) != env_name(learnt[0].env)
        if other_env or (env_options is None and game.options != learnt[0].options):
            raise ConfigError(
                f"the players of a match must know the same game, but these learnt {learnt[0]} and "
                f"{game}"
            )
    game = learnt[0] if learnt else _Game(env, {})
    if env is not None:
        game = game._replace(env=env)
    if env_options is not None:
        game = game._replace(options=env_options)
    source = find(game.env, game.options)
    _check_game(source.spec)
    return source


def _learnt_game(config: Train) -> _Game:
    options = config.env_options.items()
    return _Game(config.env, {name: value for name, value in options if name not in VIEWS})


def _check_game(spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for a game that does not work in a match."""
    if spec.num_agents != 2:
        raise ConfigError(
            f"{label_of(spec)} has {counted(spec.num_agents, 'player')}; "
            "name a game of two players, such as pgx:connect_four"
        )
    if not isinstance(spec.action, spaces.Discrete):
        raise ConfigError(
            f"{label_of(spec)} has the actions {spaces.describe(spec.action)}; "
            "name a game with discrete actions, such as pgx:connect_four"
        )


# --- Players --------------------------------------------------------------------------------------


def make_players(entrants: Sequence[Entrant], source: EnvSource, *, sampled: bool) -> list[Player]:
    """Returns the players of a game.

    Policies that differ only in their variables share functions, and so a compiled program.

    Raises:
      ConfigError: one of them cannot play the game.
    """
    shared = dict[str, Player]()
    players = []
    for entrant in entrants:
        player = _make_player(entrant, source.spec, shared, sampled=sampled)
        if player.searches and not source.is_pure:
            raise ConfigError(
                f"{entrant.name} searches, but {label_of(source.spec)} runs on the host, where no "
                "move can be tried ahead; let its network play alone with --num-simulations 0"
            )
        players.append(player)
    return players


def _make_player(
    entrant: Entrant, spec: EnvSpec, shared: dict[str, Player], *, sampled: bool
) -> Player:
    """Returns the player of an entrant, and adds to ``shared`` what later ones can share."""
    policy = entrant.acting
    if isinstance(policy, Player):
        return policy
    if not isinstance(policy, Policy):
        if RANDOM not in shared:
            shared[RANDOM] = _random_player(spec)
        return shared[RANDOM]
    _check_policy(entrant.name, policy, spec)
    own = [getattr(policy.config, field) for field in OWN]
    key = repr((policy.config.algorithm, *own, policy.source.spec))
    if key not in shared:
        shared[key] = _trained_player(policy, sampled=sampled)
    return shared[key]._replace(name=entrant.name, variables=policy.variables)


def _check_policy(name: str, policy: Policy, spec: EnvSpec) -> None:
    """Checks that a policy can play the seats of a game.

    Raises:
      ConfigError: it cannot.
    """
    learnt = policy.source.spec
    game = label_of(spec)
    if learnt.policies:
        raise ConfigError(
            f"{name}: which policy? It has {', '.join(learnt.policies)}; name one as RUN_DIR,POLICY"
        )
    if not _described(policy.observation).items() <= _described(spec.observation).items():
        raise ConfigError(
            f"{name} reads the observation {spaces.describe(policy.observation)}, but {game} shows "
            f"{spaces.describe(spec.observation)} in a match"
        )
    if learnt.action != spec.action:
        raise ConfigError(
            f"{name} has the actions {spaces.describe(learnt.action)}, but {game} takes "
            f"{spaces.describe(spec.action)}"
        )
    alone = learnt.num_agents == 1 and not policy.source.wrappers.policies
    if alone and Traits.of(policy.config.algorithm).core != "none":
        raise ConfigError(
            f"{name} is recurrent and has seen only the steps of its own turns (opponents=random); "
            "use one that trained with opponents=agents"
        )


def _described(space: spaces.Space) -> dict[str, str]:
    """Describes the parts of an observation; one without parts is its only part."""
    parts = space if isinstance(space, dict) else {"": space}
    return {name: spaces.describe(part) for name, part in parts.items()}


def _random_player(spec: EnvSpec) -> Player:
    algorithm = Random().make(spec)

    def act(
        variables: PyTree, obs: PyTree, legal: jax.Array, state: PyTree, keys: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        action, state, _ = algorithm.policy(variables, obs, state, Context(keys, jnp.float32(0)))
        return action, state

    return Player(RANDOM, act)


def _trained_player(policy: Policy, *, sampled: bool) -> Player:
    """Returns a player, without its variables, that acts as a policy at the end of all schedules.

    Raises:
      ConfigError: as ``check_samples``.
    """
    algorithm = policy.algorithm
    observation = policy.source.spec.observation
    if sampled:
        check_samples({"": algorithm})
    draws = sampled or not algorithm.trains

    def act(
        variables: PyTree,
        obs: PyTree,
        legal: jax.Array,
        state: PyTree,
        keys: jax.Array,
        simulator: Simulator | None = None,
    ) -> tuple[jax.Array, PyTree]:
        if isinstance(observation, dict):
            obs = _completed(obs, observation, num_games=len(legal))
        context = Context(
            keys if draws else None, jnp.float32(END_OF_SCHEDULES), simulator=simulator
        )
        action, state, _ = algorithm.policy(variables, obs, state, context)
        return action, state

    return Player("", act, (), algorithm.initial_core, algorithm.feedback, algorithm.searches)


def _completed(obs: dict[str, PyTree], space: dict[str, Any], num_games: int) -> dict[str, PyTree]:
    """Returns all parts of an observation; parts that only the critic sees, which a match does not
    show, are zeros.
    """
    completed = {}
    for name, part in space.items():
        if name in obs:
            completed[name] = obs[name]
        else:
            completed[name] = jax.tree.map(
                lambda leaf: jnp.zeros((num_games, *leaf.shape), leaf.dtype), part
            )
    return completed
