"""Exact values, visits and returns of tables, in float64.

``discount`` is that of the returns, 0 to 1; with 1, values exist only where episodes end. Policies
are probabilities ``[S, A]``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact.table import Table
from jaxrl_dist.heavy import linalg, sparse, special


class NoValues(ConfigError):
    """A policy's values do not exist: with discount 1, its episodes need not end."""


TOLERANCE = 1e-9
"""Largest residual of optimal values."""
LONGEST = 1e14
"""Most steps of an episode, in the mean, of which a policy has values without a discount."""
MAX_SWEEPS = 1_000_000


def masked(table: Table, q: np.ndarray) -> np.ndarray:
    """Returns action values ``[S, A]`` with minus infinity for actions that are not legal."""
    return np.where(table.legal, q, -np.inf)


def greedy(table: Table, q: np.ndarray) -> np.ndarray:
    """Returns the policy ``[S, A]`` that takes a legal action of the largest value,
    the first of equals.
    """
    return np.eye(table.shape[1])[np.argmax(masked(table, q), axis=1)]


def log_softmax(table: Table, q: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the log-probabilities ``[S, A]`` of the
    policy proportional to ``exp(q / temperature)``.
    """
    logits = masked(table, q) / temperature
    return logits - special.logsumexp(logits, axis=1, keepdims=True)


def state_values(table: Table, q: np.ndarray, temperature: float = 0.0) -> np.ndarray:
    """Returns the values ``[S]`` of the best policy by ``q [S, A]``: the maximum, or the soft one.

    The soft maximum is ``temperature * log sum exp(q / temperature)``: the expected value plus
    ``temperature`` times the entropy (Haarnoja et al. 2017, equation 4).
    """
    if temperature == 0:
        return masked(table, q).max(axis=1)
    return temperature * special.logsumexp(masked(table, q) / temperature, axis=1)


def backup(
    table: Table,
    q: np.ndarray,
    discount: float,
    temperature: float = 0.0,
    munchausen: float = 0.0,
    clip: float = -np.inf,
    matrix: sparse.csr_array | None = None,
) -> np.ndarray:
    """Applies a Bellman operator to action values ``[S, A]``.

    ``r + discount P V``, with the maximum as ``V``, or the soft maximum of a ``temperature``
    (Haarnoja et al. 2017, equation 7). ``munchausen`` adds that share of the scaled log-policy,
    clipped to at least ``clip``, to the reward (Vieillard et al. 2020, equation 2).

    Args:
      matrix: ``table.matrix()``, if it is at hand.
    """
    after = (table.matrix() if matrix is None else matrix) @ state_values(table, q, temperature)
    new = table.reward + discount * after.reshape(q.shape)
    if munchausen:
        bonus = np.maximum(temperature * log_softmax(table, q, temperature), clip)
        new = new + np.where(table.legal, munchausen * bonus, 0.0)
    return new


def optimal(
    table: Table,
    discount: float,
    *,
    temperature: float = 0.0,
    munchausen: float = 0.0,
    clip: float = -np.inf,
    tolerance: float = TOLERANCE,
) -> np.ndarray:
    """Returns the fixed point ``[S, A]`` of ``backup``, the optimal action values,
    by value iteration.

    Its residual, the largest change by another ``backup``, is below ``tolerance``.

    Raises:
      ConfigError: the iteration does not get there, as with discount 1 where episodes need not end,
        or ``munchausen`` lacks a temperature, or that is negative.
    """
    if not temperature >= 0:
        raise ConfigError(f"a temperature must be 0 or more, not {temperature}")
    if munchausen and not temperature > 0:
        raise ConfigError("munchausen needs a temperature above 0")
    matrix = table.matrix()
    q = np.zeros(table.shape)
    for _ in range(MAX_SWEEPS):
        new = backup(table, q, discount, temperature, munchausen, clip, matrix)
        change = np.max(np.abs(new - q))
        if change < tolerance:
            return q
        if not np.isfinite(change):
            break
        q = new
    raise ConfigError(
        f"value iteration with discount {discount:g} leaves a residual above {tolerance:g}; use a "
        "smaller discount or a larger tolerance"
    )


def values(
    table: Table, policy: np.ndarray, discount: float, temperature: float = 0.0
) -> np.ndarray:
    """Returns the values ``[S]`` of a policy, by solving its linear equations;
    with the entropy's, as SAC's critics.

    Raises:
      NoValues: the discount is 1, and episodes need not end.
    """
    reward = (policy * table.reward).sum(axis=1)
    if temperature:
        entropy = -np.sum(
            policy * np.log(policy, out=np.zeros_like(policy), where=policy > 0), axis=1
        )
        reward = reward + temperature * entropy
    return _solved(table, _chain(policy, table.matrix()), discount, reward)


def action_values(table: Table, value: np.ndarray, discount: float) -> np.ndarray:
    """Returns the values ``[S, A]`` of taking an action,
    if the next states have the values ``value [S]``.
    """
    return table.reward + discount * (table.matrix() @ value).reshape(table.shape)


def visits(table: Table, policy: np.ndarray, discount: float) -> np.ndarray:
    """Returns the expected discounted number of times
    ``[S, A]`` that an episode takes each action in each state.

    Their sum is the expected discounted length of an episode, without a time limit
    ``1 / (1 - discount)`` at most; the sum of visits times rewards is the return from the start
    states.

    Raises:
      ConfigError: as ``values``.
    """
    return (
        _solved(table, _chain(policy, table.matrix(signed=False)).T, discount, table.start)[:, None]
        * policy
    )


def _chain(policy: np.ndarray, matrix: sparse.csr_array) -> sparse.csr_array:
    """Returns the matrix ``[S, S]`` of a policy's steps."""
    states, actions = policy.shape
    rows = np.repeat(np.arange(states), actions)
    choice = sparse.csr_array(
        (policy.ravel(), (rows, np.arange(states * actions))), shape=(states, states * actions)
    )
    return choice @ matrix


def _solved(
    table: Table, chain: sparse.csr_array, discount: float, right: np.ndarray
) -> np.ndarray:
    """Solves ``(1 - discount chain) x = right``.

    Raises:
      NoValues: it has no solution.
    """
    system = sparse.csc_array(sparse.eye_array(len(right)) - discount * chain)
    try:
        solution = linalg.splu(system).solve(right)
        size = np.max(np.abs(solution))
        residual = np.max(np.abs(system @ solution - right)) / max(1.0, size)
        # A matrix that rounding alone makes regular has a solution
        # as large as the inverse of float64's precision.
        if (
            np.isfinite(residual)
            and residual < TOLERANCE
            and size <= LONGEST * np.max(np.abs(right), initial=1.0)
        ):
            return solution
    except RuntimeError:  # singular
        pass
    raise NoValues(
        f"this policy's values do not exist with discount {discount:g}; use a smaller discount"
    )


def start_value(table: Table, value: np.ndarray) -> float:
    """Returns the mean of values ``[S]`` over the first states."""
    return float(table.start @ value)


def standard_error(table: Table, number: Callable[[Table], float]) -> float | None:
    """Returns the standard error of a number of a table,
    by that number in each part of the tries; None: not known.
    """
    if len(table.parts) < 2:
        return None
    try:
        values = [number(part) for part in table.parts]
    except NoValues:  # in a part that has few tries
        return None
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def return_of_best(table: Table, other: Table, steps: int) -> float:
    """Returns the return in another table of the policy that is best in ``table``,
    as ``episode_return`` counts.
    """
    matrices = table.matrix(), other.matrix()
    value = gained = np.zeros(table.shape[0])
    for _ in range(steps):
        q = masked(table, table.reward + (matrices[0] @ value).reshape(table.shape))
        after = other.reward + (matrices[1] @ gained).reshape(table.shape)
        best = q.argmax(axis=1)[:, None]
        new = q.max(axis=1), np.take_along_axis(after, best, axis=1)[:, 0]
        if np.array_equal(new[0], value) and np.array_equal(new[1], gained):
            break
        value, gained = new
    return start_value(other, gained)


def episode_return(table: Table, policy: np.ndarray | None, steps: int) -> float:
    """Returns the expected undiscounted return of episodes that are cut after a number of steps,
    as in evaluations.

    Args:
      policy: None: the best one, which may depend on the steps left.
    """
    matrix = table.matrix()
    value = np.zeros(table.shape[0])
    for _ in range(steps):
        q = table.reward + (matrix @ value).reshape(table.shape)
        if policy is None:
            new = masked(table, q).max(axis=1)
        else:
            new = (policy * q).sum(axis=1)
        if np.array_equal(new, value):
            break
        value = new
    return start_value(table, value)
