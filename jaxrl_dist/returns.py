"""Returns and advantages of rollouts: GAE, n-step returns, lambda returns and V-trace.

Functions of rollouts take time-major arrays in this order:

* ``reward [T, B]`` float32, ``terminated``, ``truncated``, ``valid`` ``[T, B]`` bool:
  as in ``types.Rollout``;
* ``values [T + 1, B]`` float32, where ``values[t]`` estimates the value of ``obs[t]``. The
  successor of step ``t`` is always ``obs[t + 1]``, so ``values[t]`` of a reset step is the value of
  the episode's final observation;
* ``discount``: a scalar, a float or traced.

A terminated step bootstraps with 0, even if it is also truncated. A truncated step and the last
step of the rollout bootstrap with ``values[t + 1]``. Nothing accumulates across the end of an
episode. An invalid step influences others only through such a bootstrap: its own advantage is 0,
and its own return is its value.

No gradient flows through the results: they are targets, see ``constant``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

from jaxrl_dist import packing

T = TypeVar("T")
Scalar = jax.Array | float


# --- What the gradient of a loss takes as constant ------------------------------------------------


@jax.custom_jvp
def _constant_in_loss(x: jax.Array) -> jax.Array:
    return x


@_constant_in_loss.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    (x,) = primals
    # x itself: a derivative of the whole training still passes through it
    return x, jnp.zeros_like(x)


def _of_floats(function: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    return lambda tree: jax.tree.map(
        lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


_constant = contextvars.ContextVar[Callable[[Any], Any]]("constant", default=jax.lax.stop_gradient)


def constant(tree: T) -> T:
    """Returns arrays unchanged; the gradient of a loss takes them as constant,
    as with ``jax.lax.stop_gradient``.

    A derivative of the whole training, of ``jaxrl_dist.make_train``, does not:
    parameters depend on their targets.
    """
    made: T = _constant.get()(tree)
    return made


@contextlib.contextmanager
def _as(function: Callable[[Any], Any]) -> Iterator[None]:
    token = _constant.set(function)
    try:
        yield
    finally:
        _constant.reset(token)


def within_training() -> contextlib.AbstractContextManager[None]:
    """In programs that are traced within it, ``constant`` stops no derivative outside of losses."""
    return _as(lambda tree: tree)


def within_loss() -> contextlib.AbstractContextManager[None]:
    """In a loss that is traced within it, ``constant`` stops the loss's gradient."""
    outside = _constant.get()
    return _as(outside if outside is jax.lax.stop_gradient else _of_floats(_constant_in_loss))


# --- Rollouts -------------------------------------------------------------------------------------


class VTrace(NamedTuple):
    """Off-policy corrected targets of an actor-critic; see ``vtrace``."""

    vs: jax.Array
    """[T, B] float32  targets of the value function."""
    pg_advantages: jax.Array
    """[T, B] float32  weights of grad log pi, importance ratio included."""


def gae(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    values: jax.Array,
    discount: Scalar,
    gae_lambda: Scalar,
) -> jax.Array:
    """Computes generalized advantage estimates ``[T, B]``; add ``values[:-1]`` for returns,
    as ``lambda_returns`` does.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eq. 16 (https://arxiv.org/abs/1506.02438).
    """
    td_errors, discounts = _td_errors(reward, terminated, truncated, valid, values, discount)
    return constant(_accumulate(td_errors, gae_lambda * discounts))


def lambda_returns(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    values: jax.Array,
    discount: Scalar,
    gae_lambda: Scalar,
) -> jax.Array:
    """Computes lambda returns ``[T, B]``; ``gae_lambda = 1``
    gives Monte-Carlo returns that bootstrap at the end.

    Sutton and Barto 2018, "Reinforcement Learning: An Introduction", eq. 12.3
    (http://incompleteideas.net/book/the-book-2nd.html).
    """
    advantages = gae(reward, terminated, truncated, valid, values, discount, gae_lambda)
    return constant(advantages + values[:-1])


def n_step(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    values: jax.Array,
    discount: Scalar,
    n: int,
) -> jax.Array:
    """Computes n-step returns ``[T, B]``, shorter at the end of an episode or of the rollout.

    Takes ``min(n, T)`` passes over the data. Sutton and Barto 2018, "Reinforcement Learning: An
    Introduction", eq. 7.1 (http://incompleteideas.net/book/the-book-2nd.html).

    Raises:
      ValueError: if ``n`` is less than 1.
    """
    if n < 1:
        raise ValueError(f"n must be >= 1, not {n}")
    chex.assert_equal_shape([reward, terminated, truncated, valid, values[1:]])
    ended = terminated | truncated
    bootstrap = jnp.where(terminated, 0.0, values[1:])

    def back_up(successor: jax.Array) -> jax.Array:
        return jnp.where(valid, reward + discount * successor, values[:-1])

    def extend(_: int, returns: jax.Array) -> jax.Array:  # k-step returns to (k + 1)-step returns
        return back_up(jnp.where(ended, bootstrap, jnp.concatenate([returns[1:], values[-1:]])))

    return constant(jax.lax.fori_loop(1, min(n, reward.shape[0]), extend, back_up(bootstrap)))


def vtrace(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    values: jax.Array,
    log_rhos: jax.Array,
    discount: Scalar,
    gae_lambda: Scalar = 1.0,
    clip_rho: Scalar = 1.0,
    clip_c: Scalar = 1.0,
    clip_pg_rho: Scalar | None = 1.0,
) -> VTrace:
    """Computes V-trace targets and policy-gradient advantages, both ``[T, B]``.

    Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
    Actor-Learner Architectures" (https://arxiv.org/abs/1802.01561): ``vs`` is eq. 1 with
    ``gae_lambda`` as in its remark 2, ``pg_advantages`` is ``rho (r + discount v' - V)`` of section
    4.2, where ``v'`` mixes the successor's ``vs`` and value by ``gae_lambda`` as in rlax.
    On-policy, the two equal ``lambda_returns`` and ``gae`` for every ``gae_lambda``.

    Args:
      log_rhos: ``[T, B]`` float32, log ratio of the action's
        probability under the target and the behaviour policy.
      clip_rho: rho-bar of eq. 1, which sets the fixed point of the values.
      clip_c: c-bar of eq. 1, which limits how far errors propagate back.
      clip_pg_rho: the bound on rho in the policy gradient; None omits rho,
        for losses that apply it themselves.
    """
    chex.assert_equal_shape([reward, log_rhos])
    td_errors, discounts = _td_errors(reward, terminated, truncated, valid, values, discount)
    rhos = jnp.where(valid, jnp.exp(log_rhos), 0.0)
    decay = gae_lambda * discounts
    # vs - V
    corrections = _accumulate(
        jnp.minimum(clip_rho, rhos) * td_errors, jnp.minimum(clip_c, rhos) * decay
    )
    following = jnp.concatenate([corrections[1:], jnp.zeros_like(corrections[:1])])
    pg_advantages = td_errors + decay * following
    if clip_pg_rho is not None:
        pg_advantages = jnp.minimum(clip_pg_rho, rhos) * pg_advantages
    return constant(VTrace(vs=values[:-1] + corrections, pg_advantages=pg_advantages))


def _td_errors(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    values: jax.Array,
    discount: Scalar,
) -> tuple[jax.Array, jax.Array]:
    """Returns one-step errors, 0 on reset steps, and the next errors' discounts,
    0 at episode ends; both ``[T, B]``.
    """
    chex.assert_equal_shape([reward, terminated, truncated, valid, values[1:]])
    bootstrap = jnp.where(terminated, 0.0, values[1:])
    td_errors = jnp.where(valid, reward + discount * bootstrap - values[:-1], 0.0)
    return td_errors, jnp.where(valid & ~terminated & ~truncated, discount, 0.0)


def _accumulate(delta: jax.Array, decay: jax.Array) -> jax.Array:
    """Solves ``acc[t] = delta[t] + decay[t] * acc[t + 1]`` backwards from ``acc[T] = 0``;
    all ``[T, B]``.
    """

    def step(acc: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, decay = xs
        acc = delta + decay * acc
        return acc, acc

    # A constant zero would lack the mesh axes over which the data varies,
    # and shard_map would refuse the scan.
    zero = jnp.zeros_like(delta[0] + decay[0])
    accumulated: jax.Array = packing.recursion(step, zero, (delta, decay), reverse=True)[1]
    return accumulated


def window_return(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array,
    discount: Scalar,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the return of a window's first step up to the end of its episode,
    and the step to bootstrap from.

    Args:
      reward: ``[n, N]``, windows of ``n`` steps, as are ``terminated``,
        ``truncated`` and ``valid``.

    Returns:
      ``(reward [N], discount [N], last [N])``: the n-step return is
      ``reward + discount * V(obs[last + 1])``, where
      ``last`` is the step (int32) at which the episode or the
      window ends and ``discount`` is 0 if it terminated there.
      ``n = 1`` gives the one-step target (Sutton & Barto
      2018, equation 7.1, cut at the end of the episode).
    """
    chex.assert_equal_shape([reward, terminated, truncated, valid])
    # A recreated environment resets without ending its episode.
    lost = jnp.concatenate([valid[:-1] & ~valid[1:], jnp.zeros_like(valid[:1])])
    ended = terminated | truncated | lost
    num_steps = len(reward)
    before = jnp.cumsum(ended, axis=0) - ended  # ends before each step
    inside = (before == 0) & valid
    powers = jnp.asarray(discount, reward.dtype) ** jnp.arange(num_steps)
    powers = jnp.broadcast_to(powers[:, None], reward.shape)
    total = jnp.sum(jnp.where(inside, powers * reward, 0.0), axis=0)
    last = jnp.where(ended.any(axis=0), jnp.argmax(ended, axis=0), num_steps - 1).astype(jnp.int32)
    stays = 1.0 - jnp.take_along_axis(terminated, last[None], axis=0)[0].astype(reward.dtype)
    return constant((total, stays * jnp.asarray(discount, reward.dtype) ** (last + 1), last))


def unroll_masks(
    terminated: jax.Array, truncated: jax.Array, valid: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Says what is known of the states that a model reaches from a window's first one.

    Args:
      terminated: ``[T, N]`` with ``T > steps``, as are ``truncated`` and ``valid``.

    Returns:
      ``(acts, ended)``, both ``[steps + 1, N]`` bool. ``acts``:
      the state after that many steps is that of the
      observation there. ``ended``: the task terminated on the way,
        so its rewards and its value are 0 (Schrittwieser et
      al. 2020, appendix G). Where neither holds, a time limit or
      a reset without an end was on the way: the window does
      not say what would have followed.
    """
    over = (terminated | truncated | ~valid)[:steps]
    start = jnp.zeros_like(over[:1])
    before = jnp.cumsum(jnp.concatenate([start, over]), axis=0) > 0
    first = (terminated & valid)[:steps] & ~before[:-1]
    return ~before & valid[: steps + 1], jnp.cumsum(jnp.concatenate([start, first]), axis=0) > 0


def episode_return(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, valid: jax.Array
) -> jax.Array:
    """Computes each environment's mean undiscounted return
    ``[B]`` of the episodes that ended in the rollout.

    The rollout begins with a new episode. Where none has ended,
    the result is the sum of all rewards.
    """
    chex.assert_equal_shape([reward, terminated, truncated, valid])
    ended = (terminated | truncated).astype(reward.dtype)
    count = ended.sum(axis=0)
    to_come = jax.lax.cumsum(ended, axis=0, reverse=True)
    reward = jnp.where(valid, reward, 0.0)
    whole = jnp.sum(jnp.where(to_come > 0, reward, 0.0), axis=0)
    return constant(jnp.where(count > 0, whole / jnp.maximum(count, 1.0), reward.sum(axis=0)))


# --- Values of single steps -----------------------------------------------------------------------


def project(support: jax.Array, probs: jax.Array, atoms: jax.Array) -> jax.Array:
    """Projects a distribution over values ``support [K]`` onto ascending ``atoms [L]``;
    returns probabilities ``[L]``.

    Each value is clipped to the range of the atoms. Its two neighbouring atoms share its
    probability, the nearer one getting more. Bellemare et al. 2017, "A Distributional Perspective
    on Reinforcement Learning", eq. 7 (https://arxiv.org/abs/1707.06887).

    Args:
      probs: ``[K]``, the probabilities of ``support``.
    """
    chex.assert_equal_shape([support, probs])
    spacing = jnp.diff(atoms)
    inverse = jnp.where(spacing > 0, 1.0 / spacing, 0.0)  # a single atom has no neighbours
    below = jnp.pad(inverse, (1, 0))[:, None]
    above = jnp.pad(inverse, (0, 1))[:, None]
    distance = jnp.clip(support, atoms[0], atoms[-1])[None, :] - atoms[:, None]  # [L, K]
    away = (distance >= 0.0).astype(probs.dtype)
    gaps = away * distance * above - (1.0 - away) * distance * below  # in spacings
    return jnp.sum(jnp.clip(1.0 - gaps, 0.0, 1.0) * probs[None, :], axis=-1)


RESCALE_EPSILON = 1e-3


def rescale(x: jax.Array) -> jax.Array:
    """``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`` with ``epsilon = 0.001``, elementwise.

    Pohlen et al. 2018, "Observe and Look Further: Achieving Consistent Performance on Atari",
    proposition A.2 (https://arxiv.org/abs/1805.11593).
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + RESCALE_EPSILON * x


def unscale(x: jax.Array) -> jax.Array:
    """The inverse of ``rescale``, elementwise: the same source, proposition A.2 (iii)."""
    size = jnp.abs(x) + 1 + RESCALE_EPSILON
    # The root of a quadratic, in the form without a difference of large numbers: that of the paper
    # makes small values too low in float32, by 0.3 % at a fixed point of 5-step returns.
    root = 2 * size / (1 + jnp.sqrt(1 + 4 * RESCALE_EPSILON * size))
    return jnp.sign(x) * (root - 1) * (root + 1)
