"""Tries the functions of an algorithm one by one, on what a trial has learned and from what."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxrl_dist import mesh
from jaxrl_dist.commands.check_algorithm.trial import Trial, close
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.learners import sgd
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.types import Algorithm, Aux, Context, PyTree, Rollout, TrainState, Variables

LATE = 1e9
"""Env steps at which a policy's greedy actions are compared with sampled ones:
exploration has been annealed."""
SAMPLES = 128
"""Actions to sample for an observation."""
OBSERVATIONS = 4
LATER = 0.01
"""Deviation of the parameters of the loss from those of the postprocessor, as after updates: at
equal ones, a ratio of probabilities is 1 and a divergence 0 whatever the actions are."""


def check_functions(check: Check, trial: Trial) -> None:
    """Checks that policy, postprocessor and loss treat environments alike,
    and use keys and ends as they must.
    """
    _check_policy(check, trial)
    _check_greedy(check, trial)
    _check_learning(check, trial)


def _check_policy(check: Check, trial: Trial) -> None:
    policy = trial.algorithm.policy
    rows = trial.rollout.reward.shape[1]
    obs = jax.tree.map(lambda x: x[0], trial.rollout.obs)
    core = trial.algorithm.initial_core(rows)

    def act(obs: PyTree, core: PyTree, keys: Any) -> Any:
        return policy(trial.variables, obs, core, Context(keys, jnp.float32(0)))

    keys = jax.random.split(jax.random.key(1), rows)
    text = _traced(act, obs, core, keys)
    greedy = _traced(act, obs, core, None)
    if "random_bits[" in greedy and ("random_seed[" not in greedy or _draws_decide(trial)):
        check.fault(
            "greedy",
            "policy draws random numbers where context.keys is None, which asks for greedy actions",
        )
    elif "random_seed[" in text:
        check.fault(
            "key",
            "policy makes a key itself, which is the same in each step; context.keys has one for each row",
        )
    if not text or not greedy:
        check.fault(
            "pure",
            "policy is not the same when traced again: its random numbers come from context.keys alone",
        )
    function = jax.jit(act)
    first = check.call("policy", function, obs, core, keys)
    size = _together(trial)
    turned = function(*(_turned(x, size) for x in (obs, core, keys)))
    if not _equal(_turned(first, size), turned):
        text = "policy gives a row another output when environments change places: each row depends on its own row of"
        check.fault("rows", f"{text} obs, core and context.keys alone, and not on one key for all")
    others = [
        function(obs, core, jax.random.split(jax.random.key(seed), rows)) for seed in range(2, 50)
    ]
    if trial.algorithm.behaviour is None and all(_equal(first[0], other[0]) for other in others):
        check.note(
            "policy takes the same actions whatever context.keys are, so it does not explore"
        )


def _draws_decide(trial: Trial) -> bool:
    """Returns whether greedy actions are others with another generator of random numbers.

    A tree search needs a key also where it adds no noise.
    """
    obs = jax.tree.map(lambda x: x[:-1].reshape(-1, *x.shape[2:]), trial.rollout.obs)
    core = trial.algorithm.initial_core(trial.rollout.reward.size)
    actions = []
    for generator in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(generator):
            act = jax.jit(
                lambda: trial.algorithm.policy(
                    trial.variables, obs, core, Context(None, jnp.float32(0))
                )[0]
            )
            actions.append(act())
    return not _equal(*actions)


def _traced(function: Callable[..., Any], *args: PyTree) -> str:
    """Returns a function's program as text; empty if a second trace gives another one."""

    def text() -> tuple[str, list[bytes]]:
        # a function of its own is traced again
        program = jax.make_jaxpr(lambda *args: function(*args))(*args)
        consts = [
            np.asarray(x).tobytes() for x in program.consts if isinstance(x, jax.Array | np.ndarray)
        ]
        return re.sub(r"0x[0-9a-f]+|id=\d+", "", str(program)), consts

    first = text()
    second = text()
    if first == second:
        return first[0]
    return ""


def _check_greedy(check: Check, trial: Trial) -> None:
    """Compares greedy actions of changed parameters, whose policies are far from uniform,
    with sampled ones.
    """
    space = trial.spec.action
    rows = OBSERVATIONS * SAMPLES
    if not isinstance(space, Box | Discrete):
        return
    variables = _noisy(trial.variables, 1.0)
    obs = jax.tree.map(lambda x: np.repeat(x[0, :OBSERVATIONS], SAMPLES, axis=0), trial.rollout.obs)
    core = trial.algorithm.initial_core(rows)
    policy = trial.algorithm.policy

    @jax.jit
    def act(keys: Any) -> Any:
        return policy(variables, obs, core, Context(keys, jnp.float32(LATE)))[0]

    sampled, greedy = (
        np.asarray(act(keys)).reshape(OBSERVATIONS, SAMPLES, *space.shape)
        for keys in (jax.random.split(jax.random.key(3), rows), None)
    )
    if isinstance(space, Discrete):
        wrong = np.mean(sampled == greedy) < 0.5 / space.n
    else:
        low = sampled.min(axis=1, keepdims=True)
        high = sampled.max(axis=1, keepdims=True)
        slack = 0.1 * (high - low) + 1e-4
        wrong = np.mean((greedy < low - slack) | (greedy > high + slack)) > 0.5
    if wrong:
        check.fault(
            "mode",
            "policy takes greedy actions, without context.keys, that it hardly ever samples with keys",
        )


def _noisy(variables: Variables, scale: float) -> Variables:
    """Returns variables whose parameters have noise of this standard deviation;
    integers are one more.
    """
    leaves, tree = jax.tree.flatten(variables.params)
    keys = jax.random.split(jax.random.key(2), len(leaves))

    def changed(x: Any, key: jax.Array) -> Any:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if floating:
            return x + scale * jax.random.normal(key, x.shape, x.dtype)
        return x + np.ones_like(x)

    return variables._replace(params=jax.tree.unflatten(tree, list(map(changed, leaves, keys))))


def _check_learning(check: Check, trial: Trial) -> None:
    algorithm, rollout = trial.algorithm, trial.rollout
    if algorithm.replay is not None:
        assert algorithm.window is not None
        rollout = _windows(rollout, algorithm.window)
    num_steps, rows = rollout.reward.shape
    if algorithm.replay is not None:
        per_row = 1
    else:
        per_row = num_steps // (algorithm.window or num_steps)
    keys, loss_keys = (
        jax.random.split(jax.random.key(seed), size)
        for seed, size in ((4, rows), (5, rows * per_row))
    )
    later = _noisy(trial.variables, LATER)

    def loss(target: PyTree, batch: PyTree, keys: jax.Array) -> Any:
        losses, mask, aux = algorithm.loss(later, batch, Context(keys, jnp.float32(0), target))
        return jnp.where(mask != 0, losses, 0.0) * mask, {} if aux.priority is None else {
            "priority": aux.priority
        }

    def learn(target: PyTree, rollout: Rollout, keys: jax.Array, loss_keys: jax.Array) -> Any:
        batch = algorithm.postprocess(
            trial.variables, rollout, Context(keys, jnp.float32(0), target)
        )
        return batch, *loss(target, batch, loss_keys)

    args = trial.target, rollout, keys, loss_keys
    text = _traced(mesh.by_hand(learn), *args)
    if not text:
        whole = "postprocess or loss is not the same when traced again"
        check.fault("pure learning", f"{whole}: random numbers come from context.keys alone")
    elif "random_seed[" in text:
        check.fault(
            "key of learning",
            "postprocess or loss makes a key itself; context.keys has one for each example",
        )
    learned = jax.jit(mesh.by_hand(learn))
    function = partial(learned, trial.target)
    _check_target(check, trial, lambda target: learned(target, rollout, keys, loss_keys))
    batch, losses, extra = check.call("postprocess or loss", learned, *args)
    if extra and (least := float(np.min(extra["priority"]))) < 0:
        check.fault(
            "priority",
            f"loss returned an Aux.priority of {least:.3g}; it needs at least 0, as of an absolute error",
        )
    _check_order(check, trial, function, args[1:], (batch, losses), per_row)
    _check_alone(check, partial(mesh.by_hand(loss), trial.target), batch, loss_keys)
    _check_mask(check, rollout, lambda changed: function(changed, keys, loss_keys), losses)
    if not algorithm.episodic and not {"devices", "order", "alone"} & check.faults.keys():
        _check_counts(check, rollout, lambda changed: function(changed, keys, loss_keys))
    _check_value(check, algorithm, later, batch, Context(loss_keys, jnp.float32(0), trial.target))
    if algorithm.episodic or not (rollout.terminated.any() and rollout.truncated.any()):
        return
    swapped = rollout._replace(terminated=rollout.truncated, truncated=rollout.terminated)
    batch_after, after, _ = function(swapped, keys, loss_keys)
    if _equal((batch, losses), (batch_after, after)):
        text = "postprocess treats rollout.terminated and rollout.truncated alike; the value after a termination is 0, and"
        check.note(f"{text} after a time limit that of the next observation")


def _check_mask(
    check: Check, rollout: Rollout, learned: Callable[[Rollout], Any], losses: jax.Array
) -> None:
    """Checks that reset steps are left out: ``losses`` are those of ``rollout``."""
    invalid = jax.tree.map(lambda x: _other(x, rollout.valid), rollout.action)
    _, other, _ = learned(rollout._replace(action=invalid))
    # such a mean has all steps
    if "alone" not in check.faults and not np.array_equal(losses, other, equal_nan=True):
        text = "loss learns from reset steps: other actions there change it; a mask that is 0 where rollout.valid is False"
        check.fault("mask", f"{text} leaves them out")


def _check_counts(check: Check, rollout: Rollout, learned: Callable[[Rollout], Any]) -> None:
    """Checks that means are of valid steps: whether half of
    the environments repeat the others or only reset.
    """
    half = rollout.reward.shape[1] // 2

    def twice(tree: PyTree, axis: int) -> PyTree:
        return jax.tree.map(
            lambda x: np.concatenate([np.split(x, [half], axis)[0]] * 2, axis), tree
        )

    if 2 * half < rollout.reward.shape[1]:
        return
    same = twice(rollout._replace(core=(), final_core=()), 1)
    same = same._replace(core=twice(rollout.core, 0), final_core=twice(rollout.final_core, 0))
    there = np.arange(2 * half) < half
    fields = {
        name: getattr(same, name) * there for name in ("reward", "terminated", "truncated", "valid")
    }
    (batch, losses, _) = learned(same)
    (batch_after, losses_after, _) = learned(same._replace(**fields))
    paths, leaves = zip(*jax.tree.leaves_with_path(batch), strict=True)
    named = [f"postprocess returned another batch{jax.tree_util.keystr(path)}" for path in paths]
    pairs = zip((*leaves, losses), (*jax.tree.leaves(batch_after), losses_after), strict=True)
    for name, (x, y) in zip((*named, "loss returned another loss"), pairs, strict=True):
        count = len(x) // 2
        if not close(x[:count], y[:count]):
            text = f"{name} for some environments because others have reset steps, so a mean counts these"
            return check.fault(
                "counts", f"{text}; mesh.global_mean(x, rollout.valid) leaves them out"
            )


def _check_value(
    check: Check, algorithm: Algorithm, variables: Variables, batch: PyTree, context: Context
) -> None:
    """Notes a policy's loss that also trains the value function,
    as of an advantage without ``stop_gradient``.
    """

    def policy_loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        _, mask, aux = algorithm.loss(variables, batch, context)
        return aux.metrics["loss/policy"], mask, Aux({})

    def gradient(params: PyTree, batch: PyTree) -> PyTree:
        zero = jnp.int32(0)
        state = TrainState(
            variables._replace(params=params),
            context.target,
            (),
            zero,
            zero,
            context.env_step,
            zero,
        )
        return sgd.gradient(
            dataclasses.replace(algorithm, loss=policy_loss), state, batch, context.keys
        )[0]["value"]

    losses, _, aux = jax.eval_shape(mesh.by_hand(algorithm.loss), variables, batch, context)
    shape = getattr(aux.metrics.get("loss/policy"), "shape", None)
    if (
        not isinstance(variables.params, dict)
        or "value" not in variables.params
        or shape != losses.shape
    ):
        return
    if any(map(np.any, jax.tree.leaves(jax.jit(mesh.by_hand(gradient))(variables.params, batch)))):
        text = "the metric 'loss/policy' has a gradient for params['value']: if it holds an advantage of a value that loss"
        check.note(
            f"{text} computes, jax.lax.stop_gradient keeps the policy's loss from training the value"
        )


def _check_target(check: Check, trial: Trial, learned: Callable[[PyTree], Any]) -> None:
    """Checks that a target network follows the parameters, and that something reads it."""
    if not jax.tree.leaves(trial.target):
        return
    params = trial.variables.params
    count = jnp.int32(0)
    program = jax.make_jaxpr(trial.algorithm.target)(params, trial.target, count).jaxpr
    _, read = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    if not any(read[: len(jax.tree.leaves(params))]):
        check.fault(
            "target",
            "target returned a target that never depends on params, so it stays as it begins",
        )
    noisy = _noisy(Variables(trial.target, ()), 1.0).params  # a constant may cancel, as in logits
    if _equal(learned(trial.target), learned(noisy)):
        check.fault(
            "unread", "neither postprocess nor loss reads context.target, the output of target"
        )


def _check_order(
    check: Check, trial: Trial, function: Any, args: Any, first: tuple[PyTree, Any], per_row: int
) -> None:
    """Checks that examples are environment-major, and that environments may change places."""
    (rollout, keys, loss_keys) = args
    (batch, losses) = first
    size = _together(trial)
    rows = rollout.reward.shape[1]
    moved = jax.tree.map(
        lambda x: np.roll(x, size, axis=1), rollout._replace(core=(), final_core=())
    )
    moved = moved._replace(
        core=_turned(rollout.core, size), final_core=_turned(rollout.final_core, size)
    )
    loss_keys = _turned(loss_keys, size * per_row)
    batch_after, losses_after, _ = function(moved, _turned(keys, size), loss_keys)
    # a key for the whole batch, as of mesh.batch_key?
    if not _equal(_turned(batch, size * per_row), batch_after):
        batch_after, losses_after, _ = function(moved, keys, loss_keys)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(batch), jax.tree.leaves(batch_after), strict=True
    ):
        if close(_turned(x, size * per_row), y):
            continue
        by_time = np.asarray(x).reshape(per_row, rows, *x.shape[1:])
        text = f"postprocess returned batch{jax.tree_util.keystr(path)}"
        if close(np.roll(by_time, size, axis=1).reshape(x.shape), y):
            text += " in time-major order; jaxrl_dist.types.swap_axes makes [B, T] of [T, B], whose axes can be joined"
        else:
            text += (
                " that is not the same for an environment in another place: it depends on an index"
            )
        return check.fault("order", text)
    if not close(_turned(losses, size * per_row), losses_after):
        text = "loss returned another loss for an example in another place: each depends on its own row of the batch"
        check.fault("order", f"{text} and of context.keys")


def _check_alone(check: Check, loss: Callable[..., Any], batch: PyTree, keys: jax.Array) -> None:
    """Checks that the losses of the first half of a batch are the same whatever the other half
    is.
    """
    half = len(keys) // 2
    other = jax.tree.map(lambda x: jnp.concatenate([x[:half], x[:half], x[2 * half :]]), batch)
    if re.search("psum|all_gather", str(jax.make_jaxpr(loss)(batch, keys))):
        return  # of the whole batch, as of mesh.global_mean: the two devices agree
    losses, after = (np.asarray(jax.jit(loss)(x, keys)[0])[:half] for x in (batch, other))
    if not np.array_equal(losses, after, equal_nan=True):
        text = "loss gives an example another loss when other examples change: no mean over examples is taken in a loss"
        check.fault("alone", f"{text}; in postprocess, mesh.global_mean makes one")


def _windows(rollout: Rollout, length: int) -> Rollout:
    """Returns all windows of a rollout ``[length, N, ...]``, as replay draws them."""
    starts = range(rollout.reward.shape[0] - length + 1)
    obs = jax.tree.map(
        lambda x: np.concatenate([x[t : t + length + 1] for t in starts], axis=1), rollout.obs
    )
    rest: Rollout = jax.tree.map(
        lambda x: np.concatenate([x[t : t + length] for t in starts], axis=1),
        rollout._replace(obs=(), core=(), final_core=()),
    )
    return rest._replace(obs=obs)


def _other(action: Any, valid: Any) -> Any:
    """Returns other actions where steps are resets."""
    if action.dtype.kind in "iu":
        changed = np.where(action == 0, 1, 0).astype(action.dtype)
    else:
        changed = 0.5 * action
    return np.where(
        np.asarray(valid).reshape(valid.shape + (1,) * (action.ndim - 2)), action, changed
    )


def _together(trial: Trial) -> int:
    """Returns the number of rows that must stay side by side."""
    return trial.spec.num_agents * (2 if trial.algorithm.paired else 1)


def _turned(tree: PyTree, size: int) -> PyTree:
    """Returns the rows of all arrays moved by ``size``, the last ones to the front."""
    return jax.tree.map(lambda x: jnp.roll(x, size, axis=0), tree)


def _equal(x: PyTree, y: PyTree) -> bool:
    """Returns whether two trees are equal but for rounding."""
    return all(map(close, jax.tree.leaves(x), jax.tree.leaves(y)))
