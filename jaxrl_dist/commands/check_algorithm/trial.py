"""Trains an algorithm for some updates on random numbers, on one device and on two."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device
from jaxrl_dist.commands.check_algorithm.learning import check_learns
from jaxrl_dist.commands.check_algorithm.made_up import made_up
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.training.learner import make_learner
from jaxrl_dist.types import Algorithm, EnvSpec, PyTree, Rollout, Variables

NUM_ENVS = 8
LENGTH = 16
"""Steps of a rollout, unless the run's are shorter."""
UPDATES = 4
"""Updates after a rollout of an algorithm that replays."""
ITERATIONS = 3
"""Rollouts to learn from, after those that fill a window."""
TOLERANCE = 2e-3
"""By how much numbers may differ between one device and two, relative to the largest of an
array."""


class Trial(NamedTuple):
    """What functions of an algorithm are tried on; experience is on the host."""

    algorithm: Algorithm
    spec: EnvSpec
    variables: Variables
    target: PyTree
    rollout: Rollout
    updates: int


class Recorded(NamedTuple):
    """State of an optimiser that records gradients."""

    inner: PyTree
    total: PyTree
    """Sums of the absolute gradients."""
    learns: jax.Array
    """Float32 scalar, factor of each step: 0 leaves the parameters as they are."""


def train(check: Check, config: Train, algorithm: Algorithm, spec: EnvSpec) -> Trial:
    """Trains, checks what changes and whether two devices agree,
    and returns what has been learned and from what.
    """
    config, algorithm = _small(config, algorithm, spec)
    algorithm = dataclasses.replace(algorithm, optimizer=_recording(algorithm.optimizer))
    algorithms = {"": algorithm}
    devices = jax.local_devices()[:2]
    learner = make_learner(config, algorithms, spec, devices)
    one = meshes.make_mesh(devices[:1])
    both = meshes.make_mesh(devices)
    act_key, env_key, learn_key = (
        rng.stream(0, name) for name in (rng.Stream.ACT, rng.Stream.ENV, rng.Stream.LEARN)
    )
    env = made_up(spec)
    rows = config.num_envs * spec.num_agents
    acting = device.compile_rollout(algorithms, env, one, config.rollout_length, act_key, env_key)
    begin = partial(
        jax.jit(lambda key: device.init(algorithms, env, EnvSlice.all(rows), key)), env_key
    )
    update = compile_update(learner, one)
    state = jax.device_get(jax.jit(learner.init)(jax.random.key(0)))
    before = state
    actor = begin()

    def rollout(actor: PyTree, state: Any) -> tuple[PyTree, Any]:
        first = np.int32(0)
        env_step = state.env_step
        return check.call(
            "acting", acting, state.variables, actor, state.iteration, env_step, first
        )[:2]

    check.begin("training for some updates on random numbers")
    for _ in range(ITERATIONS + (algorithm.window or 0) // config.rollout_length):
        actor, experience = rollout(actor, state)
        done = int(state.updates[""])
        learned, metrics = check.call("an update", update, state, experience, learn_key)
        state, metrics = jax.device_get((learned, metrics[""]))
        if state.updates[""] > done:
            _check_finite(check, metrics, int(state.updates[""]))
    _check_changes(check, config.algorithm, before, state)
    _, experience = rollout(actor, state)
    experience = jax.device_get(experience)
    if len(devices) < 2:
        check.note(
            "JAX has begun with one device, so two have not been compared; the command begins with two"
        )
    else:
        check.begin("comparing an update on one device and on two")
        still = _still(state)
        single = jax.device_get(update(still, experience, learn_key))
        double = check.call(
            "on two devices an update", compile_update(learner, both), still, experience, learn_key
        )
        _check_equal(check, single, jax.device_get(double))
    check_learns(check, algorithm, begin, acting, update, before, learn_key)
    return Trial(
        algorithm,
        spec,
        state.variables[""],
        state.target[""],
        experience[""],
        int(state.updates[""]),
    )


def _small(config: Train, algorithm: Algorithm, spec: EnvSpec) -> tuple[Train, Algorithm]:
    """Returns a short run of two devices, and its algorithm,
    which makes few updates after each rollout.
    """
    window = algorithm.window or 1
    length = min(config.rollout_length, LENGTH)
    sizes: dict[str, Any] = {
        "num_devices": 2,
        "plan": "on_device",
        "num_envs": NUM_ENVS,
        "num_actors": None,
    }
    if algorithm.replay is None:
        length = max(1, length // window) * window
        changes: dict[str, Any] = {
            "num_epochs": 1,
            "num_minibatches": min(2, algorithm.num_minibatches),
        }
    else:
        length = max(length, window)
        rows = NUM_ENVS * spec.num_agents
        changes = {
            "replay": dataclasses.replace(
                algorithm.replay,
                capacity=rows * 2 * (length + window + spec.frame_stack),
                batch_size=32,
                ratio=UPDATES / (rows * length),
                learning_starts=0,
                priority_exponent=None,  # its draws depend on the number of devices
            )
        }
    small = dataclasses.replace(config, **sizes, rollout_length=length)
    return small, dataclasses.replace(algorithm, **changes)


def _recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimiser, which also adds up the absolute gradients,
    and may leave parameters as they are.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Recorded:
        return Recorded(inner.init(params), jax.tree.map(jnp.zeros_like, params), jnp.ones(()))

    def update(
        grads: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Recorded]:
        updates, after = inner.update(grads, state.inner, params, **extra)
        total = jax.tree.map(lambda x, grad: x + jnp.abs(grad), state.total, grads)
        return jax.tree.map(lambda x: x * state.learns.astype(x.dtype), updates), Recorded(
            after, total, state.learns
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _still(state: Any) -> Any:
    """Returns the state with an optimiser that leaves the parameters as they are,
    and has recorded nothing.
    """
    recorded = state.opt_state[""]
    total = jax.tree.map(np.zeros_like, recorded.total)
    return state._replace(
        opt_state={"": recorded._replace(total=total, learns=np.zeros_like(recorded.learns))}
    )


def _causes_first(metrics: dict[str, Any]) -> list[str]:
    return sorted(metrics, key=lambda name: (name.startswith("gradient/"), name == "loss/total"))


def _check_finite(check: Check, metrics: dict[str, Any], updates: int) -> None:
    bad = [name for name in _causes_first(metrics) if not np.isfinite(metrics[name])]
    if bad and bad[0].startswith("gradient/"):
        text = "a gradient that is not finite although each metric is, as of a square root, norm or log at 0, also where "
        raise check.stop(
            "finite", f"the loss has {text}jnp.where does not choose it; within {updates} updates"
        )
    if bad:
        raise check.stop(
            "finite",
            f"the loss has the metric {bad[0]!r} {metrics[bad[0]]} within {updates} updates",
        )


def _check_changes(check: Check, config: Any, before: Any, after: Any) -> None:
    """Checks that every parameter has a gradient, and that updates change it;
    values of no weight need none.
    """
    recorded = after.opt_state[""]
    params = after.variables[""].params
    totals = jax.tree.leaves_with_path(recorded.total)
    updates = int(after.updates[""])
    zero = [jax.tree_util.keystr(path) for path, total in totals if not np.any(total)]
    if getattr(config, "value_coefficient", None) == 0:
        zero = [name for name in zero if not name.startswith("['value")]
    if zero:
        text = f"the loss has gradients of 0 for params{zero[0]} in all of {updates} updates"
        check.fault("gradient", text + (f", and for {len(zero) - 1} more" if len(zero) > 1 else ""))
    pairs = zip(
        totals, jax.tree.leaves(before.variables[""].params), jax.tree.leaves(params), strict=True
    )
    for (path, total), old, new in pairs:
        if np.any(total) and np.array_equal(old, new):
            where = jax.tree_util.keystr(path)
            return check.fault(
                "change", f"the optimizer has not changed params{where} in {updates} updates"
            )


def _check_equal(check: Check, one: Any, two: Any) -> None:
    """Checks that an update of the same experience is the same on one device and on two."""
    (state, metrics), (other, others) = one, two
    advice = "sums and means over examples of all environments are those of mesh.global_sum and mesh.global_mean, and "
    advice += "each example has a key of its own"
    for name in _causes_first(metrics[""]):
        if not close(x := metrics[""][name], others[""][name]):
            text = f"two devices give another {name!r} than one for the same experience, {others[''][name]:.6g} and "
            return check.fault("devices", f"{text}{x:.6g}: {advice}")
    for subject, first, second in (
        ("gradient of params", state.opt_state[""].total, other.opt_state[""].total),
        ("update_stats at ", state.variables[""].stats, other.variables[""].stats),
    ):
        for (path, x), y in zip(
            jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True
        ):
            if not close(x, y):
                text = f"two devices give another {subject}{jax.tree_util.keystr(path)} than one for the same experience"
                return check.fault("devices", f"{text}: {advice}")


def close(x: Any, y: Any) -> bool:
    """Returns whether two arrays are equal but for rounding."""
    if not np.issubdtype(np.asarray(x).dtype, np.floating):
        return np.array_equal(x, y)
    scale = np.max(np.abs(x), initial=0.0)
    return bool(np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale + 1e-5, equal_nan=True))
