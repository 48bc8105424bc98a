"""Tries the policy of an algorithm on what a trial has learned: rows are alike, random numbers come
from keys, and greedy actions are among those that it samples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.commands.check_algorithm.comparing import equal, noisy, operations, turned
from jaxrl_dist.commands.check_algorithm.trial import Trial
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.types import Context, PyTree

LATE = 1e9
"""Env steps at which a policy's greedy actions are compared with sampled ones:
exploration has been annealed."""
SAMPLES = 128
"""Actions to sample for an observation."""
OBSERVATIONS = 4


class _Acting:
    """The policy of an algorithm, and the first observations of a trial."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.rows = trial.rollout.reward.shape[1]
        self.obs = jax.tree.map(lambda x: x[0], trial.rollout.obs)
        self.core = trial.algorithm.initial_core(self.rows)

    def __call__(
        self, obs: PyTree, core: PyTree, keys: jax.Array | None
    ) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
        context = Context(keys, jnp.float32(0))
        return self._trial.algorithm.policy(self._trial.variables, obs, core, context)


def check_policy(check: Check, trial: Trial) -> None:
    """Checks that the policy treats environments alike, and uses keys as it must."""
    act = _Acting(trial)
    _check_keys(check, trial, act)
    _check_rows(check, trial, act)
    _check_greedy(check, trial)


def _check_keys(check: Check, trial: Trial, act: _Acting) -> None:
    sampling = operations(act, act.obs, act.core, jax.random.split(jax.random.key(1), act.rows))
    greedy = operations(act, act.obs, act.core, None)
    if "random_bits" in greedy and ("random_seed" not in greedy or _draws_decide(trial)):
        check.fault(
            "greedy",
            "policy draws random numbers where context.keys is None, which asks for greedy actions",
        )
    elif "random_seed" in sampling:
        check.fault(
            "key",
            "policy makes its own key, which is the same in each step; use context.keys, one for "
            "each row",
        )
    if not sampling or not greedy:
        check.fault(
            "pure",
            "policy differs when it is traced again; draw random numbers from context.keys alone",
        )


def _check_rows(check: Check, trial: Trial, act: _Acting) -> None:
    """Checks that rows are alike, and that keys choose their actions."""
    function = jax.jit(act)
    keys = [jax.random.split(jax.random.key(seed), act.rows) for seed in range(1, 50)]
    first, *others = (check.call("policy", function, act.obs, act.core, each) for each in keys)
    size = trial.together
    moved = function(*(turned(x, size) for x in (act.obs, act.core, keys[0])))
    if not equal(turned(first, size), moved):
        check.fault(
            "rows",
            "policy gives a row another output when environments change places; compute each row "
            "from its own row of obs, core and context.keys, not from one key for all",
        )
    if trial.algorithm.behaviour is None and all(equal(first[0], other[0]) for other in others):
        check.note("policy takes the same actions for any context.keys, so it does not explore")


def _draws_decide(trial: Trial) -> bool:
    """Returns whether greedy actions are others with another generator of random numbers.

    A tree search needs a key even if it adds no noise.
    """
    obs = jax.tree.map(lambda x: x[:-1].reshape(-1, *x.shape[2:]), trial.rollout.obs)
    core = trial.algorithm.initial_core(trial.rollout.reward.size)

    def act() -> PyTree:
        context = Context(None, jnp.float32(0))
        return trial.algorithm.policy(trial.variables, obs, core, context)[0]

    actions = []
    for generator in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(generator):
            actions.append(jax.jit(lambda: act())())  # a function of its own is traced again
    return not equal(*actions)


def _check_greedy(check: Check, trial: Trial) -> None:
    """Compares greedy actions of changed parameters, whose policies are far from uniform,
    with sampled ones.
    """
    space = trial.spec.action
    if not isinstance(space, Box | Discrete):
        return
    rows = OBSERVATIONS * SAMPLES
    variables = noisy(trial.variables, 1.0)
    obs = jax.tree.map(lambda x: np.repeat(x[0, :OBSERVATIONS], SAMPLES, axis=0), trial.rollout.obs)
    core = trial.algorithm.initial_core(rows)

    @jax.jit
    def act(keys: jax.Array | None) -> PyTree:
        return trial.algorithm.policy(variables, obs, core, Context(keys, jnp.float32(LATE)))[0]

    shape = (OBSERVATIONS, SAMPLES, *space.shape)
    sampled = np.asarray(act(jax.random.split(jax.random.key(3), rows))).reshape(shape)
    greedy = np.asarray(act(None)).reshape(shape)
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
            "policy takes greedy actions, without context.keys, "
            "that it hardly ever samples with keys",
        )
