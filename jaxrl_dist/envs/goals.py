"""What reaching a goal pays: functions of the goal that a step achieved and the one desired."""

from __future__ import annotations

import re

from jaxrl_dist.checks import shown
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp
from jaxrl_dist.types import Goals

FORMS = "near:DISTANCE or within:DISTANCE"


def near(distance: float) -> Goals:
    """Returns the function that pays 0 within a Euclidean ``distance`` of the goal, and -1 beyond;
    no episode ends. So pay the Fetch robots of Gymnasium-Robotics.
    """

    def goals(achieved: jax.Array, desired: jax.Array) -> tuple[jax.Array, jax.Array]:
        far = _distance(achieved, desired) > distance
        return -far.astype(jnp.float32), jnp.zeros((), bool)

    return goals


def within(distance: float) -> Goals:
    """As ``near``, but pays 1 within the distance and 0 beyond, as Gymnasium-Robotics' mazes do."""

    def goals(achieved: jax.Array, desired: jax.Array) -> tuple[jax.Array, jax.Array]:
        reached = _distance(achieved, desired) <= distance
        return reached.astype(jnp.float32), jnp.zeros((), bool)

    return goals


def _dense(achieved: jax.Array, desired: jax.Array) -> tuple[jax.Array, jax.Array]:
    return -_distance(achieved, desired), jnp.zeros((), bool)


def _distance(achieved: jax.Array, desired: jax.Array) -> jax.Array:
    return jnp.linalg.norm(achieved - desired, axis=-1)


KNOWN = {
    r"Fetch(Reach|Push|Slide|PickAndPlace)-v\d": near(0.05),
    r"Fetch(Reach|Push|Slide|PickAndPlace)Dense-v\d": _dense,
    r"HandReach-v\d": near(0.01),
    r"PointMaze_\w+(?<!Dense)-v3": within(0.45),
}
"""Gymnasium-Robotics' environments by their ids, which EnvPool has too: what their
``compute_reward`` pays."""


def known(env_id: str) -> Goals | None:
    """Returns what an environment of Gymnasium-Robotics pays; None: it is none, or is not known."""
    for pattern, goals in KNOWN.items():
        if re.fullmatch(pattern, env_id):
            return goals
    return None


def parse(text: str) -> Goals:
    """Reads ``--goal-reward``.

    Raises:
      ConfigError: it has another form than ``FORMS``, or no distance above 0.
    """
    form, _, distance = text.partition(":")
    made = {"near": near, "within": within}.get(form)
    number = re.fullmatch(r"\d*\.?\d+(e-?\d+)?", distance)
    if made is None or number is None or float(distance) == 0:
        raise ConfigError(f"must be {FORMS}, such as near:0.05, not {shown(text)}", "goal_reward")
    return made(float(distance))
