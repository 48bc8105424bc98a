"""The config of a training run: its environment, sizes, plan and output.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from jaxrl_dist.checks import (
    MAX_SIZE,
    MAX_STEPS,
    check_range,
    check_used,
    did_you_mean,
    parse_bounds,
    parse_devices,
)
from jaxrl_dist.config.launch import NAMES as LAUNCH
from jaxrl_dist.config.launch import Launch
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.values import Named, plain
from jaxrl_dist.errors import ConfigError

BACKENDS = ("gymnax", "envpool", "gymnasium")
"""Sources of environments; an id without a prefix is looked up in this order."""

LIBRARIES = {
    **{name: name for name in ("brax", "craftax", "jaxmarl", "jumanji", "navix", "pgx")},
    **{"playground": "mujoco_playground", "xminigrid": "xminigrid"},
}
"""Further libraries of JAX environments, with their modules: their ids need the prefix, and each is an extra of this
package."""


OBJECT = "object"
"""Stands for the module in the name of an environment object from Python, which cannot be loaded by name."""


def env_name(env: Any) -> str:
    """Returns an environment's name for files and messages: its ``--env`` name, or for an object ``object:ITS_CLASS``.

    Args:
      env: as in ``Train``.
    """
    if isinstance(env, str):
        return env
    return f"{OBJECT}:{type(env[0] if isinstance(env, tuple) and env else env).__name__}"


def named_env(env: Any) -> Any:
    """Returns ``MODULE:NAME`` for a function or class that its module has under that name, else ``env`` unchanged.

    Other processes and resumed runs find it by this name. Lambdas and nested functions have no such name.
    """
    module, name = (str(getattr(env, field, "")) for field in ("__module__", "__name__"))
    found = callable(env) and getattr(sys.modules.get(module), name, None) is env
    return f"{module}:{name}" if found else env


def split_env(env: str) -> tuple[str | None, str | None, str]:
    """Splits ``--env`` into backend, module and name: ``[BACKEND:]ID`` or ``[gymnax:|gymnasium:]MODULE:NAME``;
    ``pettingzoo:FAMILY/NAME`` is short for a ``MODULE:NAME``.

    Raises:
      ConfigError: ``env`` has neither form.
    """
    *prefixes, name = env.split(":")
    match prefixes:
        case []:
            return None, None, name
        case [backend] if backend in (*BACKENDS, *LIBRARIES):
            return backend, None, name
        case ["pettingzoo"]:
            return None, f"pettingzoo.{name.replace('/', '.')}", "parallel_env"
        case [module] if all(part.isidentifier() for part in module.split(".")):
            return None, module, name
        case ["gymnax" | "gymnasium" as backend, module] if all(part.isidentifier() for part in module.split(".")):
            return backend, module, name
    unknown = f"unknown backend {prefixes[0]!r}{did_you_mean(prefixes[0], [*BACKENDS, *LIBRARIES])}; "
    raise ConfigError(f"--env {env}: {unknown}[gymnax:|envpool:|gymnasium:]ID, LIBRARY:ID or MODULE:NAME works")


Config = TypeVar("Config")


PRESET: Any = None
"""Default of fields that the algorithm's preset for the environment fills in, or else ``RUN_DEFAULTS``."""

RUN_DEFAULTS: dict[str, Any] = {
    "num_envs": 8,
    "rollout_length": 32,
    "plan": "on_device",
    "num_actors": 2,
    "report_interval": 10_000,
    "evaluation_episodes": 100,
    "normalize_observations": False,
    "scale_rewards": False,
    "ema_steps": 0,
}

EVOLVE_INTERVALS = {"pbt": 20_000, "halving": 40_000}
"""Defaults of ``evolve_interval``, for runs of 1e5 to 1e6 env steps."""

if TYPE_CHECKING:
    PlanName = str
else:
    PlanName = Literal[tuple(PLANS)]

CONFIG_FILE = "config.json"
"""File of a run directory that holds its config."""


@dataclasses.dataclass(frozen=True)
class Train(Named, Launch, Generic[Config]):
    """A training run. Fields that are left out come from the algorithm's preset for the environment."""

    algorithm: Config
    """The algorithm's hyperparameters; in Python also its name or config class, to use its preset. With several
    policies, a dict of these keyed by policy; a value may be a ``Train`` that also sets normalisation and clipping."""
    env: Any = ""
    """Environment: a name, as on the command line, a gymnax-style environment object or a tuple ``(env, params)``, or a
    function that returns an environment."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment: gymnax parameters, EnvPool configuration or keyword arguments."""
    env_workers: Literal["threads", "processes"] = "threads"
    """Where Gymnasium environments run; 'processes' suit slow Python code, but take longer to start."""
    env_timeout: float = 120.0
    """Seconds within which an environment on the host must answer."""
    atari_preset: Literal["baselines", "machado"] | None = None
    """Atari protocol: Mnih et al. 2015 as in OpenAI baselines (Atari's default), or Machado et al. 2018."""
    frame_stack: int | None = None
    """Frames stacked into one observation; None: the environment's own number, 4 on Atari and 1 elsewhere."""
    action_repeat: int = 1
    """Times that each action is repeated; the rewards are summed, and all repeats count as one env step."""
    time_limit: int | None = None
    """Env steps after which an episode is truncated; None: only the environment's own limit, which always applies."""
    hide: str | None = None
    """Entries of a vector observation to hide from policies, by index, such as 1,3; 'velocities' hides those of
    classic control."""
    info_metrics: str | None = None
    """Numbers in the environment's info to report, such as success,score: the mean over episodes of the last value, or
    with :sum, as in fuel:sum, of the sum."""
    clip_rewards: str | None = None
    """Clip rewards for learning to a bound such as 1 or a range such as -1,1; reported returns stay raw."""
    policies: dict[str, str] = dataclasses.field(default_factory=dict)
    """Agents of each policy, such as prey=agent_0 hunter=adversary_*, if --policy does not name them; none: all
    agents share one policy."""
    agent_ids: bool = False
    """Add to each agent's observation a one-hot part that says which of its policy's agents it is."""
    num_envs: int = PRESET
    """Environments stepped together, in total over all devices."""
    rollout_length: int = PRESET
    """Steps of each environment in one rollout, after which the acting policy is updated."""
    published: bool = False
    """Take the hyperparameters of the algorithm's paper, or of the environment's authors, in place of the preset's."""
    total_env_steps: int = 1_000_000
    """Environment steps to train for; the run ends with the first rollout that reaches them."""
    stop_at_return: float | None = None
    """End earlier, with the first report whose mean episode return is at least this; members end one by one."""
    seed: int = 0
    """Seed of everything random in the run."""
    seeds: int = 1
    """Runs to train together, a population, with the seeds `--seed`, `--seed` + 1, and so on."""
    vary: dict[str, str] = dataclasses.field(default_factory=dict)
    """Values of hyperparameters, such as learning-rate=1e-4,3e-4: a population with every combination of them."""
    zip: bool = False
    """Combine the first values of all varied hyperparameters, then the second ones, and so on, not all with all."""
    evolve: Literal["pbt", "halving"] | None = None
    """Select among the members: population-based training, or successive halving; see --evolve-interval."""
    evolve_interval: int | None = None
    """Env steps of a member between two selections; with halving up to the first one, and each rung then takes twice as
    many. None: 20,000, or 40,000 with halving."""
    average_every: int | None = None
    """Rollouts between two averagings of all members' networks (local SGD); all begin with the first one's network."""
    plan: PlanName = PRESET
    """How to execute the algorithm; see jaxrl-dist list plans."""
    normalize_observations: bool = PRESET
    """Normalise observations by their running mean and standard deviation over all devices."""
    scale_rewards: bool = PRESET
    """Divide rewards by the running standard deviation of the discounted return."""
    ema_steps: int = PRESET
    """Env steps over which greedy actions average the parameters (exponential moving average); 0: the newest ones."""
    run_dir: str | None = None
    """Directory for config, metrics, summary, checkpoints and trained variables; must not hold a run yet."""
    report_interval: int = PRESET
    """Environment steps between two reports."""
    evaluation_episodes: int = PRESET
    """Episodes of each evaluation, at the end and at the evaluation interval; 0: none."""
    evaluation_policy: Literal["greedy", "sampled"] = "greedy"
    """Actions in evaluations: the best ones, or sampled as in training after all exploration schedules have ended."""
    evaluation_interval: int | None = None
    """Environment steps between two evaluations, each run with the next report; None: only at the end."""
    evaluation_max_steps: int | None = None
    """Env steps after which an evaluation episode is cut off; None: 27,000, or the environment's limit if longer."""
    tensorboard: bool = False
    """Also write the metrics as TensorBoard event files into the run directory."""
    wandb: bool = False
    """Also send the metrics to Weights & Biases; needs the package wandb."""
    checkpoint_interval: int = 1_000_000
    """Environment steps between two checkpoints, each saved with the next report; 0: none by steps."""
    checkpoint_minutes: float = 10.0
    """Minutes since the last checkpoint, after which the next report saves another; 0: none by time."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep, besides the one with the highest return."""
    checkpoint_replay: bool | None = None
    """Save the replay memory in checkpoints, otherwise a resumed run refills it; None: if it is smaller than 2 GB."""
    num_devices: int | None = None
    """Devices to train on, counted over all processes; None: all."""
    mem_fraction: float | None = None
    """Fraction of a GPU's memory to reserve at the start; None: JAX's default (0.75)."""
    compile_cache: bool = True
    """Keep compiled programs for later runs, below ~/.cache/jaxrl_dist or in JAX_COMPILATION_CACHE_DIR if it is set."""
    init_from: str | None = None
    """Run directory with the trained variables to start from."""
    init_parts: str | None = None
    """Parts of those networks to load, such as torso,core; other parts begin untrained. None: all variables."""
    num_actors: int | None = PRESET
    """Actor threads of the plans 'asynchronous', 'own_pace' and 'gradients', which share the environments; presets: 2
    or 4."""
    actor_devices: str | None = None
    """Devices that act under the plans with actor threads, such as 0,1 or 0-3; None: the devices that learn."""
    learner_devices: str | None = None
    """Devices that learn, such as 2-7; None: the first `--num-devices` devices."""
    max_lag: int | None = None
    """Drop experience whose policy is more than this many versions behind the learner; None: use all experience."""
    lockstep: bool = False
    """Keep actors a fixed lag behind the learner: a seed then gives the same run for any timing of the threads."""
    lag: int = 1
    """Policy versions that actors in lockstep stay behind the learner."""
    free_running: bool = False
    """Keep learning from the replay memory while no new experience arrives, beyond the replay ratio."""
    gather: int | None = None
    """Rollouts that suffice for an update once the gather deadline has passed, one per actor; None: wait for all."""
    gather_deadline: float = 1.0
    """Seconds to wait for the other actors' rollouts after the first one."""
    on_actor_error: Literal["raise", "restart"] = "raise"
    """If an environment fails: end the run, or recreate its actor's environments and continue."""
    max_restarts: int = 100
    """Restarts allowed for each actor; the next failure ends the run."""

    @classmethod
    def unknown(cls, name: str, known: list[str]) -> str:
        ours = hint(name, known)
        return ours or f"; hyperparameters belong to the algorithm, as in jaxrl_dist.preset('ppo', env, {name}=...)"

    def checked(self) -> Train[Config]:
        """Converts the config's values by ``values.plain``, and validates all that needs no environment.

        A selection without an interval gets its default.

        Raises:
          ConfigError: a value has a wrong type or is out of range; the message names the first such flag.
        """
        config = plain(dataclasses.replace(self, vary=_texts(self.vary)))
        if dataclasses.is_dataclass(config.algorithm) and not isinstance(config.algorithm, type):
            config = dataclasses.replace(config, algorithm=plain(config.algorithm))
        if config.evolve is not None and config.evolve_interval is None:
            config = dataclasses.replace(config, evolve_interval=EVOLVE_INTERVALS[config.evolve])
        config.validate()
        return config

    def validate(self) -> None:
        """Checks every range that can be checked without the environment.

        Raises:
          ConfigError: a value is out of range; the message names the first such flag.
        """
        if not self.env:
            raise ConfigError("--env is missing; `jaxrl-dist list envs` names environments, such as CartPole-v1")
        if self.run_dir == "":
            raise ConfigError("--run-dir is empty; leave it out for one under runs/")
        check_range(self, "num_envs", "rollout_length", "num_devices", "seeds", low=1, high=MAX_SIZE)
        check_range(self, "total_env_steps", "evaluation_interval", "evolve_interval", low=1, high=10**15)
        check_range(self, "stop_at_return")
        check_range(self, "report_interval", low=1, high=MAX_STEPS)
        check_range(self, "evaluation_episodes", low=0, high=10**6)
        check_range(self, "ema_steps", low=0, high=10**15)
        check_range(self, "evaluation_max_steps", "time_limit", "average_every", low=1, high=10**9)
        evaluates = self.evaluation_episodes != 0
        names = ("evaluation_policy", "evaluation_interval", "evaluation_max_steps")
        check_used(self, *names, there=evaluates, needed="--evaluation-episodes")
        if self.num_envs is not None and self.rollout_length is not None:
            steps = self.num_envs * self.rollout_length
            if steps > MAX_STEPS:
                raise ConfigError(f"--num-envs times --rollout-length must be <= {MAX_STEPS}, not {steps}")
        check_range(self, "checkpoint_interval", low=0, high=10**15)
        check_range(self, "checkpoint_minutes", low=0, high=10**6)
        check_range(self, "keep_checkpoints", low=1, high=10**6)
        check_range(self, "seed", low=0, high=2**31 - 1)
        check_range(dataclasses.replace(self, seed=self.seed + self.seeds - 1), "seed", low=0, high=2**31 - 1)
        check_used(self, "zip", there=bool(self.vary), needed="--vary")
        check_used(self, "evolve_interval", there=self.evolve is not None, needed="--evolve")
        for name in ("evolve", "average_every"):
            check_used(self, name, there=self.seeds > 1 or bool(self.vary), needed="members: --seeds or --vary")
        if self.average_every is not None and self.evolve is not None:
            raise ConfigError("--average-every makes all members one, and --evolve selects among them: leave one out")
        check_range(self, "mem_fraction", above=0, high=1)
        check_used(self, "init_parts", there=self.init_from is not None, needed="--init-from")
        check_range(self, "env_timeout", "gather_deadline", above=0, high=10**6)
        check_range(self, "num_actors", "gather", "frame_stack", low=1, high=1000)
        check_range(self, "action_repeat", low=1, high=10**4)
        parse_bounds("clip_rewards", self.clip_rewards)
        check_range(self, "max_lag", "max_restarts", low=0, high=10**6)
        check_range(self, "lag", low=0, high=1000)
        for name in ("actor_devices", "learner_devices"):
            parse_devices(name, getattr(self, name))
        self.check_launch()
        if hasattr(self.algorithm, "validate") and not isinstance(self.algorithm, type):
            self.algorithm.validate()


def _texts(vary: Any) -> Any:
    """Returns ``vary`` with lists of values written as on the command line: ``{"learning_rate": "0.0001,0.0003"}``."""

    def text(values: Any) -> Any:
        values = values.tolist() if hasattr(values, "tolist") else values  # an array
        return ",".join(map(str, values)) if isinstance(values, list | tuple | range) else values

    return {name: text(values) for name, values in vary.items()} if isinstance(vary, Mapping) else vary


RESUMABLE = (
    *("total_env_steps", "stop_at_return", "report_interval"),
    *("evaluation_episodes", "evaluation_policy", "evaluation_interval", "evaluation_max_steps"),
    *("tensorboard", "wandb"),
    *("checkpoint_interval", "checkpoint_minutes", "keep_checkpoints", "checkpoint_replay"),
    *("num_devices", "actor_devices", "learner_devices", "mem_fraction", "compile_cache"),
    *("env_workers", "env_timeout", "on_actor_error", "max_restarts"),
    *LAUNCH,
)
"""Fields of ``Train`` that may change when a run is resumed."""
