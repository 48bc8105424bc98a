"""The plans: ways to execute an algorithm."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.checks import check_used
from jaxrl_dist.config.plans import PLANS, Plan
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.dataflow import Digest, replays
from jaxrl_dist.plans.population import Population
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Algorithms, Report


def _code(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def execute(session: Session) -> Generator[Report]:
    """Runs a session under its config's plan;
    yields a report each interval until the env steps are done.
    """
    name = session.config.plan
    reports: Generator[Report] = getattr(_code(name), name)(session)
    return reports


def digest(name: str) -> Digest:
    """Returns what the actors of a plan compute from their rollouts where they act."""
    made: Digest = getattr(_code(name), "digest", threaded.digest)
    return made


def population_plan(name: str) -> type[Population] | None:
    """Returns how a plan trains members in the same programs; None: they train one after the
    other.
    """
    plan = PLANS[name]
    fits = plan.members is not None and (plan.compiled or peers.world() is None)
    if fits:
        return getattr(_code(name), str(plan.members))
    return None


def pool_options(
    config: Train,
    algorithm: Algorithms,
    names: Mapping[str, str],
    learners: Sequence[jax.Device],
    *,
    on_host: bool,
) -> PoolOptions:
    """Returns the options of a resolved config's actor threads, for plans that have them.

    Args:
      names: algorithms' names in messages, keyed by policy;
        ``""`` is the key if there is one policy.
      on_host: whether the environments run on the host.

    Raises:
      ConfigError: flags do not fit the plan, the algorithm or each other.
    """
    plan = PLANS[config.plan]
    *first, last = (name for name, other in PLANS.items() if other.threaded)
    needed = f"--plan {', '.join(first)} or {last}"
    check_used(config, *marked(config, needs_actors=True), active=plan.threaded, needed=needed)
    check_used(
        config,
        "max_restarts",
        active=config.on_actor_error == "restart",
        needed="--on-actor-error restart",
    )
    check_used(config, "on_actor_error", active=on_host, needed="environments on the host")
    if config.free_running:
        _check_free_running(plan, algorithm)
    if not plan.threaded:
        if config.num_actors is not None:
            without = f"under --plan {config.plan}, which has no actor threads"
            text = f"--num-actors {config.num_actors} does nothing {without}"
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return PoolOptions()
    for policy, trained in algorithm.items():
        if trained.trains and trained.episodic:
            raise ConfigError(
                f"{names[policy]} compares whole episodes of one policy, which --plan "
                f"{config.plan} does not wait for; use --plan synchronous, or on_device if the "
                "environment can be compiled"
            )
        if trained.trains:
            _code(config.plan).check_plan(config, trained, names[policy], len(learners))
    return threaded.pool_options(config, learners)


def _check_free_running(plan: Plan, algorithm: Algorithms) -> None:
    if len(algorithm) > 1:
        raise ConfigError(
            "--free-running needs a run with one policy; several policies with replay run freely "
            "under --plan own_pace"
        )
    if not (plan.free_running and replays(algorithm)):
        raise ConfigError("--free-running needs replay and --plan asynchronous")
