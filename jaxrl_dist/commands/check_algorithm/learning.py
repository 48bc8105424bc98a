"""Trains an algorithm where larger actions pay more and where they cost more,
and compares what it then does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.types import Algorithm, PyTree

ITERATIONS = 100
"""Rollouts to learn from; fewer if they take more than ``SECONDS``."""
SECONDS = 3.0
RATES = 10.0, 3.0
"""Factors of the optimiser's steps, so that few of them show what is learned;
the second one confirms a fault."""
SCALES = 1.0, 10.0
"""Factors of rewards; the second one shows what entropy or a penalty outweighs at the first."""
PLAYED = 4
"""Rollouts over which rewards are averaged, of some 100 steps."""
MARGIN = 0.25
"""How far actions must be apart in the two cases, as a share of their range:
5 standard errors or more."""
LATE = 1e9
"""Env steps at which a policy is judged: exploration has been annealed."""


def check_learns(
    check: Check,
    algorithm: Algorithm,
    begin: Callable[[], PyTree],
    acting: Any,
    update: Any,
    state: Any,
    key: Any,
) -> None:
    """Checks that actions do not become larger where they cost more than where they pay more.

    What imitates its own actions has the same parameters in both cases, and nothing is said of it.

    Args:
      begin: returns environments of ``made_up`` as they start.
      acting, update: the programs that act and learn.
      state: what has learned nothing.
      key: of learning.
    """
    if algorithm.searches or algorithm.episodic:
        # a model of the environment teaches it,
        # or the returns of more environments than there are here
        return
    check.begin(
        "training with rewards that grow with the action, and with rewards that fall with it"
    )
    for scale in SCALES:
        for rate in RATES:
            pay, cost = (
                _trained(factor, rate, begin, acting, update, state, key)
                for factor in (scale, -scale)
            )
            if pay.size > cost.size + MARGIN:
                return
            if not pay.size < cost.size - MARGIN:
                break
        else:
            text = f"{_told(pay, cost)}: the sign of a loss, of advantages or of a target is turned"
            return check.fault("learns", text)
    imitates = jax.tree.all(jax.tree.map(np.array_equal, pay.params, cost.params))
    in_time = pay.whole and cost.whole
    diverged = np.isnan(pay.size + cost.size)
    if in_time and not (imitates or diverged):
        check.note(
            f"{_told(pay, cost)}, so it learns little from rewards here; a sign may be turned"
        )


class Trained(NamedTuple):
    """What training on rewards times a factor has led to."""

    size: float
    """Of actions, a share of their range."""
    updates: int
    whole: bool
    """Whether there was time for all iterations."""
    params: PyTree


def _told(pay: Trained, cost: Trained) -> str:
    where = f"actions are at {pay.size:.0%} of their range, and at {cost.size:.0%} with rewards that fall with it"
    return f"after {pay.updates} updates with rewards that grow with the action, {where}"


def _trained(
    factor: float,
    rate: float,
    begin: Callable[[], PyTree],
    acting: Any,
    update: Any,
    state: Any,
    key: Any,
) -> Trained:
    """Trains with rewards times ``factor``, and plays."""
    state = state._replace(opt_state={"": state.opt_state[""]._replace(learns=np.float32(rate))})
    late = jax.tree.map(lambda x: np.full_like(x, LATE), state.env_step)
    actor = begin()
    first = np.int32(0)
    until = time.monotonic() + SECONDS
    for _ in range(ITERATIONS):
        actor, experience, *_ = acting(
            state.variables, actor, state.iteration, state.env_step, first
        )
        rollout = experience[""]
        rollout = rollout._replace(reward=factor * rollout.reward)
        state, _ = jax.block_until_ready(update(state, {"": rollout}, key))
        if not (whole := time.monotonic() < until):
            break
    variables, iteration, updates = jax.device_get(
        (state.variables, state.iteration, state.updates[""])
    )
    rewards = []
    for number in range(PLAYED):
        played = jax.tree.map(lambda x, number=number: x + np.full_like(x, number), iteration)
        actor, experience, *_ = acting(variables, actor, played, late, first)
        rollout = jax.device_get(experience[""])
        rewards.append(np.mean(rollout.reward, where=rollout.valid))
    size = float(np.clip(0.5 + 0.5 * np.mean(rewards), 0.0, 1.0))
    return Trained(size, int(updates), whole, variables[""].params)
