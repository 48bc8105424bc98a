"""What a training run is: its environment, its sizes, its plan and what it leaves behind.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from jaxrl_dist.checks import (
    MAX_SIZE,
    MAX_STEPS,
    check_range,
    check_used,
    did_you_mean,
    parse_bounds,
    parse_devices,
)
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.values import plain

if TYPE_CHECKING:
    from jaxrl_dist.types import Algorithm, EnvSpec


BACKENDS = ("gymnax", "envpool", "gymnasium")
"""Where environments come from; an id without a prefix is looked for in this order."""


OBJECT = "object"
"""Stands for a module in the name of an environment that was handed over from Python, which nothing can load."""


def env_name(env: Any) -> str:
    """What files and people call an environment: the name by which it is found, or for an object ``object:ITS_CLASS``.

    Args:
      env: as in ``Train``.
    """
    if isinstance(env, str):
        return env
    return f"{OBJECT}:{type(env[0] if isinstance(env, tuple) and env else env).__name__}"


def split_env(env: str) -> tuple[str | None, str | None, str]:
    """``--env`` as backend, module and name: ``[BACKEND:]ID`` or ``[gymnax:|gymnasium:]MODULE:NAME``.

    Raises:
      ConfigError: it has neither form.
    """
    *prefixes, name = env.split(":")
    match prefixes:
        case []:
            return None, None, name
        case [backend] if backend in BACKENDS:
            return backend, None, name
        case [module] if all(part.isidentifier() for part in module.split(".")):
            return None, module, name
        case ["gymnax" | "gymnasium" as backend, module] if all(part.isidentifier() for part in module.split(".")):
            return backend, module, name
    unknown = f"unknown backend {prefixes[0]!r}{did_you_mean(prefixes[0], BACKENDS)}; "
    raise ConfigError(f"--env {env}: {unknown}[gymnax:|envpool:|gymnasium:]ID or MODULE:NAME works")


class AlgorithmConfig(Protocol):
    """The hyperparameters of an algorithm: a frozen dataclass whose fields are its command-line flags."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a value is out of range."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Fields of the algorithm or of ``Train`` whose defaults differ for this kind of environment."""

    def make(self, spec: EnvSpec) -> Algorithm:
        """The algorithm for an environment; builds closures only."""


Config = TypeVar("Config")


PRESET: Any = None
"""Default of the fields below that the algorithm's preset for the environment fills in, else ``RUN_DEFAULTS``."""

RUN_DEFAULTS: dict[str, Any] = {
    "num_envs": 8,
    "rollout_length": 32,
    "plan": "on_device",
    "num_actors": 2,
    "report_interval": 10_000,
    "evaluation_episodes": 100,
    "normalize_observations": False,
    "scale_rewards": False,
}

PLANS = {
    "on_device": "environment, acting and learning compiled into one program (gymnax)",
    "synchronous": "environments stepped from the host; act, update, act ... (any backend)",
    "asynchronous": "actor threads send experience while the learner updates (any backend)",
    "gradients": "actor threads send gradients of their own experience (any backend)",
}
"""The ways to execute an algorithm, and what each does; ``plans.PLANS`` has their code."""

if TYPE_CHECKING:
    PlanName = str
else:
    PlanName = Literal[tuple(PLANS)]

CONFIG_FILE = "config.json"
"""Where a run directory keeps its configuration."""


def check_run_dir(run_dir: pathlib.Path) -> None:
    """Checks that a directory is that of a run.

    Raises:
      ConfigError: it is none.
    """
    if not run_dir.is_dir():
        what = "is no directory" if run_dir.exists() else "does not exist"
        raise ConfigError(f"{run_dir} is no run directory: it {what}")
    if not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"{run_dir} is no run directory: it has no {CONFIG_FILE}")


@dataclasses.dataclass(frozen=True)
class Train(Generic[Config]):
    """A training run. What is left out comes from the algorithm's preset for the environment."""

    algorithm: Config
    """The algorithm's hyperparameters; in Python also its name or their class, for those that its preset chooses."""
    env: Any = ""
    """Environment: its name, as on the command line, or a gymnax-style environment object, alone or with its parameters
    as in ``(env, params)``."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment: its gymnax parameters, EnvPool configuration or keyword arguments."""
    env_workers: Literal["threads", "processes"] = "threads"
    """What steps Gymnasium environments; 'processes' serve Python code that is slow, and cost more to start."""
    env_timeout: float = 120.0
    """Seconds in which an environment on the host must answer."""
    atari_preset: Literal["baselines", "machado"] | None = None
    """Atari protocol: Mnih et al. 2015 as in OpenAI baselines (Atari's default), or Machado et al. 2018."""
    frame_stack: int | None = None
    """Newest observations that an observation is made of; None: the environment's own number, 4 on Atari and else 1."""
    action_repeat: int = 1
    """Times that the environment takes each action; their rewards are summed, and together they are one env step."""
    time_limit: int | None = None
    """Env steps after which an episode is truncated; None: the environment's own limit alone, which always holds."""
    clip_rewards: str | None = None
    """Clip rewards in learning to a bound such as 1 or a range such as -1,1; reported returns stay raw."""
    num_envs: int = PRESET
    """Environments that are stepped together, over all devices."""
    rollout_length: int = PRESET
    """Steps of each environment between two updates of the policy that acts."""
    total_env_steps: int = 1_000_000
    """Environment steps to train for; the run ends with the first rollout that reaches them."""
    seed: int = 0
    """Seed of everything random in the run."""
    plan: PlanName = PRESET
    """How to execute: see jaxrl-dist list plans."""
    normalize_observations: bool = PRESET
    """Shift and scale observations by running statistics over all devices."""
    scale_rewards: bool = PRESET
    """Divide rewards by the running standard deviation of the discounted return."""
    run_dir: str | None = None
    """Directory for config, metrics, summary and trained variables; must not hold a run yet."""
    report_interval: int = PRESET
    """Environment steps between two reports."""
    evaluation_episodes: int = PRESET
    """Greedy episodes to play at the end, and at each evaluation before; 0: none."""
    evaluation_interval: int | None = None
    """Environment steps between two evaluations, each made with the next report; None: only at the end."""
    evaluation_max_steps: int | None = None
    """Env steps after which an evaluation's episode is cut; None: 27,000, or the environment's own limit if longer."""
    tensorboard: bool = False
    """Write the metrics as TensorBoard's event files, too, into the run directory."""
    wandb: bool = False
    """Send the metrics to Weights & Biases, whose package wandb must be installed."""
    checkpoint_interval: int = 1_000_000
    """Environment steps between two checkpoints, each taken with the next report; 0: none by steps."""
    checkpoint_minutes: float = 10.0
    """Minutes after which a checkpoint is taken with the next report, if none has been; 0: none by time."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep, beside the one with the highest return."""
    checkpoint_replay: bool | None = None
    """Whether checkpoints hold the replay memory, which fills anew else; None: where it is smaller than 2 GB."""
    num_devices: int | None = None
    """Devices to train on; None: all local ones."""
    mem_fraction: float | None = None
    """Fraction of a GPU's memory to reserve at the start; None: JAX's own (0.75)."""
    init_from: str | None = None
    """Run directory whose trained variables to start from."""
    num_actors: int | None = PRESET
    """Actor threads of the plans 'asynchronous' and 'gradients', each with a share of the environments; 2 or 4."""
    actor_devices: str | None = None
    """Devices that act in those plans, such as 0,1 or 0-3; None: those that learn."""
    learner_devices: str | None = None
    """Devices that learn, such as 2-7; None: the first of all, as many as there are to be."""
    max_lag: int | None = None
    """Throw away experience whose policy is more versions behind the learner; None: learn from all of it."""
    lockstep: bool = False
    """Keep actors a fixed lag behind: the same seed gives the same numbers, whatever the threads' timing."""
    lag: int = 1
    """Versions that actors in lockstep stay behind."""
    free_running: bool = False
    """Learn on from the replay memory while no new experience is there, beyond the replay ratio."""
    gather: int | None = None
    """Actors whose rollouts suffice for an update once the gather deadline has passed; None: wait for all."""
    gather_deadline: float = 1.0
    """Seconds after the first actor's rollout in which those of the others may come."""
    on_actor_error: Literal["raise", "restart"] = "raise"
    """What an environment's failure does: end the run, or start its actor's environments anew."""
    max_restarts: int = 100
    """Restarts of each actor, after which the failure ends the run."""

    def checked(self) -> Train[Config]:
        """The config with its values made plain (see ``values.plain``), as far as they can be checked without making
        the environment.

        Raises:
          ConfigError: the first flag whose value is of a wrong kind or out of range.
        """
        config = plain(self)
        if dataclasses.is_dataclass(config.algorithm) and not isinstance(config.algorithm, type):
            config = dataclasses.replace(config, algorithm=plain(config.algorithm))
        config.validate()
        return config

    def validate(self) -> None:
        """Checks every range that can be checked without making the environment.

        Raises:
          ConfigError: the first flag that is out of range.
        """
        if not self.env:
            raise ConfigError("--env is missing; name one such as --env CartPole-v1 (see: jaxrl-dist list envs)")
        if self.run_dir == "":
            raise ConfigError("--run-dir is empty; leave it out for one under runs/")
        check_range(self, "num_envs", "rollout_length", "num_devices", low=1, high=MAX_SIZE)
        check_range(self, "total_env_steps", low=1, high=10**15)
        check_range(self, "report_interval", low=1, high=MAX_STEPS)
        check_range(self, "evaluation_episodes", low=0, high=10**6)
        check_range(self, "evaluation_interval", low=1, high=10**15)
        check_range(self, "evaluation_max_steps", low=1, high=10**9)
        evaluates = self.evaluation_episodes != 0
        names = ("evaluation_interval", "evaluation_max_steps")
        check_used(self, *names, there=evaluates, needed="--evaluation-episodes")
        if self.num_envs is not None and self.rollout_length is not None:
            steps = self.num_envs * self.rollout_length
            if steps > MAX_STEPS:
                raise ConfigError(f"--num-envs times --rollout-length must be <= {MAX_STEPS}, not {steps}")
        check_range(self, "checkpoint_interval", low=0, high=10**15)
        check_range(self, "checkpoint_minutes", low=0, high=10**6)
        check_range(self, "keep_checkpoints", low=1, high=10**6)
        check_range(self, "seed", low=0, high=2**31 - 1)
        check_range(self, "mem_fraction", above=0, high=1)
        check_range(self, "env_timeout", "gather_deadline", above=0, high=10**6)
        check_range(self, "num_actors", "gather", "frame_stack", low=1, high=1000)
        check_range(self, "action_repeat", low=1, high=10**4)
        check_range(self, "time_limit", low=1, high=10**9)
        parse_bounds("clip_rewards", self.clip_rewards)
        check_range(self, "max_lag", "max_restarts", low=0, high=10**6)
        check_range(self, "lag", low=0, high=1000)
        for name in ("actor_devices", "learner_devices"):
            parse_devices(name, getattr(self, name))
        if hasattr(self.algorithm, "validate") and not isinstance(self.algorithm, type):
            self.algorithm.validate()


RESUMABLE = (
    *("total_env_steps", "report_interval"),
    *("evaluation_episodes", "evaluation_interval", "evaluation_max_steps", "tensorboard", "wandb"),
    *("checkpoint_interval", "checkpoint_minutes", "keep_checkpoints", "checkpoint_replay"),
    *("num_devices", "actor_devices", "learner_devices", "mem_fraction"),
    *("env_workers", "env_timeout", "on_actor_error", "max_restarts"),
)
"""Fields of ``Train`` that may change where a run is resumed."""
