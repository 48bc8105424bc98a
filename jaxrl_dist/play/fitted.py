"""Fitted Q evaluation: the values of a policy according to others' experience (Le et al. 2019,
arXiv:1903.08738).

One program fits several networks: the first to all episodes, and each of the others to as many
episodes, drawn from them with replacement, so that the spread of the networks says how much the
estimate depends on the data.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist import mesh, packing, returns, rng
from jaxrl_dist.errors import DivergedError
from jaxrl_dist.learners import sgd
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.spaces import Space
from jaxrl_dist.types import Algorithm, Array, Aux, Context, PyTree, TrainState, Variables

BATCH_SIZE = 256
LEARNING_RATE = 2e-3
"""Step size of Adam at the start; half a cosine wave takes it to 0, so that the last networks do
not depend on one batch."""
TARGET_RATE = 0.1
"""Fraction by which each update moves the target network. At 0.02, 5000 updates did not settle at a
discount of 0.99: a fit to CartPole's data said 83, and 94.6 is right."""
DISPATCHES = 50
"""Parts of the fit between which its progress is shown."""
CHUNK = 4096
"""Steps whose values are computed at once."""


class Steps(NamedTuple):
    """Steps ``[L, ...]`` laid out as in ``data.Dataset``, and what the target would do in each."""

    obs: PyTree
    action: Array
    """[L] categories, or [L, A] float32."""
    choices: Array
    """The target's: [L, n] probabilities, or K drawn actions [L, K, A]; both float32."""
    reward: Array
    """[L] float32."""
    discount: Array
    """[L] float32, 0 where the task ended."""
    valid: Array
    """[L] bool."""
    episode: Array
    """[L] int32."""


class Values(NamedTuple):
    """Values of ``M`` fitted networks."""

    state: np.ndarray
    """[M, L] float32, of the target's actions."""
    action: np.ndarray
    """[M, L] float32, of the data's actions."""


def fit(
    target: Algorithm,
    observation: Space,
    steps: Steps,
    counts: np.ndarray,
    *,
    hidden_sizes: tuple[int, ...],
    updates: int,
    seed: int,
    progress: Callable[[int], None],
) -> Values:
    """Fits networks by expected SARSA on the target: ``Q(s, a) <- r + discount E Q(s', target)``
    (equation 1).

    Args:
      observation: the space that the networks read.
      counts: float32 ``[M, E]``, how often each episode counts.
      progress: called with the number of updates done.

    Raises:
      DivergedError: the values are not finite.
    """
    steps, shift, scale = _scaled(steps)
    if steps.action.ndim == 1:
        size = {"num_actions": steps.choices.shape[1]}
    else:
        size = {"action_size": len(steps.action[0])}
    config = TorsoConfig(hidden_sizes=hidden_sizes, activation="relu")
    critic = networks.critic_network(config, observation, 1, **size)
    algorithm, values = _evaluation(target, critic, updates)
    keys = jax.random.split(rng.stream(seed, rng.Stream.INIT), len(counts))
    # Data sets of similar sizes share a program.
    rows = np.flatnonzero(steps.valid)
    padded, drawn = jax.tree.map(lambda x: jnp.asarray(_padded(x)), (steps, rows.astype(np.int32)))
    data = padded, drawn, jnp.asarray(counts, jnp.float32), np.int32(len(rows))

    def advance(states: TrainState, data: Any, key: Array, first: Array, last: Array) -> TrainState:
        steps, rows, counts, size = data

        def update(number: Array, states: TrainState) -> TrainState:
            draw = jax.random.fold_in(key, number)
            at = rows[jax.random.randint(draw, (BATCH_SIZE,), 0, size)]
            batch = (
                jax.tree.map(lambda x: x[at], steps),
                jax.tree.map(lambda x: x[at + 1], (steps.obs, steps.choices)),
            )
            keys = jax.random.split(draw, BATCH_SIZE)
            weight = counts[:, steps.episode[at]]

            def member(state: TrainState, weight: Array) -> TrainState:
                gradient, _, _ = sgd.gradient(algorithm, state, batch, keys, weight)
                return sgd.apply(algorithm, state, gradient)

            return mesh.over_members(member)(states, weight)

        return jax.lax.fori_loop(first, last, update, states)

    run = jax.jit(mesh.by_hand(advance), donate_argnums=0)
    states = jax.jit(jax.vmap(lambda key: sgd.init(algorithm, key)))(keys)
    ends = np.linspace(0, updates, min(updates, DISPATCHES) + 1).astype(np.int32)
    for first, last in itertools.pairwise(ends):
        states = run(states, data, rng.stream(seed, rng.Stream.LEARN), first, last)
        jax.block_until_ready(states)
        progress(int(last))
    of_rows = jax.jit(jax.vmap(values, (0, None, None, None)))
    state, action = in_chunks(
        lambda *x: of_rows(states.target, *x), steps.obs, steps.action, steps.choices, axis=1
    )
    if not (np.isfinite(state).all() and np.isfinite(action).all()):
        raise DivergedError(
            "fitted Q evaluation has diverged: its values are not finite; use a smaller --discount"
        )
    return Values(shift + scale * state, shift + scale * action)


def _evaluation(
    target: Algorithm, critic: Any, updates: int
) -> tuple[Algorithm, Callable[..., tuple[Any, Any]]]:
    """Returns the algorithm that fits ``critic``, and
    ``(params, obs, action, choices) -> (state values, action values)``.
    """

    def state_value(params: PyTree, obs: PyTree, choices: Array) -> jax.Array:
        if choices.ndim == 2:
            return jnp.sum(choices * critic.apply(params, obs)[0], axis=-1)
        return jax.vmap(lambda action: critic.apply(params, obs, action)[0], 1)(choices).mean(
            axis=0
        )

    def action_value(params: PyTree, obs: PyTree, action: Array) -> jax.Array:
        if action.ndim == 1:
            return packing.take_along_last(critic.apply(params, obs)[0], action)
        return critic.apply(params, obs, action)[0]

    def loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        steps, following = batch
        aim = steps.reward + steps.discount * state_value(context.target, *following)
        error = action_value(variables.params, steps.obs, steps.action) - returns.constant(aim)
        return 0.5 * jnp.square(error), steps.valid, Aux({})

    algorithm = dataclasses.replace(
        target,
        init=lambda key: Variables(critic.init(key), ()),
        loss=loss,
        optimizer=optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, updates)),
        target=lambda params, target, updates: optax.incremental_update(
            params, target, TARGET_RATE
        ),
        initial_target=lambda params: jax.tree.map(jnp.copy, params),
        replay=None,
        behaviour=None,
    )

    def values(
        params: PyTree, obs: PyTree, action: Array, choices: Array
    ) -> tuple[jax.Array, jax.Array]:
        return state_value(params, obs, choices), action_value(params, obs, action)

    return algorithm, values


def _scaled(steps: Steps) -> tuple[Steps, float, float]:
    """Returns the steps in units in which values are near 0 and 1, and the shift and scale of these
    values.

    The shift is the best value that is the same in all states, which fitting by a target network
    finds last.
    """
    reward = steps.reward[steps.valid].astype(np.float64)
    discount = steps.discount[steps.valid].astype(np.float64)
    shift = reward.sum() / (1.0 - discount).sum()
    rest = reward + (discount - 1.0) * shift
    scale = float(np.sqrt(np.mean(rest**2) / np.maximum(np.mean(1.0 - discount**2), 1e-6))) or 1.0
    rewards = np.where(steps.valid, (steps.reward + (steps.discount - 1.0) * shift) / scale, 0.0)
    action = steps.action
    choices = steps.choices
    if action.ndim == 2:
        like = steps.action[steps.valid]
        action = _standardised(action, like)
        choices = _standardised(choices, like)
    obs = jax.tree.map(
        lambda x: _standardised(x, x) if np.issubdtype(x.dtype, np.floating) else x, steps.obs
    )
    new = steps._replace(obs=obs, action=action, choices=choices, reward=rewards.astype(np.float32))
    return new, float(shift), scale


def _padded(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` with zeros up to a multiple of ``CHUNK`` rows."""
    return np.concatenate([x, np.zeros((-len(x) % CHUNK, *x.shape[1:]), x.dtype)])


def _standardised(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Returns ``x`` less the mean of ``like [L, ...]``, divided by its standard deviation, or by 1
    where all values are equal.
    """
    mean = like.mean(axis=0, dtype=np.float64)
    std = like.std(axis=0, dtype=np.float64)
    return ((x - mean) / np.where(std < 1e-6 * (1.0 + np.abs(mean)), 1.0, std)).astype(np.float32)


def in_chunks(function: Callable[..., Any], *trees: PyTree, axis: int = 0) -> Any:
    """Applies a function to rows ``[L, ...]``, ``CHUNK`` at a time, and joins its arrays along
    ``axis``.
    """
    size = len(jax.tree.leaves(trees)[0])
    rows = [
        np.minimum(np.arange(first, first + CHUNK), size - 1) for first in range(0, size, CHUNK)
    ]
    parts = [
        jax.tree.map(np.asarray, function(*jax.tree.map(lambda x, at=at: x[at], trees)))
        for at in rows
    ]
    return jax.tree.map(lambda *x: np.concatenate(x, axis).take(np.arange(size), axis), *parts)
