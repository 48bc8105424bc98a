"""Gradients and updates: only this module differentiates losses and averages over examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist import mesh, packing, returns
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import Algorithm, Aux, Context, PyTree, TrainState, Variables

MICROBATCH = 4096
"""Losses that a CPU differentiates at a time:
activations of more do not fit its caches (docs/speed.md)."""
MICROBATCH_BYTES = 2**21
"""Bytes of examples that a CPU differentiates at a time where a network has convolutions: it keeps
several times as much for their gradient."""
SUMMED_AT_ONCE = 1024
"""Losses whose gradients a GPU adds up by one kernel for each weight; of more, XLA makes two."""
LARGEST_SUMS = 2**24
"""Bytes of sums that a GPU keeps before it adds them up."""
MAX_SKIPPED = 10
"""Number of consecutive non-finite gradients after which training has diverged and the run ends."""


_Function = Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]]


class Learner(NamedTuple):
    """Pure functions that train; ``learners.sharded`` runs them under ``jax.shard_map``."""

    init: Callable[[jax.Array], TrainState]
    """``(key) -> state``."""
    update: Callable[..., tuple[TrainState, Mapping[str, jax.Array]]]
    """``(state, rollout, key) -> (state, metrics)``; for prioritised replay, an optional
    ``priority [T, B]`` gives the priorities of the windows that end with each step, and ``data`` is
    a data set of ``memory.records``."""
    relearn: Callable[..., tuple[TrainState, Mapping[str, jax.Array]]] | None = None
    """``(state, key, data) -> (state, metrics)``:
    an iteration's updates from what the memory holds; None without one."""
    cut: Callable[[PyTree], PyTree] = lambda memory: memory
    """``(memory) -> memory``: run before environments are restarted,
    so that no window spans old and new episodes."""
    start_mid_episode: Callable[[PyTree], PyTree] = lambda memory: memory
    """``(memory) -> memory``: prepares an empty memory for environments in mid-episode."""
    observe: Callable[[TrainState, PyTree], TrainState] = lambda state, data: state
    """``(state, data) -> state``: with the running statistics of all steps of a data set; run
    before the first update of a learner without rollouts."""
    indices: Callable[[jax.Array, jax.Array, PyTree], PyTree] | None = None
    """``(iteration, key, data) -> indices``: where the windows of a data set lie from which
    ``update`` would learn in an iteration; None: it also learns from others."""
    parts: tuple[tuple[str, Learner], ...] = ()
    """The name and learner of each policy; empty for the learner of one of them."""


def init(algorithm: Algorithm, key: jax.Array) -> TrainState:
    """Returns the state before the first update."""
    variables = algorithm.init(key)
    return TrainState(
        variables=variables,
        target=algorithm.initial_target(variables.params),
        opt_state=algorithm.optimizer.init(variables.params),
        updates=jnp.zeros((), jnp.int32),
        iteration=jnp.zeros((), jnp.int32),
        env_step=jnp.zeros((), jnp.float32),
        skipped=jnp.zeros((), jnp.int32),
    )


def gradient(
    algorithm: Algorithm,
    state: TrainState,
    batch: PyTree,
    keys: jax.Array,
    weight: jax.Array | None = None,
) -> tuple[PyTree, Mapping[str, jax.Array], jax.Array | None]:
    """Differentiates the mean loss over the examples of all devices.

    The mean is ``sum(weight * losses * mask) / sum(mask)``, both sums over all devices. The mask is
    bool, or holds weights, which count as constants. Each device differentiates its own sum;
    gradients, losses and counts are then added up together, and divided. A mean of per-device means
    would weigh devices, not examples, whenever masks differ.

    Args:
      batch: this device's examples, leading axis ``N``.
      keys: ``[N]``, one for each example.
      weight: ``[N]``, importance weights of the losses; None: all 1. Metrics are not weighted.

    Returns:
      The gradient with respect to ``params``, which is not finite if the loss is not; the means of
      the loss and of its metrics, and the gradient's norm; the priorities ``[N]``, or None if the
      loss has none. Gradient and metrics are equal on all devices.

    Raises:
      ConfigError: as ``losses_of``.
    """

    def per_example(
        params: PyTree, examples: Any
    ) -> tuple[dict[str, jax.Array], jax.Array, jax.Array | None]:
        batch, keys, weight = examples
        losses, mask, aux = losses_of(
            algorithm, state.variables._replace(params=params), batch, state.context(keys)
        )
        if weight is None:
            weighted = losses
        else:
            weighted = losses * weight.reshape(-1, *(1,) * (losses.ndim - 1))
        return {"loss/total": weighted, **aux.metrics}, mask, aux.priority

    def summed_loss(params: PyTree, examples: Any) -> tuple[jax.Array, Any]:
        with returns.within_loss():
            values, mask, priority = per_example(params, examples)
        metrics = {name: returns.constant(x) for name, x in values.items()}
        values = metrics | {"loss/total": values["loss/total"]}
        masked = [_masked(x, mask) for x in values.values()]
        arrays = mesh.vary([*masked, mask.astype(jnp.float32)])
        *totals, count = packing.sums(mesh.vary_as(arrays, arrays))  # a mask may be a constant
        sums = dict(zip(values, totals, strict=True))
        return sums["loss/total"], (sums, count, priority)

    def differentiate(params: PyTree, examples: Any) -> tuple[PyTree, jax.Array | None]:
        grads, (sums, count, priority) = jax.grad(summed_loss, has_aux=True)(params, examples)
        return (grads, sums, count), priority

    params = mesh.vary(state.variables.params)
    examples = (batch, keys, weight)
    _, mask, _ = jax.eval_shape(per_example, params, examples)
    ways: dict[str, _Function] = {}
    cpu_parts = num_parts(_microbatch(params, batch, mask.size), *mask.shape)
    if cpu_parts > 1:
        ways["cpu"] = partial(_in_turn, differentiate, cpu_parts)
    gpu_parts = 1
    # Losses of sequences, and of perturbed parameters, have loops,
    # which would carry the sum of each part.
    if mask.ndim == 1 and not algorithm.behaviour:
        gpu_parts = num_parts(SUMMED_AT_ONCE, len(mask))
    if gpu_parts > 1 and _small_and_dense(params, gpu_parts):
        ways["cuda"] = partial(_side_by_side, differentiate, gpu_parts)
    function: _Function = differentiate
    if ways:
        function = partial(jax.lax.platform_dependent, **ways, default=differentiate)
    sums, priority = function(params, examples)
    grads, sums, count = mesh.global_sum(sums)
    # Taken once before the loop, the divisor would change the last bits of results:
    # XLA fuses it otherwise.
    grads, metrics = jax.tree.map(lambda x: x / _divisor(count, mask), (grads, sums))
    # A loss of NaN may have a finite gradient, as that of an index out of range does. One array of
    # NaN says so to ``apply``; in all of them, it would cost a GPU another kernel.
    leaves, treedef = jax.tree.flatten(grads)
    if leaves:
        leaves[0] = jnp.where(jnp.isfinite(metrics["loss/total"]), leaves[0], jnp.nan)
    grads = jax.tree.unflatten(treedef, leaves)
    norm = packing.global_norm(grads)
    metrics |= {"gradient/norm": norm, "gradient/skipped": 1.0 - jnp.isfinite(norm)}
    return grads, metrics, priority


def losses_of(
    algorithm: Algorithm, variables: Variables, batch: PyTree, context: Context
) -> tuple[jax.Array, jax.Array, Aux]:
    """Returns the losses, mask and ``Aux`` of ``N`` examples; ``context`` has a key for each.

    Raises:
      ConfigError: the algorithm's loss returns something else, or arrays without an entry for each
        example.
    """
    returned: Any = algorithm.loss(variables, batch, context)
    parts = returned if isinstance(returned, tuple | list) else [returned]
    if len(parts) != 3 or parts[1] is None or not isinstance(parts[2], Aux):
        kinds = ", ".join("array" if hasattr(x, "shape") else type(x).__name__ for x in parts)
        raise ConfigError(
            f"the algorithm's loss must return losses, a mask and Aux(metrics), not ({kinds})"
        )
    losses, mask, aux = parts
    prioritized = getattr(algorithm.replay, "priority_exponent", None) is not None
    _check_entries(losses, mask, aux, len(context.keys), prioritized=prioritized)
    return losses, mask, aux


def _check_entries(
    losses: Any, mask: Any, aux: Aux, num_examples: int, *, prioritized: bool
) -> None:
    shape = np.shape(losses)
    if shape != np.shape(mask) or shape[:1] != (num_examples,):
        raise ConfigError(
            f"the algorithm's loss returned losses {shape} with a mask {np.shape(mask)}; return "
            f"both with an entry for each of {num_examples} examples, not a mean"
        )
    for name, x in aux.metrics.items():
        if np.shape(x) not in (shape, ()):
            raise ConfigError(
                f"the algorithm's loss returned losses {shape} with a metric {name!r} "
                f"{np.shape(x)}; give the metric the shape of the losses"
            )
    if aux.priority is None and prioritized:
        raise ConfigError(
            "the algorithm's loss returned no Aux.priority, which prioritised replay needs; "
            f"return one with an entry for each of {num_examples} examples"
        )
    if aux.priority is not None and np.shape(aux.priority) != (num_examples,):
        raise ConfigError(
            f"the algorithm's loss returned an Aux.priority {np.shape(aux.priority)}; return an "
            f"entry for each of {num_examples} examples, not a mean"
        )


def _masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns ``x * mask``, which is 0 where the mask is, even if ``x`` is not finite there."""
    if mask.dtype == bool:
        return jnp.where(mask, x, 0.0)
    return jnp.where(mask == 0, 0.0, x) * returns.constant(mask)


def _divisor(count: jax.Array, mask: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the sum of a mask, or 1 if the mask is 0 everywhere; weights may add up to less."""
    if mask.dtype == bool:
        return jnp.maximum(count, 1.0)
    return jnp.where(count == 0, 1.0, count)


def _microbatch(params: PyTree, batch: PyTree, num_losses: int) -> int:
    """Returns how many of the losses of ``batch`` a CPU differentiates at a time."""
    if not any(x.ndim == 4 for x in jax.tree.leaves(params)):  # no kernels of convolutions
        return MICROBATCH
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)) / num_losses
    return min(MICROBATCH, max(1, int(MICROBATCH_BYTES / size)))


def num_parts(most: int, num_examples: int, *shape: int) -> int:
    """Returns the number of equal parts in which to differentiate losses of this shape.

    It is 1 if the examples do not divide into parts of ``most / 2`` to ``most`` losses.
    """
    least = -(-num_examples * math.prod(shape) // most)
    return next((parts for parts in range(least, 2 * least) if num_examples % parts == 0), 1)


def _small_and_dense(params: PyTree, copies: int) -> bool:
    """Returns whether a GPU can hold copies of the parameters,
    and multiply with them as fast as without.
    """
    leaves = jax.tree.leaves(params)
    return (
        all(x.ndim <= 2 for x in leaves) and copies * sum(x.nbytes for x in leaves) <= LARGEST_SUMS
    )


def _in_turn(
    function: _Function, count: int, params: PyTree, examples: PyTree
) -> tuple[PyTree, jax.Array | None]:
    """Computes ``(sums, per_example) = function(params, examples)`` in ``count`` equal parts,
    one after the other.
    """
    parts = _divided(examples, count)
    shapes = jax.eval_shape(function, params, jax.tree.map(lambda x: x[0], parts))[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total: PyTree, part: PyTree) -> tuple[PyTree, jax.Array | None]:
        sums, per_example = function(params, part)
        return jax.tree.map(jnp.add, total, sums), per_example

    sums, per_example = jax.lax.scan(add, mesh.vary_as(zeros, jax.tree.leaves(params)[0]), parts)
    return sums, _joined(per_example)


def _side_by_side(
    function: _Function, count: int, params: PyTree, examples: PyTree
) -> tuple[PyTree, jax.Array | None]:
    """Computes the same with all parts at once,
    and adds up the sums of all parameters by one kernel.
    """
    sums, per_example = jax.vmap(function, (None, 0))(params, _divided(examples, count))
    return packing.as_one(lambda x: jnp.sum(x, axis=0), sums, leading=1), _joined(per_example)


def _divided(examples: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), examples)


def _joined(parts: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)


def apply(algorithm: Algorithm, state: TrainState, grads: PyTree) -> TrainState:
    """Makes one update: a step of the optimiser, then of the target.

    A non-finite gradient changes only the counts. After ``MAX_SKIPPED`` in a row,
    every gradient does.
    """
    finite = jnp.isfinite(packing.global_norm(grads)) & (state.skipped < MAX_SKIPPED)
    old = state.variables.params, state.opt_state, state.target
    optimizer = optax.with_extra_args_support(algorithm.optimizer)
    extra = {"env_step": state.env_step, "updates_done": state.updates}
    updates, opt_state = optimizer.update(grads, state.opt_state, state.variables.params, **extra)
    params = optax.apply_updates(state.variables.params, updates)
    count = state.updates + 1
    new = params, opt_state, algorithm.target(params, state.target, count)
    params, opt_state, target = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
    return state._replace(
        variables=state.variables._replace(params=params),
        target=target,
        opt_state=opt_state,
        updates=count,
        skipped=jnp.where(finite, 0, state.skipped + 1),
    )


def nominal_env_step(state: TrainState, steps: int) -> jax.Array:
    """Returns the nominal count of env steps, float32,
    after one more iteration of ``steps`` env steps.

    Multiplies, because a float32 sum would stop growing at ``2^24 * steps``.
    """
    return (state.iteration + 1).astype(jnp.float32) * steps
