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
from jaxrl_dist.types import Algorithm, PyTree, TrainState

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


class Programs(NamedTuple):
    """The programs that train an algorithm in environments of ``made_up``, and how they start."""

    begin: Callable[[], PyTree]
    """Returns environments as they start."""
    act: Callable[..., Any]
    """As ``device.compile_rollout`` returns it."""
    update: Callable[..., Any]
    """As ``sharded.compile_update`` returns it."""
    state: TrainState
    """What has learned nothing; its optimiser is ``trial.recording``."""
    key: jax.Array
    """The key of learning."""

    def rollout(self, state: TrainState, actor: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the environments after a rollout, and the rollout."""
        first = np.int32(0)
        return self.act(state.variables, actor, state.iteration, state.env_step, first)[:2]


class Trained(NamedTuple):
    """What training on rewards times a factor has led to."""

    size: float
    """Of actions, a share of their range."""
    updates: int
    whole: bool
    """Whether there was time for all iterations."""
    params: PyTree


def check_learns(check: Check, algorithm: Algorithm, programs: Programs) -> None:
    """Checks that actions do not become larger where they cost more than where they pay more.

    An algorithm that imitates its own actions has the same parameters in both cases; the check says
    nothing of it.
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
            pay = _trained(scale, rate, programs)
            cost = _trained(-scale, rate, programs)
            if pay.size > cost.size + MARGIN:
                return
            if not pay.size < cost.size - MARGIN:
                break
        else:
            return check.fault(
                "learns",
                f"{_told(pay, cost)}; the sign of a loss, advantage or target is wrong",
            )
    imitates = jax.tree.all(jax.tree.map(np.array_equal, pay.params, cost.params))
    in_time = pay.whole and cost.whole
    diverged = np.isnan(pay.size + cost.size)
    if in_time and not (imitates or diverged):
        check.note(
            f"{_told(pay, cost)}, so it learns little from rewards here; a sign may be wrong"
        )


def _told(pay: Trained, cost: Trained) -> str:
    return (
        f"after {pay.updates} updates with rewards that grow with the action, "
        f"actions are at {pay.size:.0%} of their range, "
        f"and at {cost.size:.0%} with rewards that fall with it"
    )


def _trained(factor: float, rate: float, programs: Programs) -> Trained:
    """Trains with rewards times ``factor``, and plays."""
    recorded = programs.state.opt_state[""]._replace(learns=np.float32(rate))
    state = programs.state._replace(opt_state={"": recorded})
    actor = programs.begin()
    until = time.monotonic() + SECONDS
    whole = True
    for _ in range(ITERATIONS):
        actor, experience = programs.rollout(state, actor)
        rollout = experience[""]
        rollout = rollout._replace(reward=factor * rollout.reward)
        state, _ = jax.block_until_ready(programs.update(state, {"": rollout}, programs.key))
        whole = time.monotonic() < until
        if not whole:
            break
    variables, iteration, updates = jax.device_get(
        (state.variables, state.iteration, state.updates[""])
    )
    late = jax.tree.map(lambda x: np.full_like(x, LATE), programs.state.env_step)
    judged = state._replace(variables=variables, env_step=late)
    rewards = []
    for number in range(PLAYED):
        played = jax.tree.map(lambda x, number=number: x + np.full_like(x, number), iteration)
        actor, experience = programs.rollout(judged._replace(iteration=played), actor)
        rollout = jax.device_get(experience[""])
        rewards.append(np.mean(rollout.reward, where=rollout.valid))
    size = float(np.clip(0.5 + 0.5 * np.mean(rewards), 0.0, 1.0))
    return Trained(size, int(updates), whole, variables[""].params)
