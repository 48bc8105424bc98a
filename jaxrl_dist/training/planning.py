"""Which algorithms an environment allows: those that plan need its simulator, and only some may
move for both sides of a game.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_dist.config.envs import REMOTE
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import RECORDS, EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.policies import naming
from jaxrl_dist.types import Algorithm, Algorithms, EnvSpec


def check_simulator(
    algorithm: Algorithms, source: EnvSource, plan: str, names: Mapping[str, str]
) -> None:
    """Checks that an algorithm that plans has a simulator,
    that one that does not moves for one side only,
    and that clients can play for it.

    Args:
      names: the algorithm's name, by policy.

    Raises:
      ConfigError: it has none, or moves for both.
    """
    for policy, part in algorithm.items():
        with naming(policy):
            if source.spec.both_sides and part.trains and not part.imitates:
                _check_sides(part, source.spec, names[policy])
            if part.episodic and source.spec.backend == REMOTE:
                raise ConfigError(
                    f"{names[policy]} restarts all environments before each rollout, which clients "
                    "do not bring in time; use an algorithm such as ppo or dqn"
                )
            if part.searches:
                _check_searching(source, plan, names[policy])


def _check_sides(algorithm: Algorithm, spec: EnvSpec, name: str) -> None:
    if spec.backend == RECORDS:
        raise ConfigError(
            f"{name} learns for one side, but the agent of its data moved for both; imitate it "
            "with bc"
        )
    if not algorithm.searches:
        raise ConfigError(
            f"{name} learns for one side, but with opponents=self it moves for both sides of "
            f"{label_of(spec)}; use opponents=agents, or an algorithm that plans (alphazero) or "
            "imitates (bc)"
        )


def _check_searching(source: EnvSource, plan: str, name: str) -> None:
    env = label_of(source.spec)
    if not PLANS[plan].simulates:
        works = ", ".join(name for name in PLANS if PLANS[name].simulates)
        raise ConfigError(
            f"{name} plans with the environment itself, which --plan {plan} does not run beside "
            f"the policy; use {works}"
        )
    if source.pure is None or source.pure.simulate is None:
        lacks = "runs on the host" if source.pure is None else "has no simulator of one agent"
        raise ConfigError(
            f"{name} plans with the environment itself, and {env} {lacks}; use an environment in "
            "JAX (elsewhere a trained policy can play without planning)"
        )
    if source.spec.num_agents > 1:
        raise ConfigError(
            f"{name} plans for one agent, but {env} has {source.spec.num_agents}; let it move for "
            "both players of a game with --env-options opponents=self"
        )
