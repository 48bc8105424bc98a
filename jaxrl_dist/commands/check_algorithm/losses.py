"""Tries the postprocessor and the loss of an algorithm on the experience of a trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.tree_util import keystr

from jaxrl_dist import mesh
from jaxrl_dist.commands.check_algorithm.comparing import (
    close,
    equal,
    named,
    noisy,
    operations,
    turned,
)
from jaxrl_dist.commands.check_algorithm.trial import Trial
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.learners import sgd
from jaxrl_dist.types import Aux, Context, PyTree, Rollout, TrainState, Variables

LATER = 0.01
"""Deviation between the parameters of the loss and of the postprocessor, as after updates: with
equal ones, a ratio of probabilities is 1 and a divergence 0 whatever the actions are."""


class Learned(NamedTuple):
    """What an algorithm makes of a rollout."""

    batch: PyTree
    losses: jax.Array
    """One for each example, times its mask."""
    priority: jax.Array | None


class Learning:
    """The postprocessor and the loss of an algorithm, and the experience that they are tried on."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.algorithm = trial.algorithm
        window = self.algorithm.window
        self.rollout = trial.rollout
        if self.algorithm.replay is not None:
            assert window is not None, "replay needs windows of a fixed length"
            self.rollout = _windows(trial.rollout, window)
        num_steps, self.rows = self.rollout.reward.shape
        self.per_row = num_steps // (window or num_steps)
        """Examples of an environment."""
        self.keys = jax.random.split(jax.random.key(4), self.rows)
        self.loss_keys = jax.random.split(jax.random.key(5), self.rows * self.per_row)
        self.later = noisy(trial.variables, LATER)
        self.function = mesh.by_hand(self._learn)
        self._compiled = jax.jit(self.function)

    def of(
        self,
        rollout: Rollout,
        keys: jax.Array | None = None,
        loss_keys: jax.Array | None = None,
        target: PyTree = None,
    ) -> Learned:
        """Returns what the algorithm makes of a rollout, with its own target and keys or others."""
        return self._compiled(
            self.trial.target if target is None else target,
            rollout,
            self.keys if keys is None else keys,
            self.loss_keys if loss_keys is None else loss_keys,
        )

    def loss(self, target: PyTree, batch: PyTree, keys: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the losses of a batch and their priorities."""
        context = Context(keys, jnp.float32(0), target)
        losses, mask, aux = self.algorithm.loss(self.later, batch, context)
        return jnp.where(mask != 0, losses, 0.0) * mask, aux.priority

    def _learn(
        self, target: PyTree, rollout: Rollout, keys: jax.Array, loss_keys: jax.Array
    ) -> Learned:
        context = Context(keys, jnp.float32(0), target)
        batch = self.algorithm.postprocess(self.trial.variables, rollout, context)
        return Learned(batch, *self.loss(target, batch, loss_keys))


def check_learning(check: Check, trial: Trial) -> None:
    """Checks that postprocessor and loss treat environments alike, and use keys, targets, masks and
    ends as they must.
    """
    learning = Learning(trial)
    _check_keys(check, learning)
    _check_target(check, trial, lambda target: learning.of(learning.rollout, target=target))
    learned = check.call("postprocess or loss", learning.of, learning.rollout)
    if learned.priority is not None and (least := float(np.min(learned.priority))) < 0:
        check.fault(
            "priority",
            f"loss returned an Aux.priority of {least:.3g}; "
            "it needs at least 0, as of an absolute error",
        )
    _check_order(check, learning, learned)
    _check_alone(check, learning, learned.batch)
    _check_mask(check, learning, learned)
    if not trial.algorithm.episodic and not {"devices", "order", "alone"} & check.faults.keys():
        _check_counts(check, learning)
    _check_value(check, learning, learned.batch)
    _check_ends(check, learning, learned)


def _check_keys(check: Check, learning: Learning) -> None:
    target = learning.trial.target
    names = operations(
        learning.function, target, learning.rollout, learning.keys, learning.loss_keys
    )
    if not names:
        check.fault(
            "pure learning",
            "postprocess or loss differs when it is traced again; draw random numbers from "
            "context.keys alone",
        )
    elif "random_seed" in names:
        check.fault(
            "key of learning",
            "postprocess or loss makes its own key; use context.keys, one for each example",
        )


def _check_target(check: Check, trial: Trial, learned: Callable[[PyTree], PyTree]) -> None:
    """Checks that a target network follows the parameters, and that something reads it."""
    if not jax.tree.leaves(trial.target):
        return
    params = trial.variables.params
    program = jax.make_jaxpr(trial.algorithm.target)(params, trial.target, jnp.int32(0)).jaxpr
    _, read = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    if not any(read[: len(jax.tree.leaves(params))]):
        check.fault(
            "target",
            "target returned a target that does not depend on params, so it never changes",
        )
    changed = noisy(Variables(trial.target, ()), 1.0).params  # a constant may cancel, as in logits
    if equal(learned(trial.target), learned(changed)):
        check.fault(
            "unread", "neither postprocess nor loss reads context.target, the output of target"
        )


def _check_order(check: Check, learning: Learning, learned: Learned) -> None:
    """Checks that examples are environment-major, and that environments may change places."""
    rollout = learning.rollout
    size = learning.trial.together
    examples = size * learning.per_row
    steps = rollout._replace(core=(), final_core=())
    moved = jax.tree.map(lambda x: np.roll(x, size, axis=1), steps)._replace(
        core=turned(rollout.core, size), final_core=turned(rollout.final_core, size)
    )
    loss_keys = turned(learning.loss_keys, examples)
    after = learning.of(moved, turned(learning.keys, size), loss_keys)
    # a key for the whole batch, as of mesh.batch_key?
    if not equal(turned(learned.batch, examples), after.batch):
        after = learning.of(moved, learning.keys, loss_keys)
    pairs = zip(jax.tree.leaves_with_path(learned.batch), jax.tree.leaves(after.batch), strict=True)
    for (path, before), now in pairs:
        if close(turned(before, examples), now):
            continue
        by_time = np.asarray(before).reshape(learning.per_row, learning.rows, *before.shape[1:])
        if close(np.roll(by_time, size, axis=1).reshape(before.shape), now):
            return check.fault(
                "order",
                f"postprocess returned batch{keystr(path)} in time-major order; "
                "jaxrl_dist.types.swap_axes makes [B, T] of [T, B], and their axes can be joined",
            )
        return check.fault(
            "order",
            f"postprocess returned batch{keystr(path)} that is not the same for an environment in "
            "another place; it depends on an index",
        )
    if not close(turned(learned.losses, examples), after.losses):
        check.fault(
            "order",
            "loss returned another loss for an example in another place; each depends on its own "
            "row of the batch and of context.keys",
        )


def _check_alone(check: Check, learning: Learning, batch: PyTree) -> None:
    """Checks that the losses of the first half of a batch are the same whatever the other half
    is.
    """
    keys = learning.loss_keys
    loss = mesh.by_hand(learning.loss)
    target = learning.trial.target
    names = named(jax.make_jaxpr(loss)(target, batch, keys))
    if any(name.startswith(("psum", "all_gather")) for name in names):
        return  # of the whole batch, as of mesh.global_mean: the two devices agree
    half = len(keys) // 2
    other = jax.tree.map(lambda x: jnp.concatenate([x[:half], x[:half], x[2 * half :]]), batch)
    losses, after = (np.asarray(jax.jit(loss)(target, x, keys)[0])[:half] for x in (batch, other))
    if not np.array_equal(losses, after, equal_nan=True):
        check.fault(
            "alone",
            "loss gives an example another loss when other examples change; take means over "
            "examples in postprocess, with mesh.global_mean",
        )


def _check_mask(check: Check, learning: Learning, learned: Learned) -> None:
    """Checks that reset steps are left out."""
    valid = np.asarray(learning.rollout.valid)
    action = jax.tree.map(lambda x: _other(x, valid), learning.rollout.action)
    after = learning.of(learning.rollout._replace(action=action))
    # such a mean has all steps
    alone = "alone" not in check.faults
    if alone and not np.array_equal(learned.losses, after.losses, equal_nan=True):
        check.fault(
            "mask",
            "loss learns from reset steps: other actions there change it; return a mask that is 0 "
            "where rollout.valid is False",
        )


def _check_counts(check: Check, learning: Learning) -> None:
    """Checks that means are of valid steps: whether half of
    the environments repeat the others or only reset.
    """
    rollout = learning.rollout
    half = learning.rows // 2
    if 2 * half < learning.rows:
        return

    def twice(tree: PyTree, axis: int) -> PyTree:
        return jax.tree.map(
            lambda x: np.concatenate([np.split(x, [half], axis)[0]] * 2, axis), tree
        )

    same = twice(rollout._replace(core=(), final_core=()), 1)
    same = same._replace(core=twice(rollout.core, 0), final_core=twice(rollout.final_core, 0))
    there = np.arange(2 * half) < half
    fields = ("reward", "terminated", "truncated", "valid")
    only_resets = same._replace(**{name: getattr(same, name) * there for name in fields})
    before = learning.of(same)._replace(priority=None)
    after = learning.of(only_resets)._replace(priority=None)
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for ((field, *path), x), y in pairs:
        count = len(x) // 2
        if not close(x[:count], y[:count]):
            whole = "loss returned another loss"
            if field.name == "batch":
                whole = f"postprocess returned another batch{keystr(tuple(path))}"
            return check.fault(
                "counts",
                f"{whole} for some environments because others have reset steps, so a mean counts "
                "reset steps; leave them out with mesh.global_mean(x, rollout.valid)",
            )


def _check_value(check: Check, learning: Learning, batch: PyTree) -> None:
    """Notes a policy's loss that also trains the value function,
    as of an advantage without ``stop_gradient``.
    """
    algorithm = learning.algorithm
    variables = learning.later
    context = Context(learning.loss_keys, jnp.float32(0), learning.trial.target)

    def policy_loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        _, mask, aux = algorithm.loss(variables, batch, context)
        return aux.metrics["loss/policy"], mask, Aux({})

    of_policy = dataclasses.replace(algorithm, loss=policy_loss)

    def gradient(params: PyTree, batch: PyTree) -> PyTree:
        zero = jnp.int32(0)
        changed = variables._replace(params=params)
        state = TrainState(changed, context.target, (), zero, zero, context.env_step, zero)
        return sgd.gradient(of_policy, state, batch, context.keys)[0]["value"]

    losses, _, aux = jax.eval_shape(mesh.by_hand(algorithm.loss), variables, batch, context)
    shape = getattr(aux.metrics.get("loss/policy"), "shape", None)
    params = variables.params
    if not isinstance(params, dict) or "value" not in params or shape != losses.shape:
        return
    if any(map(np.any, jax.tree.leaves(jax.jit(mesh.by_hand(gradient))(params, batch)))):
        check.note(
            "the metric 'loss/policy' has a gradient for params['value']; if it holds an advantage "
            "of a value that loss computes, jax.lax.stop_gradient keeps the policy's loss from "
            "training the value"
        )


def _check_ends(check: Check, learning: Learning, learned: Learned) -> None:
    """Notes a postprocessor for which terminations and time limits are the same."""
    rollout = learning.rollout
    if learning.algorithm.episodic or not (rollout.terminated.any() and rollout.truncated.any()):
        return
    after = learning.of(
        rollout._replace(terminated=rollout.truncated, truncated=rollout.terminated)
    )
    if equal(learned._replace(priority=None), after._replace(priority=None)):
        check.note(
            "postprocess treats rollout.terminated and rollout.truncated alike; the value after a "
            "termination is 0, and after a time limit it is the value of the next observation"
        )


def _windows(rollout: Rollout, length: int) -> Rollout:
    """Returns all windows of a rollout ``[length, N, ...]``, as replay draws them."""
    starts = range(rollout.reward.shape[0] - length + 1)

    def cut(tree: PyTree, size: int) -> PyTree:
        return jax.tree.map(
            lambda x: np.concatenate([x[t : t + size] for t in starts], axis=1), tree
        )

    steps: Rollout = cut(rollout._replace(obs=(), core=(), final_core=()), length)
    return steps._replace(obs=cut(rollout.obs, length + 1))


def _other(action: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns other actions where steps are resets."""
    if action.dtype.kind in "iu":
        changed = np.where(action == 0, 1, 0).astype(action.dtype)
    else:
        changed = 0.5 * action
    return np.where(valid.reshape(valid.shape + (1,) * (action.ndim - 2)), action, changed)
