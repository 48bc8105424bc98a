"""Trains an algorithm for some updates on random numbers, on one device and on two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device
from jaxrl_dist.commands.check_algorithm.comparing import close
from jaxrl_dist.commands.check_algorithm.learning import Programs, check_learns
from jaxrl_dist.commands.check_algorithm.made_up import made_up
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.protocols import Hyperparameters
from jaxrl_dist.training.learner import check_sizes, make_learner
from jaxrl_dist.types import Algorithm, EnvSpec, PyTree, Rollout, TrainState, Variables

NUM_ENVS = 8
LENGTH = 16
"""Steps of a rollout, unless the run's are shorter."""
UPDATES = 4
"""Updates after a rollout of an algorithm that replays."""
ITERATIONS = 3
"""Rollouts to learn from, after those that fill a window."""


ADVICE = (
    "take sums and means over all environments with mesh.global_sum and mesh.global_mean, and use "
    "each example's own key"
)
"""What makes two devices agree."""


class Trial(NamedTuple):
    """What functions of an algorithm are tried on; experience is on the host."""

    algorithm: Algorithm
    spec: EnvSpec
    variables: Variables
    target: PyTree
    rollout: Rollout
    updates: int

    @property
    def together(self) -> int:
        """The number of rows that must stay side by side."""
        return self.spec.num_agents * (2 if self.algorithm.paired else 1)


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
    algorithm = dataclasses.replace(algorithm, optimizer=recording(algorithm.optimizer))
    devices = jax.local_devices()[:2]
    check_sizes(config, {"": algorithm}, spec, len(devices))
    learner = make_learner(config, {"": algorithm}, spec, devices)
    programs = _programs(config, algorithm, spec, learner, devices[0])
    state = programs.state
    actor = programs.begin()
    check.begin("training for some updates on random numbers")
    for _ in range(ITERATIONS + (algorithm.window or 0) // config.rollout_length):
        actor, experience = check.call("acting", programs.rollout, state, actor)
        before = int(state.updates[""])
        learned, metrics = check.call("an update", programs.update, state, experience, programs.key)
        state, metrics = jax.device_get((learned, metrics[""]))
        if state.updates[""] > before:
            _check_finite(check, metrics, int(state.updates[""]))
    _check_changes(check, config.algorithm, programs.state, state)
    experience = jax.device_get(check.call("acting", programs.rollout, state, actor)[1])
    if len(devices) < 2:
        check.note(
            "JAX started with one device, so one and two were not compared; the command starts it "
            "with two"
        )
    else:
        check.begin("comparing an update on one device and on two")
        still = _still(state)
        one = jax.device_get(programs.update(still, experience, programs.key))
        update = compile_update(learner, meshes.make_mesh(devices))
        two = check.call("on two devices an update", update, still, experience, programs.key)
        _check_equal(check, one, jax.device_get(two))
    check_learns(check, algorithm, programs)
    learned = state_of(state, "")
    updates = int(learned.updates)
    return Trial(algorithm, spec, learned.variables, learned.target, experience[""], updates)


def _programs(
    config: Train, algorithm: Algorithm, spec: EnvSpec, learner: Learner, on: jax.Device
) -> Programs:
    """Returns the programs that train on one device."""
    algorithms = {"": algorithm}
    mesh = meshes.make_mesh([on])
    env = made_up(spec)
    rows = config.num_envs * spec.num_agents
    env_key = rng.stream(0, rng.Stream.ENV)
    begin = jax.jit(lambda key: device.init(algorithms, env, EnvSlice.all(rows), key))
    return Programs(
        begin=partial(begin, env_key),
        act=device.compile_rollout(
            algorithms, env, mesh, config.rollout_length, rng.stream(0, rng.Stream.ACT), env_key
        ),
        update=compile_update(learner, mesh),
        state=jax.device_get(jax.jit(learner.init)(jax.random.key(0))),
        key=rng.stream(0, rng.Stream.LEARN),
    )


def _small(config: Train, algorithm: Algorithm, spec: EnvSpec) -> tuple[Train, Algorithm]:
    """Returns a short run of two devices, and its algorithm,
    which makes few updates after each rollout.
    """
    window = algorithm.window or 1
    length = min(config.rollout_length, LENGTH)
    if algorithm.replay is None:
        length = max(1, length // window) * window
        algorithm = dataclasses.replace(
            algorithm, num_epochs=1, num_minibatches=min(2, algorithm.num_minibatches)
        )
    else:
        length = max(length, window)
        rows = NUM_ENVS * spec.num_agents
        replay = dataclasses.replace(
            algorithm.replay,
            capacity=rows * 2 * (length + window + spec.frame_stack),
            batch_size=32,
            ratio=UPDATES / (rows * length),
            learning_starts=0,
            priority_exponent=None,  # its draws depend on the number of devices
        )
        algorithm = dataclasses.replace(algorithm, replay=replay)
    small = dataclasses.replace(
        config,
        num_devices=2,
        plan="on_device",
        num_envs=NUM_ENVS,
        num_actors=None,
        rollout_length=length,
    )
    return small, algorithm


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimiser, which also adds up the absolute gradients,
    and may leave parameters as they are.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Recorded:
        return Recorded(inner.init(params), jax.tree.map(jnp.zeros_like, params), jnp.ones(()))

    def update(
        grads: PyTree, state: Recorded, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Recorded]:
        updates, after = inner.update(grads, state.inner, params, **extra)
        total = jax.tree.map(lambda x, grad: x + jnp.abs(grad), state.total, grads)
        scaled = jax.tree.map(lambda x: x * state.learns.astype(x.dtype), updates)
        return scaled, Recorded(after, total, state.learns)

    return optax.GradientTransformationExtraArgs(init, update)


def _still(state: TrainState) -> TrainState:
    """Returns the state with an optimiser that leaves the parameters as they are,
    and has recorded nothing.
    """
    recorded: Recorded = state.opt_state[""]
    total, learns = jax.tree.map(np.zeros_like, (recorded.total, recorded.learns))
    return state._replace(opt_state={"": recorded._replace(total=total, learns=learns)})


def _causes_first(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    order = sorted(metrics, key=lambda name: (name.startswith("gradient/"), name == "loss/total"))
    return {name: metrics[name] for name in order}


def _check_finite(check: Check, metrics: Mapping[str, jax.Array], updates: int) -> None:
    bad = [name for name, number in _causes_first(metrics).items() if not np.isfinite(number)]
    if bad and bad[0].startswith("gradient/"):
        raise check.stop(
            "finite",
            "the loss has a gradient that is not finite although each metric is, as of a square "
            "root, norm or log at 0, even if jnp.where does not choose it; "
            f"within {updates} updates",
        )
    if bad:
        raise check.stop(
            "finite",
            f"the loss has the metric {bad[0]!r} {metrics[bad[0]]} within {updates} updates",
        )


def _check_changes(
    check: Check, config: Hyperparameters, before: TrainState, after: TrainState
) -> None:
    """Checks that every parameter has a gradient, and that updates change it;
    values of no weight need none.
    """
    before = state_of(before, "")
    after = state_of(after, "")
    totals = jax.tree.leaves_with_path(after.opt_state.total)
    updates = int(after.updates)
    zero = [keystr(path) for path, total in totals if not np.any(total)]
    if getattr(config, "value_coefficient", None) == 0:
        zero = [name for name in zero if not name.startswith("['value")]
    if zero:
        more = f", and for {len(zero) - 1} more" if len(zero) > 1 else ""
        check.fault(
            "gradient",
            f"the loss has gradients of 0 for params{zero[0]} in all of {updates} updates{more}",
        )
    params = (jax.tree.leaves(state.variables.params) for state in (before, after))
    for (path, total), old, new in zip(totals, *params, strict=True):
        if np.any(total) and np.array_equal(old, new):
            return check.fault(
                "change",
                f"the optimizer has not changed params{keystr(path)} in {updates} updates",
            )


Updated = tuple[TrainState, Mapping[str, Mapping[str, jax.Array]]]
"""What an update returns: the new state, and metrics by policy."""


def _check_equal(check: Check, one: Updated, two: Updated) -> None:
    """Checks that an update of the same experience is the same on one device and on two."""
    metrics = one[1][""]
    for name, number in _causes_first(metrics).items():
        other = two[1][""][name]
        if not close(number, other):
            return check.fault(
                "devices",
                f"two devices give another {name!r} than one for the same experience, "
                f"{other:.6g} and {number:.6g}; {ADVICE}",
            )
    single = state_of(one[0], "")
    double = state_of(two[0], "")
    for subject, first, second in (
        ("gradient of params", single.opt_state.total, double.opt_state.total),
        ("update_stats at ", single.variables.stats, double.variables.stats),
    ):
        pairs = zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True)
        for (path, x), y in pairs:
            if not close(x, y):
                return check.fault(
                    "devices",
                    f"two devices give another {subject}{keystr(path)} than one for the same "
                    f"experience; {ADVICE}",
                )
