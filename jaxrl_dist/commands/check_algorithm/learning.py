"""Trains an algorithm where larger actions pay more and where they cost more, and compares what it then does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.types import Algorithm, PyTree

ITERATIONS = 100
"""Rollouts to learn from; fewer if they take more than ``SECONDS``."""
SECONDS = 5.0
RATE = 10.0
"""Factor of the optimiser's steps, so that few of them show what is learned."""
PLAYED = 8
"""Rollouts over which the pay is averaged."""
MARGIN = 0.25
"""By how much of the pay's range it must be less where it counts as a reward than where it counts as a cost."""
LATE = np.float32(1e9)
"""Env steps at which a policy is judged: exploration has been annealed."""


def check_learns(
    check: Check, algorithm: Algorithm, begin: Callable[[], PyTree], acting: Any, update: Any, state: Any, key: Any
) -> None:
    """Checks that rewards are sought rather than avoided.

    Args:
      begin: returns the environments of ``made_up``, whose rewards grow with the action, as they start.
      acting, update: the programs that act and learn.
      state: what has learned nothing.
      key: of learning.
    """
    if algorithm.searches:  # with a model of the environment, which random numbers lack
        return
    recorded = state.opt_state[""]
    state = state._replace(opt_state={"": recorded._replace(learns=np.float32(RATE))})
    ends, count, paid, first = time.monotonic() + SECONDS, ITERATIONS, [], np.int32(0)
    late = jax.tree.map(lambda x: LATE * np.ones_like(x), state.env_step)
    for sign in (1.0, -1.0):
        actor, learned = begin(), state
        for number in range(count):
            actor, experience, *_ = acting(learned.variables, actor, learned.iteration, learned.env_step, first)
            rollout = experience[""]
            learned, _ = update(learned, {"": rollout._replace(reward=sign * rollout.reward)}, key)
            if sign > 0 and time.monotonic() > ends:
                count = number + 1
                break
        rewards = []
        for number in range(PLAYED):
            iteration = jax.tree.map(lambda x, number=number: x + number, learned.iteration)
            actor, experience, *_ = acting(learned.variables, actor, iteration, late, first)
            rollout = jax.device_get(experience[""])
            rewards.append(rollout.reward[rollout.valid].mean())
        paid.append(0.5 + 0.5 * float(np.mean(rewards)))
    globals()["LAST"] = [*paid, count, int(learned.updates[""])]
    if paid[0] < paid[1] - MARGIN:
        text = f"after {int(learned.updates[''])} updates where larger actions are rewarded, from 0 to 1, they earn "
        text += f"{paid[0]:.2f} a step, and where larger actions cost that much {paid[1]:.2f}"
        check.fault("learns", f"{text}: the sign of a loss, an advantage or a target is turned")
