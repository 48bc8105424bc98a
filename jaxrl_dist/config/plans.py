"""The table of plans, ways to execute an algorithm, for all code; this file imports none of
theirs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """What a plan does and needs; its code is the module of ``jaxrl_dist.plans`` with its name.

    A function of that module with the same name executes a ``Session``. Where the plan is
    ``threaded``, the module also has ``check_plan(config, algorithm, name, num_devices)``. It
    raises ``ConfigError`` if the resolved config or the algorithm does not fit the plan; messages
    use the algorithm's ``name``, and ``num_devices`` devices learn. With several policies, it is
    called for each that trains.
    """

    help: str
    """What it does, in one line."""
    clock: Literal["env_steps", "updates"] = "env_steps"
    """What totals, intervals, schedules and checkpoints of a run count; a plan whose clock is
    ``updates`` learns from a data set alone and steps no environment."""
    compiled: bool = False
    """Whether environments are part of its program: they must be pure functions,
    and a resumed run continues in them."""
    threaded: bool = False
    """Whether its actors run in threads."""
    sends_gradients: bool = False
    """Whether actors compute the gradients, each on one device, without a replay memory."""
    free_running: bool = False
    """Whether learning from a replay memory need not wait for new experience
    (``--free-running``)."""
    unused: tuple[str, ...] = ()
    """Fields that presets fill in, and hyperparameters, that mean nothing under it;
    a run refuses the user's."""
    several: bool = True
    """Whether several policies can train."""
    copies: bool = True
    """Whether one of them can be a copy of another."""
    members: str | None = None
    """Class of its module that trains the members of a population in the same programs, over
    several processes only if it is ``compiled``; None: they train one after the other."""

    @property
    def simulates(self) -> bool:
        """Whether environments that are pure functions run where policies act,
        so that policies can plan with them.
        """
        return self.compiled or self.threaded


PLANS = {
    "on_device": Plan(
        "environment, acting and learning compiled into one program (gymnax)",
        compiled=True,
        members="DevicePopulation",
    ),
    "synchronous": Plan(
        "environments stepped from the host, acting and updating in turn (any backend)",
        members="HostPopulation",
    ),
    "asynchronous": Plan(
        "actor threads send experience while the learner updates (any backend)",
        threaded=True,
        free_running=True,
    ),
    "own_pace": Plan(
        "like asynchronous, but each of several policies learns at its own pace (any backend)",
        threaded=True,
        copies=False,
    ),
    "gradients": Plan(
        "actor threads compute gradients and send them to the learner (any backend)",
        threaded=True,
        sends_gradients=True,
        several=False,
    ),
    "offline": Plan(
        "learning from a data set alone (--data), compiled into one program",
        clock="updates",
        unused=(
            "rollout_length",
            "replay_capacity",
            "replay_ratio",
            "learning_starts",
            "return_window",
        ),
        several=False,
        copies=False,
        members="DevicePopulation",
    ),
}
"""The plans by name; the first that is ``compiled``, and the first that is not, are the
defaults."""


def default_plan(*, is_pure: bool) -> str:
    """Returns the name of the plan for environments that are pure functions, or for others."""
    return next(name for name, plan in PLANS.items() if plan.compiled == is_pure)


def offline_plan() -> str:
    """Returns the name of the plan that learns from a data set alone."""
    return next(name for name, plan in PLANS.items() if plan.clock == "updates")
