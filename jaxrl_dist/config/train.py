"""The config of a training run: its environment, sizes, plan and output.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from jaxrl_dist import checks
from jaxrl_dist.checks import (
    MAX_SIZE,
    MAX_STEPS,
    check_bounds,
    check_used,
    parse_bounds,
    parse_devices,
)
from jaxrl_dist.config.groups import (
    Actors,
    Checkpoints,
    Data,
    Environment,
    Evaluation,
    Execution,
    Population,
)
from jaxrl_dist.config.inherit import Named
from jaxrl_dist.config.named import check_algorithm
from jaxrl_dist.config.plans import PLANS, offline_plan
from jaxrl_dist.config.synonyms import hint, missing
from jaxrl_dist.config.values import (
    Fields,
    check_declared,
    check_hyperparameters,
    marked,
    marks_of,
    plain,
    setting,
)
from jaxrl_dist.errors import ConfigError

Config = TypeVar("Config")


EVOLVE_INTERVALS = {"pbt": 20_000, "halving": 40_000}
"""Defaults of ``evolve_interval``, for runs of 1e5 to 1e6 env steps."""

if TYPE_CHECKING:
    PlanName = str
else:
    PlanName = Literal[tuple(PLANS)]

MAX_PROCESSES = 10_000
MAX_SEED = 2**31 - 1
CONFIG_FILE = "config.json"
"""File of a run directory that holds its config."""


@dataclasses.dataclass(frozen=True)
class Common(Generic[Config]):
    """The settings that most users set first."""

    algorithm: Config = setting(stored=False)
    """The algorithm's hyperparameters; in Python also its name or config class, to use its preset.
    With several policies, a dict of these keyed by policy; a value may be a ``Train`` that also
    sets normalisation and clipping."""
    env: Any = ""
    """Environment: a name, as on the command line, a gymnax-style environment object or a tuple
    ``(env, params)``, or a function that returns an environment."""
    env_options: dict[str, str] = setting({})
    """Options of the environment: gymnax parameters, EnvPool configuration or keyword arguments."""
    total_env_steps: int = setting(1_000_000, low=1, high=10**15, resumable=True, compiled=False)
    """Environment steps to train for; the run ends with the first rollout that reaches them."""
    num_envs: int = setting(without_preset=8, low=1, high=MAX_SIZE, varies=True)
    """Environments stepped together, in total over all devices."""
    rollout_length: int = setting(without_preset=32, low=1, high=MAX_SIZE, varies=True)
    """Steps of each environment in one rollout, during which the policy stays the same."""
    seed: int = setting(0, low=0, high=MAX_SEED, compiled=False)
    """Seed of everything random in the run."""
    seeds: int = setting(1, low=1, high=MAX_SIZE)
    """Runs to train together, a population, with the seeds `--seed`, `--seed` + 1, and so on."""
    plan: PlanName = setting(without_preset="on_device")
    """How to execute the algorithm; see jaxrl-dist list plans."""
    run_dir: str | None = setting(None, compiled=False, stored=False)
    """Directory for config, metrics, summary, checkpoints and trained variables;
    must not hold a run yet."""
    report_interval: int = setting(
        without_preset=10_000, low=1, high=MAX_STEPS, resumable=True, compiled=False
    )
    """Environment steps between two reports."""
    evaluation_episodes: int = setting(
        without_preset=100, low=0, high=10**6, resumable=True, compiled=False
    )
    """Episodes of an evaluation, at the end and at the evaluation interval; 0: none.
    100 of two agents are 50 games."""
    evaluation_interval: int | None = setting(
        None, low=1, high=10**15, needs="evaluation_episodes", resumable=True, compiled=False
    )
    """Environment steps between two evaluations, each run with the next report; None:
    only at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All other settings of a run."""

    policies: dict[str, str] = setting({})
    """Agents of each policy, such as prey=agent_0 hunter=adversary_*, if --policy does not name
    them; none: all agents share one policy."""
    agent_ids: bool = False
    """Add to each agent's observation a one-hot part that identifies it among the agents of its
    policy."""
    published: bool = False
    """Use the hyperparameters of the algorithm's paper, or of the environment's authors, instead of
    the preset's."""
    stop_at_return: float | None = setting(None, resumable=True, compiled=False)
    """End with the first report that has at least this mean episode return; each member ends by
    itself."""
    tensorboard: bool = setting(False, resumable=True, compiled=False)
    """Also write the metrics as TensorBoard event files into the run directory."""
    wandb: bool = setting(False, resumable=True, compiled=False)
    """Also send the metrics to Weights & Biases; needs the package wandb."""
    video_interval: int | None = setting(None, low=1, high=10**15, resumable=True, compiled=False)
    """Environment steps between two films of an episode,
    which --tensorboard and --wandb show; None: no films."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes that make one run together. These fields say how a run is started,
    and change none of its numbers.
    """

    coordinator: str | None = setting(None, resumable=True, stored=False)
    """Address HOST:PORT of process 0, for a run over several processes; give each process the same
    command, except for --process. Sizes then count over all processes."""
    processes: int | None = setting(None, low=1, high=MAX_PROCESSES, resumable=True, stored=False)
    """Number of processes of the run; 1: only this one, even if SLURM, Open MPI or a TPU pod
    started several."""
    process: int | None = setting(None, low=0, high=MAX_PROCESSES - 1, resumable=True, stored=False)
    """Number of this process, from 0; process 0 writes the files."""
    lost_process_timeout: float = setting(30.0, low=2, high=86400, resumable=True, stored=False)
    """Seconds without an answer after which a process counts as lost, and the others end."""

    def check_launch(self) -> None:
        """Checks that the fields fit together.

        Raises:
          ConfigError: they do not; the message names the first such flag.
        """
        check_declared(self)
        if (self.coordinator, self.process) == (None, None) and self.processes in (None, 1):
            return
        flags = {
            "--coordinator": self.coordinator,
            "--processes": self.processes,
            "--process": self.process,
        }
        if missing := [name for name, value in flags.items() if value is None]:
            first = next(name for name in flags if name not in missing)
            raise ConfigError(
                f"{first} needs {' and '.join(missing)}, as in --coordinator 10.0.0.1:9876 --processes 2 --process 0"
            )
        address = re.fullmatch(".+:([0-9]{1,5})", str(self.coordinator))
        if address is None or not 0 < int(address[1]) < 2**16:
            raise ConfigError(
                f"--coordinator must be HOST:PORT such as 10.0.0.1:9876, not {self.coordinator}"
            )
        assert self.process is not None and self.processes is not None
        if self.process >= self.processes:
            raise ConfigError(
                f"--process {self.process} is not one of --processes {self.processes}, counted from 0"
            )


GROUPS = (
    Common,
    Run,
    Environment,
    Data,
    Execution,
    Actors,
    Processes,
    Population,
    Evaluation,
    Checkpoints,
)
"""The groups of a run's fields, in the order of help."""


@dataclasses.dataclass(frozen=True)
class Train(
    Named,
    Checkpoints,
    Evaluation,
    Population,
    Processes,
    Actors,
    Execution,
    Data,
    Environment,
    Run,
    Common[Config],
):
    """A training run. Fields that are left out come from
    the algorithm's preset for the environment.
    """

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        checks.check_env_object(self.env)

    @property
    def clock(self) -> Literal["env_steps", "updates"]:
        """What the total, the intervals, the schedules and the checkpoints of the run count."""
        plan = self.plan or (offline_plan() if self.data and self.data_share is None else None)
        if plan:
            return PLANS[plan].clock
        return "env_steps"

    @property
    def offline(self) -> bool:
        """Whether the run learns from a data set alone."""
        return self.clock == "updates"

    @property
    def total(self) -> int:
        """Where the run ends, by its ``clock``."""
        if self.offline:
            return self.total_updates
        return self.total_env_steps

    @property
    def judge(self) -> Literal["training", "evaluation"]:
        """Whose mean return says which checkpoint is the best."""
        if self.keep_best is not None:
            return self.keep_best
        if self.offline and self.evaluation_interval is not None:
            return "evaluation"
        return "training"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing("jaxrl_dist.Train", name))

    @classmethod
    def unknown(cls, name: str, known: list[str]) -> str:
        preset = f"as in jaxrl_dist.preset('ppo', env, {name}=...)"
        return hint(name, known) or f"; hyperparameters belong to the algorithm, {preset}"

    def checked(self) -> Train[Config]:
        """Converts the config's values by ``values.plain``,
        and validates all that needs no environment.

        A selection without an interval gets its default.

        Raises:
          ConfigError: a value has a wrong type or is out of range;
            the message names the first such flag.
        """
        config = self
        if isinstance(config.vary, Mapping) and config.vary:
            config = dataclasses.replace(config, vary=_texts(config.vary))
        config = plain(config)
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
        if not self.env and not (self.data and self.offline):
            raise ConfigError(
                "--env is missing; `jaxrl-dist list envs` names environments, such as CartPole-v1"
            )
        self._check_data()
        self._check_best()
        if self.run_dir == "":
            raise ConfigError(
                "--run-dir is empty; name a directory, or remove it for one under runs/"
            )
        check_declared(self)
        steps = (self.num_envs or 0) * (self.rollout_length or 0)
        if steps > MAX_STEPS:
            raise ConfigError(
                f"--num-envs times --rollout-length must be <= {MAX_STEPS}, not {steps}"
            )
        self._check_members()
        parse_bounds("clip_rewards", self.clip_rewards)
        for name in ("actor_devices", "learner_devices"):
            parse_devices(name, getattr(self, name))
        self.check_launch()
        if not isinstance(self.algorithm, type):
            check_hyperparameters(self.algorithm)

    def _check_data(self) -> None:
        """Checks the fields of learning from a data set.

        Raises:
          ConfigError: one of them does nothing, or is missing.
        """
        self._check_source()
        single = self.offline and self.seeds == 1 and not self.vary
        check_used(
            self,
            "data_memory",
            active=single or self.data_memory != "host",
            needed="a single run under --plan offline",
        )
        check_used(self, "total_updates", active=self.offline, needed="--data and --plan offline")
        check_used(
            self,
            *("total_env_steps", "stop_at_return", "evolve"),
            active=not self.offline,
            needed="new experience, which --plan offline does not make",
        )
        if self.offline and not self.env and self.evaluation_episodes:
            raise ConfigError("--evaluation-episodes needs --env, the environment to play in")

    def _check_source(self) -> None:
        """Checks that the plan learns from the data set as the user asks.

        Raises:
          ConfigError: it does not.
        """
        has_share = self.data_share is not None
        if self.offline and self.data is None:
            raise ConfigError("--plan offline learns from a data set; name one with --data")
        if self.offline and has_share:
            raise ConfigError(
                "--data-share needs new experience, which --plan offline does not make; remove one"
            )
        if self.data is not None and not self.offline and not has_share:
            raise ConfigError(
                f"--data under --plan {self.plan} needs --data-share, the data set's share of each "
                "batch"
            )

    def _check_best(self) -> None:
        """Checks that there will be returns that say which checkpoint is the best.

        Raises:
          ConfigError: there will be none; the message names what works.
        """
        if self.keep_best == "training" and self.offline:
            raise ConfigError(
                "--keep-best training needs training episodes, which --plan offline does not have; "
                "use --keep-best evaluation"
            )
        if self.keep_best != "evaluation":
            return
        if not self.env:
            raise ConfigError("--keep-best evaluation needs --env, the environment to play in")
        if self.evaluation_episodes == 0:
            raise ConfigError(
                "--keep-best evaluation needs --evaluation-episodes above 0; 20 works"
            )
        if self.evaluation_interval is None:
            interval = max(1, int(float(f"{self.total / 20:.0e}")))
            raise ConfigError(
                f"--keep-best evaluation needs --evaluation-interval; {interval} works"
            )

    def _check_members(self) -> None:
        """Checks the seeds of members, and that fields of a population have some."""
        last_seed = self.seed + self.seeds - 1
        check_bounds("seed", last_seed, {">=": 0, "<=": MAX_SEED})
        check_used(
            self,
            *("evolve", "average_every"),
            active=self.seeds > 1 or bool(self.vary),
            needed="members: --seeds or --vary",
        )
        if self.average_every is not None and self.evolve is not None:
            raise ConfigError(
                "--average-every joins all members, but --evolve selects among them; remove one"
            )


def settings_of(config: Train) -> Fields:
    """Returns what a data set notes of the form of its environment: the fields that change it,
    if they do.
    """
    values = {
        name: getattr(config, name)
        for name in ("env_options", "action_repeat", "time_limit", "hide")
    }
    return {
        name: value
        for name, value in values.items()
        if value and (name, value) != ("action_repeat", 1)
    }


def _texts(vary: Fields) -> dict[str, Any]:
    """Returns ``vary`` with lists of values written as on the command line:
    ``{"learning_rate": "0.0001,0.0003"}``.
    """
    texts = {}
    for name, values in vary.items():
        if hasattr(values, "tolist"):  # an array
            values = values.tolist()
        if isinstance(values, list | tuple | range):
            values = ",".join(map(_text, values))
        texts[name] = values
    return texts


def _text(value: object) -> str:
    """Returns a value of ``vary`` as on the command line: 64x64 for several numbers."""
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return str(value)


def launch_of(fields: Fields) -> Processes:
    """Returns the launch among the fields of a run.

    Raises:
      ConfigError: its fields do not fit together.
    """
    given = {name: fields[name] for name in marked(Processes) if fields.get(name) is not None}
    launch = Processes(**given)
    launch.check_launch()
    return launch


_UNFILLED = {field.name: marks_of(field).without_preset for field in dataclasses.fields(Train)}
RUN_DEFAULTS: Fields = {name: value for name, value in _UNFILLED.items() if value is not None}
"""Values of the fields that the algorithm's preset for the environment fills in, if it does not."""
RESUMABLE = marked(Train, resumable=True)
"""Fields of ``Train`` that may change when a run is resumed."""
VARIED = marked(Train, varies=True)
"""Fields of ``Train`` in which members of a population may differ; so may all hyperparameters."""
OWN = marked(Train, per_policy=True)
"""Fields of ``Train`` that each of several policies sets for itself;
the others apply to the whole run."""
ALONE: Fields = {"seeds": Train.seeds, **vars(Population())}
"""The fields that make a run a population, with their values in a single run."""
