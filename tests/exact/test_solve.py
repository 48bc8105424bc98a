"""Values of tables, against loops."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import solve
from jaxrl_dist.exact.table import Table

DISCOUNT = 0.9


def random(seed: int = 0, end: float = 0.1) -> tuple[Table, np.ndarray]:
    """A table of 6 states, and a policy."""
    rng = np.random.default_rng(seed)
    return Table.random(rng, 6, 3, end), rng.dirichlet(np.ones(3), 6)


def swept(transitions: Any, discount: float) -> dict[int, list[float]]:
    """Optimal action values of Gymnasium's ``P``, by sweeps in place."""
    q = {state: [0.0] * len(actions) for state, actions in transitions.items()}
    change = 1.0
    while change > 1e-12:
        change = 0.0
        for state, actions in transitions.items():
            for action, outcomes in actions.items():
                new = sum(
                    p * (r + (0 if over else discount * max(q[to]))) for p, to, r, over in outcomes
                )
                change = max(change, abs(new - q[state][action]))
                q[state][action] = new
    return q


@pytest.mark.parametrize(
    "env_id, episode",
    [("FrozenLake-v1", 0.7441902878), ("CliffWalking-v1", -13.0), ("Taxi-v4", 7.93)],
)
def test_optima_are_those_of_a_dynamic_program(env_id: str, episode: float) -> None:
    env = gymnasium.make(env_id)
    table = Table.of_gymnasium(env)
    q, own = solve.optimal(table, DISCOUNT), swept(env.unwrapped.P, DISCOUNT)  # type: ignore[attr-defined]
    np.testing.assert_allclose(q, [own[int(state)] for state in table.obs], atol=1e-8)
    assert np.max(np.abs(solve.backup(table, q, DISCOUNT) - q)) < 1e-9
    assert solve.episode_return(table, None, env.spec.max_episode_steps or 1000) == pytest.approx(
        episode
    )
    wrong = table._replace(going=np.ones_like(table.going))  # no episode ends
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            solve.optimal(wrong, DISCOUNT), [own[int(state)] for state in table.obs], atol=1e-8
        )


def test_values_and_visits_of_a_policy_are_those_of_a_loop() -> None:
    table, policy = random()
    at, discounted, visits = table.start, 1.0, np.zeros(table.shape)
    value, undiscounted = np.zeros(6), [0.0]
    for _ in range(600):
        visits += discounted * at[:, None] * policy
        undiscounted.append(undiscounted[-1] + float(np.sum(at[:, None] * policy * table.reward)))
        going = table.probability * table.going
        at = np.einsum("s,sa,sak->k", at, policy, going)
        value = np.einsum(
            "sa,sa->s", policy, table.reward + DISCOUNT * np.einsum("sak,k->sa", going, value)
        )
        discounted *= DISCOUNT
    np.testing.assert_allclose(solve.values(table, policy, DISCOUNT), value, atol=1e-12)
    np.testing.assert_allclose(solve.visits(table, policy, DISCOUNT), visits, atol=1e-12)
    assert np.sum(visits * table.reward) == pytest.approx(solve.start_value(table, value))
    assert solve.episode_return(table, policy, 7) == pytest.approx(undiscounted[7])
    endless, _ = random(end=0.0)
    assert solve.visits(endless, policy, DISCOUNT).sum() == pytest.approx(1 / (1 - DISCOUNT))
    with pytest.raises(ConfigError, match="smaller discount"):
        solve.values(endless, policy, 1.0)
    with pytest.raises(ConfigError, match="residual above"):
        solve.optimal(endless._replace(reward=endless.reward * np.inf), 1.0)


def test_values_are_the_mean_of_played_episodes() -> None:
    table, policy = random()
    rng, returns = np.random.default_rng(1), []
    for _ in range(500):
        state, total, weight = rng.choice(6, p=table.start), 0.0, 1.0
        while True:
            action = rng.choice(3, p=policy[state])
            total, weight = total + weight * table.reward[state, action], weight * DISCOUNT
            outcome = rng.choice(6, p=table.probability[state, action])
            if rng.random() > table.going[state, action, outcome]:
                break
            state = table.next[state, action, outcome]
        returns.append(total)
    exact = solve.start_value(table, solve.values(table, policy, DISCOUNT))
    assert abs(np.mean(returns) - exact) < 4 * np.std(returns) / np.sqrt(len(returns))


def test_the_best_policy_is_better_than_all_others() -> None:
    table = Table.random(np.random.default_rng(0), 4, 3, 0.1)
    best = solve.values(table, solve.greedy(table, solve.optimal(table, DISCOUNT)), DISCOUNT)
    for number in range(3**4):
        choice = np.eye(3)[[number // 3**state % 3 for state in range(4)]]
        assert (solve.values(table, choice, DISCOUNT) <= best + 1e-12).all()


def test_soft_values_are_those_of_a_loop() -> None:
    table, policy = random()
    temperature, q = 0.3, np.zeros(table.shape)
    for _ in range(400):
        weight = np.exp(q / temperature)
        chosen = weight / weight.sum(axis=1, keepdims=True)
        # SAC's form of the soft maximum
        v = (chosen * (q - temperature * np.log(chosen))).sum(axis=1)
        q = table.reward + DISCOUNT * np.einsum(
            "sak,sak->sa", table.probability * table.going, v[table.next]
        )
    np.testing.assert_allclose(
        solve.optimal(table, DISCOUNT, temperature=temperature), q, atol=1e-8
    )
    np.testing.assert_allclose(solve.values(table, chosen, DISCOUNT, temperature), v, atol=1e-8)
    assert (solve.values(table, policy, DISCOUNT, temperature) <= v + 1e-12).all()


def test_munchausen_values_are_soft_ones_of_a_lower_temperature() -> None:
    """Vieillard et al. (2020), theorem 1: the entropy that remains is ``(1 - alpha)
    temperature``.
    """
    table, _ = random()
    q = solve.optimal(table, DISCOUNT, temperature=0.3, munchausen=0.6)
    soft = solve.optimal(table, DISCOUNT, temperature=0.3 * 0.4)
    choices = solve.log_softmax(table, q, 0.3), solve.log_softmax(table, soft, 0.3 * 0.4)
    np.testing.assert_allclose(*choices, atol=1e-6)
    clipped = solve.optimal(table, DISCOUNT, temperature=0.3, munchausen=0.6, clip=0.0)
    np.testing.assert_allclose(clipped, solve.optimal(table, DISCOUNT, temperature=0.3), atol=1e-8)
    with pytest.raises(ConfigError, match="temperature above 0"):
        solve.optimal(table, DISCOUNT, munchausen=0.6)


def test_actions_that_are_not_legal_do_not_count() -> None:
    table, _ = random()
    legal = np.ones(table.shape, bool)
    legal[:, 0] = False
    fields = {"next": table.next, "going": table.going, "start": table.start}
    reward = table.reward + np.array([[100.0, 0.0, 0.0]])
    masked = Table.of_arrays(table.probability, reward, **fields, legal=legal)
    fewer = Table.of_arrays(table.probability[:, 1:], table.reward[:, 1:], going=table.going[:, 1:])
    for temperature in (0.0, 0.5):
        q = solve.optimal(masked, DISCOUNT, temperature=temperature)
        np.testing.assert_allclose(
            q[:, 1:], solve.optimal(fewer, DISCOUNT, temperature=temperature), atol=1e-8
        )
    assert (solve.greedy(masked, q)[:, 0] == 0).all()


def test_the_other_side_moves_where_signs_turn() -> None:
    """Nim: take one or two of five; who takes the last one wins."""
    left = np.arange(5)[:, None] + 1 - [1, 2]
    going, legal = np.where(left > 0, -1.0, 0.0)[:, :, None], left >= 0
    following, start = np.maximum(left - 1, 0)[:, :, None], np.eye(5)[4]
    table = Table.of_arrays(
        np.ones((5, 2, 1)), left == 0, next=following, going=going, start=start, legal=legal
    )
    value = solve.state_values(table, solve.optimal(table, 1.0))
    np.testing.assert_array_equal(value, [1, 1, -1, 1, 1])


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("probability", np.ones((2, 2, 2)), "sum 1"),
        ("probability", np.ones((2, 2, 3)), r"\[S, A, S\] works"),
        ("reward", np.full((2, 2), np.nan), "finite"),
        ("reward", np.ones(2), r"reward has shape \(2,\)"),
        ("next", np.full((2, 2, 2), 2), "0 to 1"),
        ("going", 2.0, "-1 to 1"),
        ("start", [0.5, 0.6], "sum 1, not 1.1"),
        ("legal", [[True, False], [False, False]], "allow an action"),
        ("legal", np.ones((3, 2), bool), r"legal has shape \(3, 2\)"),
        ("going", np.ones(5), r"going has shape \(5,\)"),
        ("next", np.full((2, 2, 2), 0.7), "integers work"),
        ("obs", np.zeros(3), "needs an entry for each of 2 states"),
    ],
)
def test_arrays_that_are_no_table_are_refused(field: str, value: Any, says: str) -> None:
    fields: dict[str, Any] = {
        "probability": np.full((2, 2, 2), 0.5),
        "reward": np.zeros((2, 2)),
        field: value,
    }
    with pytest.raises(ConfigError, match=says):
        Table.of_arrays(**fields)
    with pytest.raises(ConfigError, match=r"CartPoleEnv.*P"):
        Table.of_gymnasium(gymnasium.make("CartPole-v1"))


def test_what_an_action_that_is_not_legal_does_is_no_matter() -> None:
    probability, legal = np.full((2, 2, 2), 0.5), np.array([[True, False], [True, True]])
    probability[0, 1] = np.nan
    table = Table.of_arrays(probability, np.ones((2, 2)), legal=legal, obs=[0, 1])
    np.testing.assert_allclose(solve.state_values(table, solve.optimal(table, 0.5)), [2, 2])
    assert table.mixed() == 0


def test_gymnasiums_tables_know_no_wrappers_and_no_hidden_chance() -> None:
    lake = gymnasium.make("FrozenLake-v1")
    assert Table.of_gymnasium(lake).shape == (11, 4)
    with pytest.raises(ConfigError, match=r"TransformReward.*FrozenLakeEnv.*P"):
        Table.of_gymnasium(gymnasium.wrappers.TransformReward(lake, lambda reward: reward - 0.01))
    with pytest.raises(ConfigError, match="fickle_passenger"):
        Table.of_gymnasium(gymnasium.make("Taxi-v4", fickle_passenger=True))
