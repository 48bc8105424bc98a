"""The plans: ways to execute an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.checks import check_used
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import peers
from jaxrl_dist.mesh import by_policy
from jaxrl_dist.plans import asynchronous, gradients, on_device, own_pace, synchronous, threaded
from jaxrl_dist.plans.job import Plan
from jaxrl_dist.plans.population import Population
from jaxrl_dist.types import Algorithm, Algorithms


class PlanInfo(NamedTuple):
    """A plan and its requirements."""

    run: Plan
    together: type[Population] | None = None
    """See ``together``; over several processes, only ``on_device`` has it."""
    check: Callable[[Train[Any], Algorithm, str, int], None] | None = None
    """``(config, algorithm, name, num_devices)``: raises ``ConfigError`` if the resolved config or the algorithm does
    not fit the plan; messages use the algorithm's ``name``, and ``num_devices`` devices learn. With several policies,
    it is called for each that trains."""
    several: bool = True
    """Whether several policies can train."""
    copies: bool = True
    """Whether one of them can be a copy of another."""

    @property
    def threaded(self) -> bool:
        """Whether the plan's actors run in threads."""
        return self.check is not None


PLANS = {
    "on_device": PlanInfo(on_device.on_device, on_device.Compiled),
    "synchronous": PlanInfo(synchronous.synchronous, synchronous.Hosted),
    "asynchronous": PlanInfo(asynchronous.asynchronous, check=asynchronous.check),
    "own_pace": PlanInfo(own_pace.own_pace, check=own_pace.check, copies=False),
    "gradients": PlanInfo(gradients.gradients, check=gradients.check, several=False),
}
"""The table of plans; ``config.PLANS`` has their names and texts for code that must not import JAX."""


def together(name: str) -> type[Population] | None:
    """Returns how a plan trains members in the same programs; None: they train one after the other."""
    return PLANS[name].together if name == "on_device" or peers.world() is None else None


def pool_options(
    config: Train[Any],
    algorithm: Algorithms,
    names: Mapping[str, str],
    learners: Sequence[jax.Device],
    *,
    on_host: bool,
) -> PoolOptions:
    """Returns the options of a resolved config's actor threads, for plans that have them.

    Args:
      names: algorithms' names in messages, keyed by policy; ``""`` is the key if there is one policy.
      on_host: whether the environments run on the host.

    Raises:
      ConfigError: flags do not fit the plan, the algorithm or each other.
    """
    plan = PLANS[config.plan]
    *first, last = (name for name, other in PLANS.items() if other.threaded)
    needed = f"--plan {', '.join(first)} or {last}"
    check_used(config, *marked(config, needs_actors=True), there=plan.threaded, needed=needed)
    check_used(config, "lag", there=config.lockstep, needed="--lockstep")
    check_used(config, "gather_deadline", there=config.gather is not None, needed="--gather")
    check_used(config, "max_restarts", there=config.on_actor_error == "restart", needed="--on-actor-error restart")
    check_used(config, "on_actor_error", there=on_host, needed="environments on the host")
    if config.free_running and isinstance(algorithm, dict):
        raise ConfigError("--free-running is for one policy; of several, those that replay do so under --plan own_pace")
    if config.free_running and (config.plan != "asynchronous" or not threaded.replays(algorithm)):
        raise ConfigError("--free-running is for algorithms that replay experience, under --plan asynchronous")
    for policy, each in by_policy(algorithm).items():
        if plan.check is None or not each.num_epochs:
            continue
        if each.episodic:
            raise ConfigError(
                f"{names[policy]} compares whole episodes of one policy, which --plan {config.plan} does not wait for; "
                "--plan synchronous does, and on_device with environments that can be compiled"
            )
        plan.check(config, each, names[policy], len(learners))
    if plan.threaded:
        return threaded.pool_options(config, learners)
    if config.num_actors is not None:
        text = (
            f"--num-actors {config.num_actors} changes nothing under --plan {config.plan}, which has no actor threads"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return PoolOptions()
