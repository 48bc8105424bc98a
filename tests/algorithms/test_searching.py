"""Tree search: the policy that it finds is nowhere worse than the network's,
and a search with a fault is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_dist.algorithms import searching
from jaxrl_dist.nn.observations import ILLEGAL
from jaxrl_dist.types import PyTree

MDPS, STATES, ACTIONS, DISCOUNT = 300, 5, 3, 0.9
ILLEGAL_VALUE = -20.0
"""Value of an illegal action, below that of all others;
a simulator does not know that it is illegal."""


@dataclasses.dataclass(frozen=True)
class Config(searching.SearchConfig):
    num_simulations: int = 16


class Tables(NamedTuple):
    """MDPs whose outcomes are equally likely; each state has an illegal action,
    which the simulator pays well.
    """

    reward: np.ndarray  # [M, S, A]
    then: np.ndarray  # [M, S, A, outcomes]
    legal: np.ndarray  # [M, S, A]


class Fault(NamedTuple):
    """What is wrong with a search; by default nothing."""

    leaf: float = 1.0  # factor of the values of leaves
    discount: float = DISCOUNT
    sign: float = 1.0  # of the discount
    stale: bool = False  # the root's state is another one than the policy's and value's
    unmasked: bool = False  # illegal actions are not ruled out


FAULTS = {
    "zeroed leaf values": Fault(leaf=0.0),
    "wrong discount": Fault(discount=0.0),
    "wrong sign": Fault(sign=-1.0),
    "stale root": Fault(stale=True),
    "ignored mask": Fault(unmasked=True),
}


@functools.cache
def tables(outcomes: int) -> Tables:
    rng = np.random.default_rng(0)
    shape = MDPS, STATES, ACTIONS
    illegal = np.arange(ACTIONS) == rng.integers(ACTIONS, size=(MDPS, STATES, 1))
    reward = np.where(illegal, 2.0, rng.uniform(size=shape))
    return Tables(reward, rng.integers(STATES, size=(*shape, outcomes)), ~illegal)


def action_values(values: np.ndarray, outcomes: int) -> np.ndarray:
    """``[M, S, A]`` from ``[M, S]``."""
    reward, then, legal = tables(outcomes)
    later = values[np.arange(MDPS)[:, None, None, None], then].mean(axis=3)
    return np.where(legal, reward + DISCOUNT * later, ILLEGAL_VALUE)


def values_of(policy: np.ndarray, outcomes: int) -> np.ndarray:
    """The exact values ``[M, S]`` of a policy ``[M, S, A]``, by a linear solve in float64."""
    reward, then, legal = tables(outcomes)
    paid = np.where(legal, reward, ILLEGAL_VALUE)
    on = np.where(legal, policy * DISCOUNT, 0.0)[..., None] * np.eye(STATES)[then].mean(axis=3)
    return np.linalg.solve(np.eye(STATES) - on.sum(axis=2), (policy * paid).sum(axis=2)[..., None])[
        ..., 0
    ]


@functools.cache
def prior(kind: str, outcomes: int) -> np.ndarray:
    """Probabilities ``[M, S, A]``: random ones, or good ones, softmax of 10 Q*;
    illegal actions have none.
    """
    best = np.zeros((MDPS, STATES))
    for _ in range(400):
        best = action_values(best, outcomes).max(axis=2)
    random = np.random.default_rng(1).normal(size=(MDPS, STATES, ACTIONS))
    logits = np.where(
        tables(outcomes).legal,
        10 * action_values(best, outcomes) if kind == "good" else random,
        -np.inf,
    )
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)


@functools.cache
def search(outcomes: int) -> Any:
    reward, then, legal = map(jnp.asarray, tables(outcomes))

    @jax.jit
    def run(probs: jax.Array, values: jax.Array, fault: Fault) -> searching.Found:
        def step(
            params: PyTree, keys: jax.Array, action: jax.Array, state: PyTree
        ) -> tuple[Any, ...]:
            mdp, now = state
            chance = jax.vmap(lambda key: jax.random.randint(key, (), 0, outcomes))(keys)
            new = then[mdp, now, action, chance]
            logits = jnp.log(jnp.maximum(probs[mdp, new], 1e-30))
            ahead = jnp.full(action.shape, fault.sign * fault.discount)
            return (
                reward[mdp, now, action].astype(jnp.float32),
                ahead,
                logits,
                fault.leaf * values[mdp, new],
                (mdp, new),
            )

        mdp, state = (x.reshape(-1) for x in jnp.mgrid[:MDPS, :STATES])
        allowed = legal[mdp, state]
        logits = jnp.log(jnp.maximum(probs[mdp, state], 1e-30))
        logits = jnp.where(allowed, logits, jnp.where(fault.unmasked, 0.0, ILLEGAL))
        root = mdp, jnp.where(fault.stale, (state + 1) % STATES, state)
        given = logits, values[mdp, state], root, allowed | fault.unmasked
        return searching.search(
            Config(), step, (), *given, jax.random.split(jax.random.key(0), len(mdp))
        )

    return run


def worse(kind: str, fault: Fault, outcomes: int = 1) -> float:
    """The share of MDPs in which the policy that the
    search finds is worse than the prior in some state.
    """
    values = values_of(prior(kind, outcomes), outcomes)
    given = map(jnp.float32, (prior(kind, outcomes), values))
    found = search(outcomes)(*given, jax.tree.map(jnp.asarray, fault))
    improved = values_of(
        np.asarray(found.weights, np.float64).reshape(MDPS, STATES, ACTIONS), outcomes
    )
    return float((improved < values - 1e-4).any(axis=1).mean())


@pytest.mark.parametrize("kind", ["good", "random"])
def test_search_is_nowhere_worse_than_its_prior(kind: str) -> None:
    """Danihelka et al. (2022), section 3.2, in all states of 300 deterministic MDPs,
    with exact values.
    """
    assert worse(kind, Fault()) == 0


@pytest.mark.parametrize("outcomes, good, random", [(2, 0.55, 0.94), (3, 0.42, 0.93)])
def test_where_chance_decides_search_improves_a_part(
    outcomes: int, good: float, random: float
) -> None:
    """The shares in docs/planning.md: a tree keeps one outcome of each action,
    and plans as if chance were known.
    """
    shares = [1 - worse(kind, Fault(), outcomes) for kind in ("good", "random")]
    assert shares == pytest.approx([good, random], abs=0.03)


@pytest.mark.parametrize("name", FAULTS)
def test_a_search_with_a_fault_is_worse_than_a_good_prior(name: str) -> None:
    assert worse("good", FAULTS[name]) > 0.05


def test_a_row_finds_the_same_whatever_the_others_are() -> None:
    def step(
        params: PyTree, keys: jax.Array, action: jax.Array, state: jax.Array
    ) -> tuple[Any, ...]:
        noise = jax.vmap(jax.random.normal)(keys)
        return (
            noise + state,
            jnp.full(state.shape, 0.9),
            jnp.outer(state, jnp.arange(3.0)),
            state,
            state + action,
        )

    logits, state = jnp.zeros((4, 3)), jnp.arange(4.0)
    keys = jax.random.split(jax.random.key(1), 4)
    config = Config(num_simulations=4)
    run = jax.jit(lambda rows, keys: searching.search(config, step, (), *rows, None, keys))
    whole = run((logits, state, state), keys)
    for i in range(4):
        part = slice(i, i + 1)
        alone = run((logits[part], state[part], state[part]), keys[part])
        for x, y in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(x, y[part])
    greedy, again = (run((logits[x], state[x], state[x]), None) for x in (slice(4), slice(2, 4)))
    np.testing.assert_array_equal(greedy.weights[2:], again.weights)
    assert (whole.depth >= 1).all() and whole.weights.sum(axis=1) == pytest.approx(1, abs=1e-5)


def puct(
    legal: np.ndarray, logits: np.ndarray, keys: Any, q: np.ndarray | None = None, **flags: Any
) -> Any:
    """Searches ``len(logits)`` roots whose actions end the task and pay ``q [A]``,
    by default nothing.
    """
    paid = jnp.zeros(logits.shape[1]) if q is None else jnp.float32(q)

    def step(params: PyTree, keys: jax.Array, action: jax.Array, state: PyTree) -> tuple[Any, ...]:
        nothing = jnp.zeros(action.shape)
        return paid[action], nothing, jnp.zeros((len(action), len(paid))), nothing, state

    config = dataclasses.replace(Config(search="puct"), **flags)
    rows = jnp.zeros(len(logits))
    return jax.jit(
        lambda keys: searching.search(
            config, step, (), logits, rows, rows, jnp.asarray(legal), keys
        )
    )(keys)


@pytest.mark.parametrize("elsewhere", [0.0, ILLEGAL])
def test_noise_at_the_root_is_of_the_legal_actions_alone(elsewhere: float) -> None:
    """Two of 50 actions are legal, and the network prefers one of them by far;
    it may know of the illegal ones or not.

    A quarter of the prior is noise of the two,
    so the other one is tried whenever its share of 16 visits is due.
    """
    legal = np.arange(50) < 2
    logits = np.where(legal, -5.0, elsewhere) - 12.0 * (np.arange(50) == 1)
    rows = 300
    found = puct(
        *(np.broadcast_to(x, (rows, 50)) for x in (legal, logits)),
        jax.random.split(jax.random.key(0), rows),
    )
    weights = np.asarray(found.weights)
    assert (weights[:, 2:] == 0).all()
    noise = 0.25 * np.random.default_rng(0).dirichlet([0.3, 0.3], 100_000)[:, 1]
    assert (weights[:, 1] > 0).mean() == pytest.approx((noise > 1 / 17).mean(), abs=0.08)


def test_greedy_puct_takes_the_most_visited_or_better_action() -> None:
    """Both actions pay less than the root's value, so each is visited once."""
    logits, legal = np.zeros((2, 2)), np.ones((2, 2), bool)
    for best, q in enumerate(([-1.0, -2.0], [-2.0, -1.0])):
        found = puct(legal, logits, None, np.array(q), num_simulations=2)
        np.testing.assert_allclose(found.weights, 1 / 2)
        np.testing.assert_array_equal(found.action, best)
