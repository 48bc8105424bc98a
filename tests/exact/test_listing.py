"""Tables of compiled environments."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from gymnasium import spaces

import jaxrl_dist
from jaxrl_dist import cli, exact
from jaxrl_dist.algorithms.alphazero import AlphaZero
from jaxrl_dist.envs import source
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import solve
from jaxrl_dist.exact.games import Game
from jaxrl_dist.exact.listing import table_of
from jaxrl_dist.exact.measuring import Measure, exploited
from jaxrl_dist.exact.table import Table


class State(NamedTuple):
    place: jax.Array
    card: jax.Array  # hidden; decides the reward at the end
    steps: jax.Array  # a clock
    best: jax.Array  # a statistic
    key: jax.Array  # which decides whether a step slips


class Hidden:
    """A corridor of 3 places, whose end pays by a card that no observation shows;
    a step back may slip.
    """

    default_params = 10

    def observation_space(self, params: int) -> Any:
        return spaces.Discrete(3)

    def action_space(self, params: int) -> Any:
        return spaces.Discrete(2)

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, State]:
        own, card = jax.random.split(key)
        zero = jnp.int32(0)
        card = jax.random.bernoulli(card).astype(jnp.int32)
        return zero, State(zero, card, zero, jnp.float32(0), jax.random.key_data(own))

    def step_env(self, key: jax.Array, state: State, action: jax.Array, params: int) -> Any:
        own, slip = jax.random.split(jax.random.wrap_key_data(state.key))
        back = jnp.where(jax.random.bernoulli(slip, 0.25), state.place, state.place - 1)
        place = jnp.where(action == 1, state.place + 1, jnp.maximum(back, 0))
        over = place == 3
        reward = jnp.where(over, 2.0 * state.card - 1.0, 0.0)
        best = jnp.maximum(state.best, reward)
        new = State(
            jnp.minimum(place, 2), state.card, state.steps + 1, best, jax.random.key_data(own)
        )
        return new.place, new, reward, over, {}

    def is_truncated(self, state: State, params: int) -> jax.Array:
        return state.steps >= params


def test_hidden_parts_tell_states_apart_and_clocks_do_not() -> None:
    table = exact.table(Hidden(), tries=500, starts=200)
    assert table.shape == (6, 2) and table.mixed() == 6  # 3 places and 2 cards
    assert "200 resets, with equal chances" in table.sampled and "500 tries" in table.sampled
    np.testing.assert_array_equal(table.start, [0.5, 0.5, 0, 0, 0, 0])
    ends = table.going[:, 1] == 0
    assert sorted(table.reward[:, 1][ends.all(axis=1)]) == pytest.approx([-1, 1])
    slips = table.probability[table.obs == 2, 0]
    np.testing.assert_allclose(np.sort(slips), [[0.25, 0.75]] * 2, atol=0.06)
    # Where the card pays, go to the end; where it does not, stay away from it.
    value = solve.state_values(table, solve.optimal(table, 0.9))
    np.testing.assert_allclose(np.sort(value), [0, 0, 0, 0.81, 0.9, 1])


@pytest.fixture(scope="module")
def small() -> exact.Table:
    return exact.Table.random(np.random.default_rng(0), 5, 2, 0.2)


def test_an_environment_with_named_outcomes_is_listed_exactly(small: exact.Table) -> None:
    listed = exact.table(exact.TableEnv(small))
    order = np.argmax(listed.obs, axis=1)
    assert listed.sampled == "" and sorted(order) == [*range(5)]
    np.testing.assert_allclose(listed.start, small.start[order], atol=1e-7)
    q = [solve.optimal(table, 0.9) for table in (small, listed)]
    np.testing.assert_allclose(q[0][order], q[1], atol=1e-6)  # float32 in the environment


def test_sampled_outcomes_are_near_and_said_to_be_sampled(small: exact.Table) -> None:
    env = source.find(exact.TableEnv(small)).device()
    found = table_of(env._replace(outcomes=None, starts=None), tries=2000)
    assert "10,000 resets" in found.sampled and "2,000 tries" in found.sampled
    order = np.argmax(found.obs, axis=1)
    weight = np.zeros((5, 2, 5))
    np.add.at(
        weight,
        (*np.indices(found.next.shape)[:2], order[found.next]),
        found.probability * found.going,
    )
    np.testing.assert_allclose(weight, (small.probability * small.going)[order], atol=0.05)
    assert np.abs(weight - small.probability[order]).max() > 0.1  # with the ends, they are others


class Dice(Hidden):
    """A race of two sides to the end of a corridor of 3 places; the mover moves on by chance,
    and names it.
    """

    least = 0

    def reset_env(self, key: jax.Array, params: int) -> Any:
        return jnp.int32(0), {"place": jnp.int32(0), "side": jnp.int32(0)}

    def side_to_move(self, state: Any) -> jax.Array:
        return state["side"]

    def _after(self, state: Any, steps: Any) -> Any:
        new = {"place": state["place"] + steps, "side": 1 - state["side"]}
        over = new["place"] >= 2
        return jnp.minimum(new["place"], 2), new, jnp.where(over, 1.0, 0.0), over

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: int) -> Any:
        return *self._after(
            state, jnp.where(jax.random.bernoulli(key, 0.25), action + 1, self.least)
        ), {}

    def is_truncated(self, state: Any, params: int) -> jax.Array:
        return jnp.bool_(False)


class Named(Dice):
    def outcomes(self, state: Any, action: jax.Array, params: int) -> Any:
        after = [self._after(state, steps) for steps in (jnp.int32(self.least), action + 1)]
        return jnp.array([0.75, 0.25]), *jax.tree.map(lambda *x: jnp.stack(x), *after)


def test_a_game_that_names_its_outcomes_keeps_its_sides() -> None:
    """Who moves last by two wins at once with a quarter: v = 1/4 - 3/4 v d,
    whose d is the discount.
    """
    named, sampled = exact.table(Named()), exact.table(Dice(), tries=4000)
    assert named.sampled == "" and (named.going < 0).any()
    values = [
        solve.start_value(x, solve.state_values(x, solve.optimal(x, 0.9))) for x in (named, sampled)
    ]
    assert values[0] == pytest.approx(0.25 / (1 + 0.75 * 0.9)) == pytest.approx(values[1], abs=0.02)


class Finite(Named):
    least = 1


class Unsure(Named):
    given: Any = None

    def outcomes(self, state: Any, action: jax.Array, params: int) -> Any:
        after = super().outcomes(state, action, params)[1:]
        return after if self.given is None else (jnp.asarray(self.given), *after)


@pytest.mark.parametrize(
    "given, says",
    [([0.8, 0.1], "sum must be 1"), ([1.2, -0.2], "sum must be 1"), (None, "returns")],
)
def test_outcomes_without_probabilities_are_refused(given: Any, says: str) -> None:
    env = Unsure()
    env.given = given
    with pytest.raises(ConfigError, match=f"outcomes .*{says}"):
        exact.table(env)


def test_first_states_without_probabilities_are_refused() -> None:
    env = Named()
    state = {"place": jnp.array([0, 1]), "side": jnp.array([0, 0])}
    env.starts = lambda params: (jnp.array([0.5, 0.1]), state["place"], state)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"starts .*must be 1"):
        exact.table(env)


def test_runs_of_games_report_their_exploitability() -> None:
    pytest.importorskip("mctx")
    search = AlphaZero(hidden_sizes=(4,), num_simulations=2, num_minibatches=2, num_epochs=1)
    sizes: dict[str, Any] = {
        "num_envs": 4,
        "rollout_length": 16,
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    config = jaxrl_dist.Train(
        search, Finite(), exact=True, total_env_steps=256, report_interval=128, **sizes
    )
    *_, last = jaxrl_dist.train(config)
    table = exact.table(Finite())
    learnt = Measure(search.make(source.find(Finite()).spec), table).learnt(last.variables())
    expected = {f"exact/{name}": x for name, x in exploited(Game(table), learnt).items()}
    assert {
        name: x for name, x in last.metrics.items() if name.startswith("exact/")
    } == pytest.approx(expected)
    assert [*expected] == ["exact/exploitability"]


def test_repeated_actions_know_no_time_limit() -> None:
    """A simulator goes on at a time limit, so its clock does not tell states apart."""
    assert exact.table("gymnax:FrozenLake-misc").shape[0] == 11
    env = source.find("gymnax:FrozenLake-misc", wrappers=Wrappers(action_repeat=2)).device()
    table = table_of(env, max_states=50, tries=200)
    assert table.shape[0] <= 11


def test_what_cannot_be_listed_is_refused_in_a_line(small: exact.Table) -> None:
    env = exact.TableEnv(small)
    with pytest.raises(ConfigError, match=r"^object:TableEnv.*3") as error:
        exact.table(env, max_states=3)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="has actions float32"):
        exact.table("Pendulum-v1")
    with pytest.raises(ConfigError, match="outside JAX, where only a table P"):
        exact.table("gymnasium:CartPole-v1")
    with pytest.raises(ValueError, match="environment of one agent"):
        exact.TableEnv(small._replace(going=-small.going))


def test_tries_name_the_error_of_what_they_estimate() -> None:
    """The best return of FrozenLake in 100 steps is 0.7442, by the table that Gymnasium names."""
    lake = Table.of_gymnasium(gymnasium.make("FrozenLake-v1"))
    truth = solve.episode_return(lake, None, 100)
    assert (
        truth == pytest.approx(0.7442, abs=5e-5)
        and solve.standard_error(lake, lambda part: 0.0) is None
    )
    apart = []
    for seed in range(6):
        table = exact.table("gymnax:FrozenLake-misc", tries=400, seed=seed)
        error = solve.standard_error(
            table, lambda part, table=table: solve.return_of_best(table, part, 100)
        )
        apart.append((solve.episode_return(table, None, 100) - truth) / error)
    assert 0.3 < np.std(apart) < 2 and np.abs(apart).max() < 3.5
    assert solve.return_of_best(table, table, 100) == pytest.approx(
        solve.episode_return(table, None, 100)
    )


def test_the_command_prints_the_error_of_its_tries(capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs.finished(f"dqn --env gymnax:FrozenLake-misc {runs.TINY} --learning-starts 100"))
    assert cli.main(["exact", run, "--tries", "100", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert 0.01 < numbers["optimum_error"] < 0.2 and numbers["value_optimal_error"] > 0
    assert cli.main(["exact", run, "--tries", "100"]) == 0
    out = capsys.readouterr().out
    assert (
        f"{numbers['optimum']:.3g} +- {2 * numbers['optimum_error']:.2g}" in out
        and "--tries" in out
    )
