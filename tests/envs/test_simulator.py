"""Environments as a model to plan with: what it foresees is what happens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import probes
import pytest
from test_libraries import needs

import jaxrl_dist
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import observations
from jaxrl_dist.training.planning import check_simulator
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables

NUM_ENVS, NUM_STEPS = 4, 24
KEY = jax.random.key(0)

pytestmark = pytest.mark.filterwarnings("ignore")


def foreseen(source: EnvSource) -> tuple[Any, Any]:
    """Plays at random: what the simulator foresees of each step
    with the environments' own keys, and what happens.
    """
    env = source.device()
    assert env.simulate is not None

    def step(carry: Any, keys: jax.Array) -> Any:
        state, obs = carry
        legal = observations.legal(env.spec, obs)
        n = env.spec.action.n  # type: ignore[union-attr]
        logits = observations.masked(jnp.zeros((NUM_ENVS, n)), legal)
        action = jax.vmap(jax.random.categorical)(
            jax.vmap(jax.random.fold_in, (0, None))(keys, 1), logits
        )
        simulator = env.simulate(state)  # type: ignore[misc]
        told = jax.vmap(simulator.step)(
            simulator.state, action, jax.vmap(jax.random.split)(keys)[:, 0]
        )
        state, now, _ = env.step(state, action, keys)
        return (state, now.obs), (told._replace(state=()), now)

    first = env.reset(jax.random.split(KEY, NUM_ENVS))
    keys = jax.random.split(jax.random.key(1), (NUM_STEPS, NUM_ENVS))
    return jax.device_get(jax.jit(lambda first: jax.lax.scan(step, first, keys)[1])(first))


CASES: dict[str, Any] = {
    "plain": lambda: find("gymnax:CartPole-v1"),
    "stacks": lambda: find(
        "gymnax:CartPole-v1", wrappers=Wrappers(hide="velocities", frame_stack=3)
    ),
    "repeats": lambda: find(own.Walk(), wrappers=Wrappers(action_repeat=2)),
    "turns": lambda: find(own.Turns()),
    "self": lambda: find("pgx:tic_tac_toe", {"opponents": "self"}),
    "random": lambda: find("pgx:tic_tac_toe", {"opponents": "random"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_foreseen_happens(name: str) -> None:
    if name in ("self", "random"):
        needs("pgx")
    source = CASES[name]()
    told, now = foreseen(source)
    # A simulator knows no time limit, at which the environment stops to repeat an action.
    whole = now.valid & ~now.truncated if name == "repeats" else now.valid
    for path, x in jax.tree.leaves_with_path(told.obs):
        happened = dict(jax.tree.leaves_with_path(now.obs))[path]
        np.testing.assert_array_equal(x[whole], happened[whole])
    np.testing.assert_array_equal(told.reward[whole], now.reward[whole])
    np.testing.assert_array_equal((told.discount == 0)[whole], now.terminated[whole])
    assert now.terminated.any() or name == "stacks"
    going = now.valid & ~now.terminated
    if name == "self":
        assert (told.discount[going] == -1).all() and source.spec.both_sides
    elif name == "turns":
        # after the second and the third of three moves, the other side is to move
        length = np.cumsum(now.valid, axis=0)  # the first episodes suffice
        first = going & (np.cumsum(~now.valid, axis=0) == 0)
        np.testing.assert_array_equal(told.discount[first], np.where(length % 3 == 1, 1, -1)[first])
    else:
        assert (told.discount[going] == 1).all() and not source.spec.both_sides


@pytest.mark.case  # the simulators of single agents
def test_agents_of_a_game_simulate_as_one_agent_for_both_sides() -> None:
    needs("pgx")
    alone, game = CASES["self"]().device(), find("pgx:tic_tac_toe").device()
    keys = jax.random.split(KEY, NUM_ENVS)
    state, (both, _) = alone.reset(keys)[0], game.reset(jnp.repeat(keys, 2))
    one, two = alone.simulate(state), game.simulate(both)
    action = jnp.arange(NUM_ENVS) * 2
    expected = jax.vmap(one.step)(one.state, action, keys)
    actual = jax.vmap(two.step)(two.state, jnp.repeat(action, 2), jnp.repeat(keys, 2))
    for name in ("obs", "reward", "discount"):
        for a, b in zip(
            *map(jax.tree.leaves, (getattr(actual, name), getattr(expected, name))), strict=True
        ):
            np.testing.assert_array_equal(a[::2], b)
            np.testing.assert_array_equal(a[1::2], b)
    assert (
        max(x.size for x in jax.tree.leaves(one.state)) <= NUM_ENVS * 9
    )  # no observation, which follows from the rest


@dataclasses.dataclass(frozen=True)
class Foresight:
    """Does not learn; its extras hold what the simulator foresees of its own action,
    which is the same each time.
    """

    discount: float = 0.9

    def make(self, spec: EnvSpec) -> Algorithm:
        import optax

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            action = jnp.ones(len(obs), jnp.int32)
            if context.simulator is None:
                return action, core, {"obs": obs, "reward": obs[:, 0]}
            keys = jnp.broadcast_to(KEY, action.shape)
            told = jax.vmap(context.simulator.step)(context.simulator.state, action, keys)
            assert told.obs.shape == obs.shape
            # Greedy: 1 where the walk is foreseen to rise, which it always is.
            chosen = (told.obs[:, -1] > obs[:, -1]).astype(jnp.int32)
            return chosen, core, {"obs": told.obs, "reward": told.reward}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            fields = {
                "told": rollout.extras,
                "obs": rollout.obs[1:],
                "reward": rollout.reward,
                "valid": rollout.valid,
            }
            return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), fields)

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            missed = jnp.abs(batch["told"]["obs"] - batch["obs"]).sum(axis=-1)
            lost = jnp.abs(batch["told"]["reward"] - batch["reward"])
            metrics = {"missed": missed, "lost": lost, "size": jnp.abs(batch["reward"])}
            return 0.0 * missed * variables.params, batch["valid"], Aux(metrics)

        return Algorithm(
            lambda key: Variables(jnp.zeros(()), ()),
            policy,
            postprocess,
            loss,
            optax.sgd(0.0),
            window=1,
            searches=True,
        )


def test_wrappers_of_policies_change_simulated_and_real_steps() -> None:
    source = find(own.Walk())
    spec = source.spec
    algorithm = wrappers.normalize_observations(Foresight().make(spec), spec)
    algorithm = wrappers.clip_rewards(wrappers.scale_rewards(algorithm, 0.9), -0.75, 0.5)
    stats = wrappers.RunningStats(jnp.float32(2), jnp.zeros(()), jnp.float32(2 * 4.0**2))
    observed = wrappers.RunningStats(jnp.float32(2), jnp.ones(1), jnp.full(1, 2 * 2.0**2))
    variables = Variables(jnp.zeros(()), (stats, (observed, ())))
    env = source.device()
    state, obs = env.reset(jax.random.split(KEY, 2))
    assert env.simulate is not None
    core = algorithm.initial_core(2)
    _, _, extras = algorithm.policy(
        variables, obs, core, Context(KEY, simulator=env.simulate(state))
    )
    np.testing.assert_allclose(extras["obs"], (1 - 1) / 2 * np.ones((2, 1)), atol=1e-6)
    np.testing.assert_allclose(extras["reward"], 0.5 / 4, rtol=1e-5)  # clipped, then scaled


@pytest.mark.parametrize(
    "flags", [{"plan": "on_device"}, {"plan": "asynchronous", "num_actors": 1}]
)
def test_training_and_evaluation_get_the_simulator(flags: dict[str, Any]) -> None:
    settings = {
        "num_envs": 8,
        "rollout_length": 4,
        "total_env_steps": 64,
        "report_interval": 1,
        "frame_stack": 2,
    }
    config = jaxrl_dist.Train(Foresight(), own.Walk(), evaluation_episodes=4, **settings, **flags)
    *_, last = jaxrl_dist.train(config)
    assert last.metrics["missed"] == last.metrics["lost"] == 0 < last.metrics["size"]
    assert last.evaluation is not None and last.evaluation["return_mean"] == 1 + 2 + 3


class Drawn(own.Walk):
    def render(self, state: own.WalkState, params: int) -> np.ndarray:
        return np.zeros((8, 8, 3), np.uint8)


def test_an_evaluation_that_is_watched_gets_the_simulator() -> None:
    source = find(Drawn())
    evaluator = Evaluator({"": Foresight().make(source.spec)}, source, 2, seed=0)
    variables = {"": Variables(jnp.zeros(()), ())}
    watched: list[Any] = []
    evaluation = evaluator.play(variables, watch=lambda env, indices: watched.append(indices))
    assert evaluation is not None and list(evaluation.returns) == [6, 6] and watched


REFUSED = {
    "gymnasium:CartPole-v1": "plans with the environment itself, and gymnasium:CartPole-v1 runs on the host",
    "pgx:tic_tac_toe": "plans for one agent, but pgx:tic_tac_toe has 2",
}


@pytest.mark.parametrize("env", REFUSED)
def test_an_algorithm_that_plans_needs_a_simulator(env: str) -> None:
    if env.startswith("pgx"):
        needs("pgx")
    algorithm, source = Foresight().make(probes.spec()), find(env)
    with pytest.raises(ConfigError, match=f"^mine {REFUSED[env]}"):
        check_simulator({"": algorithm}, source, "on_device", {"": "mine"})


def test_one_agent_for_both_sides_needs_a_simulating_algorithm() -> None:
    algorithm, source = Foresight().make(probes.spec()), find(own.Turns())
    check_simulator({"": algorithm}, source, "asynchronous", {"": "mine"})
    with pytest.raises(
        ConfigError,
        match=r"^mine plans.*which plan synchronous does not run beside the policy; use",
    ):
        check_simulator({"": algorithm}, source, "synchronous", {"": "mine"})
    with pytest.raises(
        ConfigError,
        match=r"^mine learns for one side, but with opponents=self it moves for both sides of object:Turns",
    ):
        check_simulator(
            {"": dataclasses.replace(algorithm, searches=False)}, source, "on_device", {"": "mine"}
        )


def test_one_agent_moves_for_two_players_and_not_for_more() -> None:
    needs("pgx")
    with pytest.raises(
        ConfigError, match="opponents=self needs a game of 2 players, but this one has 3"
    ):
        find("pgx:sparrow_mahjong", {"opponents": "self"})
