"""Brax: physics (Freeman et al. 2021, https://arxiv.org/abs/2106.13281)."""

from __future__ import annotations

from collections.abc import Mapping

from brax import envs

from jaxrl_dist.envs.device.libraries import Adapted, adapted, defaults_of, settable
from jaxrl_dist.envs.env_options import parse_options

EPISODE_LENGTH = 1000
"""Brax's environments have no limit; its own training sets this one."""


def ids() -> list[str]:
    return sorted(envs._envs)


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are the constructor's arguments, such as ``backend``, and ``episode_length``."""
    defaults = {**settable(defaults_of(envs._envs[env_id])), "episode_length": EPISODE_LENGTH}
    values = parse_options(f"brax:{env_id}", options, defaults)
    limit = values.pop("episode_length", EPISODE_LENGTH)
    env = envs.get_environment(env_id, **values)
    return adapted(env, "brax", limit)
