"""What travels between the learner and actors in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.actors.step import Rollouts
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.memory import frames
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import EnvSpec, PyTree, Rollout

SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable"
"""Settings of JAX that decide numbers, and that actors take from the learner."""


def versions() -> dict[str, str]:
    """Returns the versions that must be the same in all processes."""
    import ray

    try:
        own = version("jaxrl-dist")
    except PackageNotFoundError:  # run from its source tree
        own = "its source tree"
    return {
        "jaxrl-dist": own,
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "ray": ray.__version__,
    }


class Launch(NamedTuple):
    """What an actor's process needs to act as a thread of the learner would."""

    process: type[Any]
    """The class of which Ray makes an instance in the process; ``training.actor_process`` has
    it."""
    config: Train
    """Resolved."""
    seed: int
    """That of the session's ``ActorJob``."""
    records: bool
    """Whether rollouts are recorded, so that they hold the probabilities of actions."""
    settings: Mapping[str, Any] = {}
    """Values of ``SETTINGS``."""


class Start(NamedTuple):
    """Where an actor begins."""

    share: EnvSlice
    owner: str
    """Names the actor in messages."""
    restarts: int
    """Times that the actor has restarted, as a process or its environments."""


class Experience(NamedTuple):
    """A rollout as an actor's process sends it."""

    rollouts: Rollouts | None
    """``packed``; None: the learner does not need them."""
    digest: PyTree
    """The result of the plan's ``Digest``."""


class Answer(NamedTuple):
    """A rollout, and what the process says of itself."""

    experience: Experience
    episodes: PyTree
    steps: np.ndarray
    """As for ``Sample``."""
    restarts: int
    """Times that the actor has restarted so far, as for ``Start``."""
    seconds: dict[str, float]
    """Seconds of the process on each stage."""
    warnings: Sequence[str]


# --- Frames travel once ---------------------------------------------------------------------------


def packed(spec: EnvSpec, rollouts: Rollouts) -> Rollouts:
    """Returns rollouts with ``frames.Stacks`` in place of observations that are stacks."""

    def of_policy(part: EnvSpec, rollout: Rollout) -> Rollout:
        if part.frame_stack == 1:
            return rollout
        return rollout._replace(obs=frames.unstack(rollout.obs, part.frame_stack))

    return over_policies(of_policy)(spec.by_policy, rollouts)


def unpacked(rollouts: Rollouts) -> Rollouts:
    """The inverse of ``packed``."""

    def of_policy(rollout: Rollout) -> Rollout:
        if not isinstance(rollout.obs, frames.Stacks):
            return rollout
        return rollout._replace(obs=frames.restack(rollout.obs))

    return over_policies(of_policy)(rollouts)


# --- A gap, which a lost process leaves -----------------------------------------------------------


def last_step(rollouts: Rollouts) -> Rollouts:
    """Returns a copy of the newest observation and of the step before it, ``[1, B, ...]``."""

    def of_policy(rollout: Rollout) -> Rollout:
        copied = jax.tree.map(lambda x: np.array(x[-1:]), rollout._replace(core=(), final_core=()))
        return copied._replace(final_core=jax.tree.map(np.array, rollout.final_core))

    return over_policies(of_policy)(jax.device_get(rollouts))


def gap(last: Rollouts, following: Rollouts) -> Rollouts:
    """Returns a rollout without valid steps, between an actor's last one and the first of the
    process that replaces it: it leads from the last observation to the first one.

    So no step of a replay memory, or of a data set, gets a successor that it did not have.
    """

    def of_policy(last: Rollout, following: Rollout) -> Rollout:
        def lead(before: np.ndarray, xs: np.ndarray) -> np.ndarray:
            return np.concatenate([before, np.repeat(xs[:1], len(xs) - 1, axis=0)])

        def repeat(before: np.ndarray, xs: np.ndarray) -> np.ndarray:
            return np.repeat(before, len(xs), axis=0)

        blank = jax.tree.map(np.zeros_like, following)
        return blank._replace(
            obs=jax.tree.map(lead, last.obs, following.obs),
            action=jax.tree.map(repeat, last.action, following.action),
            # such as a value to bootstrap with, as after ``memory.ring.cut``
            extras=jax.tree.map(repeat, last.extras, following.extras),
            core=last.final_core,
            final_core=following.core,
        )

    return over_policies(of_policy)(last, jax.device_get(following))
