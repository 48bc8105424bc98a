"""The learner of algorithms that learn from each rollout once and discard it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import chex
import jax
import jax.numpy as jnp

from jaxrl_dist import mesh, packing, rng
from jaxrl_dist.checks import check_divides, divisors_near
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.types import Algorithm, PyTree, Rollout, TrainState


def on_policy(algorithm: Algorithm, num_agents: int = 1, *, packed: bool = False) -> sgd.Learner:
    """Postprocesses a rollout, then makes ``num_epochs``
    passes over it in ``num_minibatches`` updates each.

    Examples are shuffled within groups of environments (see ``envs_per_group``). The keys depend on
    the group's global index, so the minibatches hold the same examples on any number of devices. Of
    the rows of a rollout, ``num_agents`` belong to one environment. ``packed`` is as in
    ``packing.scan``.

    With ``Algorithm.done``, the metrics are means over the updates until it is True, and
    ``learner/left_out`` is the fraction of the rollout's updates that are left out. These are
    computed, but change nothing, so that the device never waits for the host.
    """

    def update(
        state: TrainState, rollout: Rollout, key: jax.Array
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        num_steps, num_envs = rollout.reward.shape
        key = jax.random.fold_in(key, state.iteration)
        envs = mesh.global_index(num_envs)
        keys = rng.per_index(jax.random.fold_in(key, 0), envs)
        batch = algorithm.postprocess(state.variables, rollout, state.context(keys))
        # Learning uses the statistics that acted. This rollout changes them for the next one.
        stats = algorithm.updated_stats(state.variables, rollout, state.context())

        num_examples = num_envs * examples_per_env(algorithm, num_steps)
        chex.assert_tree_shape_prefix(batch, (num_examples,))
        epochs, minibatches = algorithm.num_epochs, algorithm.num_minibatches
        examples = mesh.global_index(num_examples)

        def one_update(
            carry: tuple[TrainState, PyTree], step: tuple[jax.Array, jax.Array, jax.Array | None]
        ) -> tuple[tuple[TrainState, PyTree], Mapping[str, jax.Array]]:
            (state, done) = carry
            (index, epoch, rows) = step
            which, minibatch = examples, batch
            if rows is not None:
                which, minibatch = take((examples, batch), rows)
            keys = rng.per_index(
                jax.random.fold_in(jax.random.fold_in(key, 2 + epoch), index), which
            )
            grads, metrics, _ = sgd.gradient(algorithm, state, minibatch, keys)
            new = sgd.apply(algorithm, state, grads)
            if algorithm.done is None:
                return (new, done), metrics
            counted = ~done
            done = done | algorithm.done(metrics)
            new = jax.tree.map(lambda new, old: jnp.where(done, old, new), new, state)
            return (new, done), {
                **metrics,
                COUNTED: counted,
                "learner/left_out": done.astype(jnp.float32),
            }

        def one_epoch(
            state: tuple[TrainState, PyTree], epoch: jax.Array
        ) -> tuple[tuple[TrainState, PyTree], Mapping[str, jax.Array]]:
            rows = None
            if minibatches > 1:
                rows = shuffled(key, epoch, num_envs, num_examples, minibatches)
            index = jnp.arange(minibatches)
            with jax.named_scope("update"):
                return packing.scan(
                    one_update, state, (index, jnp.full_like(index, epoch), rows), packed=packed
                )

        carry = state, () if algorithm.done is None else jnp.zeros((), bool)
        if epochs == minibatches == 1:
            zero = jnp.zeros((), jnp.int32)
            with jax.named_scope("update"):
                (state, _), metrics = one_update(carry, (zero, zero, None))
        else:
            with jax.named_scope("epoch"):
                (state, _), metrics = packing.scan(
                    one_epoch, carry, jnp.arange(epochs), packed=packed
                )
        state = state._replace(
            variables=state.variables._replace(stats=stats),
            iteration=state.iteration + 1,
            env_step=sgd.nominal_env_step(
                state, num_steps * (num_envs // num_agents) * jax.lax.axis_size(mesh.DATA)
            ),
        )
        return state, _means(metrics)

    return sgd.Learner(partial(sgd.init, algorithm), update)


COUNTED = "counted"
"""Marks the updates over which metrics are means; not reported."""


def _means(metrics: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """Returns the means over a rollout's updates, or over those that count."""
    if COUNTED not in metrics:
        return jax.tree.map(jnp.mean, metrics)
    counted = metrics[COUNTED]
    means = {
        name: jnp.sum(jnp.where(counted, x, 0.0)) / jnp.sum(counted) for name, x in metrics.items()
    }
    left_out = jnp.mean(metrics["learner/left_out"])
    return {name: x for name, x in means.items() if name != COUNTED} | {
        "learner/left_out": left_out
    }


def shuffled(
    key: jax.Array, epoch: jax.Array, num_envs: int, num_examples: int, minibatches: int
) -> jax.Array:
    """Returns the rows of each minibatch of an epoch, int32
    ``[minibatches, num_examples / minibatches]``.

    Args:
      key: of the iteration.
      num_envs: environments of this device, which have ``num_examples``.
    """
    groups = num_envs // envs_per_group(num_examples // num_envs, minibatches)
    keys = rng.per_index(
        jax.random.fold_in(jax.random.fold_in(key, 1), epoch), mesh.global_index(groups)
    )
    rows = jax.vmap(jax.random.permutation)(
        keys, jnp.arange(num_examples, dtype=jnp.int32).reshape(groups, -1)
    )
    return rows.reshape(groups, minibatches, -1).swapaxes(0, 1).reshape(minibatches, -1)


def take(tree: PyTree, rows: jax.Array) -> PyTree:
    """Returns these rows of all arrays, without a check of bounds."""
    return jax.tree.map(
        lambda x: x.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False), tree
    )


def examples_per_env(algorithm: Algorithm, rollout_length: int) -> int:
    """Returns the number of examples in one environment's rollout."""
    return rollout_length // (algorithm.window or rollout_length)


def envs_per_group(examples: int, num_minibatches: int) -> int:
    """Returns how many environments, with ``examples`` each,
    are shuffled together to fill the minibatches evenly.
    """
    return num_minibatches // math.gcd(examples, num_minibatches)


def check_sizes(algorithm: Algorithm, num_envs: int, rollout_length: int, num_devices: int) -> None:
    """Checks that environments divide evenly over devices, and examples over minibatches.

    Raises:
      ConfigError: they do not; names both numbers and the nearest that work.
    """
    pairs = [(2, "environments of a pair")] if algorithm.paired else []
    check_divides("num_envs", num_envs, (num_devices, "devices"), *pairs)
    local = num_envs // num_devices
    examples = examples_per_env(algorithm, rollout_length)
    minibatches = algorithm.num_minibatches
    # Whole groups of environments fill the minibatches (see
    # ``envs_per_group``) exactly if all examples divide.
    if local * examples % minibatches:
        raise ConfigError(
            f"--num-minibatches {minibatches} does not divide a device's {local} x {examples} "
            "examples (environments x examples of each); nearest that work: "
            f"{divisors_near(minibatches, local * examples)}"
        )
