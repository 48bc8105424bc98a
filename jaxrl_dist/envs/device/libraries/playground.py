"""MuJoCo Playground: robots and the DeepMind control suite (Zakka et al. 2025,
https://arxiv.org/abs/2502.08844).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from mujoco_playground import registry

from jaxrl_dist.envs.device.libraries import Adapted, adapted, settable
from jaxrl_dist.envs.env_options import parse_options


def ids() -> list[str]:
    return sorted(registry.ALL_ENVS)


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are entries of the environment's config that are single values,
    such as ``episode_length``.

    ``impl`` is the implementation of MuJoCo: ``warp``, the library's default, needs an NVIDIA GPU;
    elsewhere it is ``jax``. The config's ``action_repeat`` is for the library's own training:
    ``--action-repeat`` does it here.
    """
    defaults = settable(registry.get_default_config(env_id))
    defaults.pop("action_repeat", None)
    if defaults.get("impl") == "warp" and jax.default_backend() != "gpu":
        defaults["impl"] = "jax"
    values = defaults | parse_options(f"playground:{env_id}", options, defaults)
    env = registry.load(env_id, config_overrides=values)
    return adapted(env, "playground", int(values["episode_length"]))
