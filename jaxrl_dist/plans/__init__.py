"""The plans: ways to execute an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_dist import config as texts
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.checks import check_used
from jaxrl_dist.config import Train
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import asynchronous, gradients, on_device, synchronous, threaded
from jaxrl_dist.plans.job import Plan
from jaxrl_dist.plans.population import Population
from jaxrl_dist.types import Algorithm


class PlanInfo(NamedTuple):
    """A plan, its description and its requirements."""

    run: Plan
    says: str
    """One line on what the plan does."""
    together: type[Population] | None = None
    """See ``together``; over several processes, only ``on_device`` has it."""
    check: Callable[[Train[Any], Algorithm, str, int], None] | None = None
    """``(config, algorithm, name, num_devices)``: raises ``ConfigError`` if the resolved config or the algorithm does
    not fit the plan; messages use the algorithm's ``name``, and ``num_devices`` devices learn."""

    @property
    def threaded(self) -> bool:
        """Whether the plan's actors run in threads."""
        return self.check is not None


PLANS = {
    "on_device": PlanInfo(on_device.on_device, texts.PLANS["on_device"], on_device.Compiled),
    "synchronous": PlanInfo(synchronous.synchronous, texts.PLANS["synchronous"], synchronous.Hosted),
    "asynchronous": PlanInfo(asynchronous.asynchronous, texts.PLANS["asynchronous"], check=asynchronous.check),
    "gradients": PlanInfo(gradients.gradients, texts.PLANS["gradients"], check=gradients.check),
}
"""The table of plans; ``config.PLANS`` has their names and texts for code that must not import JAX."""


def together(name: str) -> type[Population] | None:
    """Returns how a plan trains members in the same programs; None: they train one after the other."""
    return PLANS[name].together if name == "on_device" or peers.world() is None else None


def pool_options(
    config: Train[Any], algorithm: Algorithm, name: str, learners: Sequence[jax.Device], *, on_host: bool
) -> PoolOptions:
    """Returns the options of a resolved config's actor threads, for plans that have them.

    Args:
      name: the algorithm's name in messages.
      on_host: whether the environments run on the host.

    Raises:
      ConfigError: flags do not fit the plan, the algorithm or each other.
    """
    plan = PLANS[config.plan]
    needed = f"--plan {' or '.join(name for name, other in PLANS.items() if other.threaded)}"
    names = ("actor_devices", "max_lag", "lockstep", "gather", "on_actor_error")
    check_used(config, *names, there=plan.threaded, needed=needed)
    check_used(config, "lag", there=config.lockstep, needed="--lockstep")
    check_used(config, "gather_deadline", there=config.gather is not None, needed="--gather")
    check_used(config, "max_restarts", there=config.on_actor_error == "restart", needed="--on-actor-error restart")
    check_used(config, "on_actor_error", there=on_host, needed="environments on the host")
    if config.free_running and (config.plan != "asynchronous" or algorithm.replay is None):
        raise ConfigError("--free-running is for algorithms that replay experience, under --plan asynchronous")
    if plan.threaded and algorithm.episodic:
        raise ConfigError(
            f"{name} compares whole episodes of one policy, which --plan {config.plan} does not wait for; "
            "--plan synchronous does, and on_device with environments that can be compiled"
        )
    if plan.check is not None:
        plan.check(config, algorithm, name, len(learners))
        return threaded.pool_options(config, learners)
    if config.num_actors is not None:
        text = (
            f"--num-actors {config.num_actors} changes nothing under --plan {config.plan}, which has no actor threads"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return PoolOptions()
