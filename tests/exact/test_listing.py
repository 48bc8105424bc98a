"""Tables of compiled environments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from jaxrl_dist import exact
from jaxrl_dist.envs import source
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import solve
from jaxrl_dist.exact.listing import table_of


class State(NamedTuple):
    place: jax.Array
    card: jax.Array  # hidden; decides the reward at the end
    steps: jax.Array  # a clock
    best: jax.Array  # a statistic
    key: jax.Array  # which decides whether a step slips


class Hidden:
    """A corridor of 3 places, whose end pays by a card that no observation shows; a step back may slip."""

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
        new = State(jnp.minimum(place, 2), state.card, state.steps + 1, best, jax.random.key_data(own))
        return new.place, new, reward, over, {}

    def is_truncated(self, state: State, params: int) -> jax.Array:
        return state.steps >= params


def test_clocks_statistics_and_keys_tell_no_states_apart_and_what_is_hidden_does() -> None:
    table = exact.table(Hidden(), tries=500, starts=200)
    assert table.shape == (6, 2) and table.mixed() == 6  # 3 places and 2 cards
    assert "200 resets, which agree with equal chances" in table.sampled and "500 tries" in table.sampled
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


def test_an_environment_that_names_its_outcomes_is_listed_exactly(small: exact.Table) -> None:
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
    np.add.at(weight, (*np.indices(found.next.shape)[:2], order[found.next]), found.probability * found.going)
    np.testing.assert_allclose(weight, (small.probability * small.going)[order], atol=0.05)
    assert np.abs(weight - small.probability[order]).max() > 0.1  # with the ends, they are others


def test_what_cannot_be_listed_is_refused_in_a_line(small: exact.Table) -> None:
    env = exact.TableEnv(small)
    with pytest.raises(ConfigError, match=r"^object:TableEnv has more than 3 states, so it gets no exact") as error:
        exact.table(env, max_states=3)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="has actions float32"):
        exact.table("Pendulum-v1")
    with pytest.raises(ConfigError, match="outside JAX, where only a table P"):
        exact.table("gymnasium:CartPole-v1")
    with pytest.raises(ValueError, match="no environment of one agent"):
        exact.TableEnv(small._replace(going=-small.going))
