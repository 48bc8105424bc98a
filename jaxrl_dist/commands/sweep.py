"""``jaxrl-dist sweep``: trains the members of a population as processes, several at a time."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from jaxrl_dist.checks import counted, flag
from jaxrl_dist.commands import flags, request, tuning
from jaxrl_dist.commands.tuning import by_optuna, by_ray
from jaxrl_dist.config.train import ALONE, CONFIG_FILE, Processes, Train
from jaxrl_dist.config.values import marked, setting
from jaxrl_dist.errors import DIVERGED, ConfigError, say, visible
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run import machine, signals, storage, subprocesses
from jaxrl_dist.settings.members import MemberConfig, is_population, members
from jaxrl_dist.settings.stored import to_json

if TYPE_CHECKING:
    from jaxrl_dist.training.rows import Row

USAGE = "jaxrl-dist sweep ALGO --env ID [--seeds N] [--vary NAME=A,B,C ...]"
_OF_THE_SWEEP = (*marked(Processes), *ALONE, "seed", "run_dir", "quiet", "resume_or_start")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Trains the members that --seeds and --vary ask for, each in a process,
    --jobs of them at a time.

    That suits plans whose actors are threads; under --plan on_device `jaxrl-dist train` trains all
    members in one program, which is faster. The same command with the same --run-dir continues a
    sweep that was stopped.

    `jaxrl-dist train ALGO --help` explains the other flags.
    """

    jobs: int = setting(2, low=1, high=1000)
    """Number of members, or trials, that train at the same time."""
    tuner: Literal["optuna", "ray"] | None = None
    """Let Optuna, or ASHA of Ray Tune, choose the values of --vary, which may be ranges LOW:HIGH,
    or LOW:HIGH:log for a logarithmic scale. Each trial is a run; --jobs of them train at the same
    time, with Optuna as a population, with Ray as processes."""
    trials: int = setting(32, low=1, high=100_000, needs="tuner")
    """Number of trials."""


def run(args: Sequence[str]) -> int:
    """Runs ``sweep ALGO --env ID [FLAGS]``."""
    sweep, args = flags.split(Sweep, args or ["--help"], USAGE)
    population = request.parse(args)
    population.check_asked()
    output = request.output_flags(population.fields)
    if output["verbose"]:
        raise ConfigError("only `train` accepts --verbose; a sweep prints one line for each member")
    with signals.stopping() as stop:
        if sweep.tuner is None:
            succeeded = _train_members(sweep, population, args, stop, quiet=output["quiet"])
        else:
            succeeded = _tune(sweep, population, args, stop, quiet=output["quiet"])
    return 0 if succeeded else 1


def _train_members(
    sweep: Sweep,
    population: request.Request,
    args: Sequence[str],
    stop: signals.Stop,
    *,
    quiet: bool,
) -> bool:
    """Trains each member in a process; returns whether none has failed."""
    config, source = population.resolved()

    from jaxrl_dist.training.rows import Row, read_rows
    from jaxrl_dist.training.tables import table

    _check(config)
    config = population.in_run_dir(config)
    path = pathlib.Path(str(config.run_dir))
    configs = members(config)
    commands = [_command(args, config, member) for member in configs]
    rows = [
        Row(f"{number:03d}", member.config.seed, member.values)
        for number, member in enumerate(configs)
    ]
    progress = _MemberResults(path, rows, config.evaluation_policy, quiet=quiet)
    with _claimed(path, to_json(config, source.spec)):
        # the rows of an earlier session; members that end now replace theirs
        rows[:] = read_rows(path, rows)
        progress.print(f"{counted(len(rows), 'member')}, {sweep.jobs} at a time, in {path}")
        logs = list(map(progress.log, range(len(rows))))
        logs[0].parent.mkdir(exist_ok=True)
        for log in logs:
            _wait_for(log.with_suffix(""), stop)
        subprocesses.run_all(commands, logs, sweep.jobs, stop, progress.ended, progress.failed)
    if stop():
        raise stop.interrupted(f"interrupted; the same command with --run-dir {path} continues it")
    progress.print(table(rows, config.evaluation_policy))
    return not any(row.status in ("diverged", "failed") for row in rows)


def _tune(
    sweep: Sweep, run: request.Request, args: Sequence[str], stop: signals.Stop, *, quiet: bool
) -> bool:
    """Lets ``sweep.tuner`` choose the values of the runs; returns whether any trial has a
    return.
    """
    tuner = str(sweep.tuner)
    tuning.check_tuner(tuner, run)
    vary = run.fields.pop("vary")
    config, source = run.resolved()
    _check_record(config)
    if tuner == "ray" and config.actors_on == "ray":
        raise ConfigError(
            "--tuner ray and --actors-on ray need the same CPUs, so each would wait for the other; "
            "use --tuner optuna, or actors in threads"
        )
    if tuner == "ray" and config.offline:
        raise ConfigError(
            "--tuner ray compares training returns, which --plan offline does not have; use "
            "--tuner optuna"
        )
    space = tuning.spaces(config, vary)
    config = run.in_run_dir(config)

    def show(text: str) -> None:
        if not quiet:
            print(visible(text), flush=True)

    path = pathlib.Path(str(config.run_dir))
    search = tuning.Search(run, space, path, sweep.trials, sweep.jobs, stop, show)
    stored = to_json(dataclasses.replace(config, vary=vary), source.spec)
    with _claimed(path, {**stored, "tuner": tuner}), one_line_warnings(quiet):
        show(f"{counted(sweep.trials, 'trial')} by {tuner}, {sweep.jobs} at a time, in {path}")
        if tuner == "optuna":
            has_return = by_optuna.tune(search, _ranked_by(config), config.seed)
        else:
            has_return = by_ray.tune(search, args, config)
    if stop():
        again = "continues it" if tuner == "optuna" else "begins it again"
        raise stop.interrupted(f"interrupted; the same command with --run-dir {path} {again}")
    return has_return


def _ranked_by(config: Train) -> str:
    """Returns in words what Optuna ranks trials by."""
    from jaxrl_dist.training.tables import score_name

    field = "evaluation_return" if config.evaluation_episodes else "episode_return"
    return score_name(field, config.evaluation_policy)


def _check(config: Train) -> None:
    """Checks that a run has members that do without each other.

    Raises:
      ConfigError: it has none, or they are selected or averaged, or would record one data set.
    """
    if not is_population(config):
        raise ConfigError("a sweep needs several members; add --seeds or --vary")
    if config.evolve is not None:
        raise ConfigError("a sweep does not support --evolve; remove it, or use `train`")
    if config.average_every is not None:
        raise ConfigError(
            "only `train` accepts --average-every: the members of a sweep do not communicate"
        )
    _check_record(config)


def _check_record(config: Train) -> None:
    if config.record is not None:
        raise ConfigError(
            f"--record {config.record} does not work with a sweep; remove it and record its runs "
            "afterwards with `jaxrl-dist record`"
        )


@dataclasses.dataclass
class _MemberResults:
    """Stores and shows the results of members as they end."""

    path: pathlib.Path
    rows: list[Row]
    policy: str
    """The policy of evaluations."""
    quiet: bool

    def log(self, number: int) -> pathlib.Path:
        """Returns the file for the output of a member."""
        return self.path / run_files.MEMBERS / f"{self.rows[number].member}.log"

    def print(self, text: str) -> None:
        if not self.quiet:
            print(visible(text), flush=True)

    def ended(self, number: int, status: str = "done") -> None:
        from jaxrl_dist.training.rows import refill, scored
        from jaxrl_dist.training.tables import score_name, write_results

        row = self.rows[number]
        row.status = status
        last = refill(row, self.log(number).with_suffix(""))
        if last is not None:
            row.env_steps = last.env_steps
            row.updates = last.updates
            row.iteration = last.iteration
        write_results(self.path, self.rows)
        field, (score,) = scored([row])
        result = status
        if score is not None:
            result = f"{score_name(field, self.policy)} {score:.6g}"
        done = sum(row.status == "done" for row in self.rows)
        self.print(f"member {row.member}: {result}, {done} of {len(self.rows)} done")

    def failed(self, number: int, why: str) -> None:
        status = "diverged" if why.startswith(DIVERGED) else "failed"
        say(
            f"member {self.rows[number].member} has {status}, but the others continue: {why}; see "
            f"{self.log(number)}"
        )
        self.ended(number, status)


def _claimed(path: pathlib.Path, config: Mapping[str, Any]) -> IO[bytes]:
    """Makes the directory of a new sweep, or checks that an existing one holds this sweep.

    Returns an open file, which locks the sweep against other processes.

    Raises:
      ConfigError: it holds another run, or another process is at it.
    """
    config = {**json.loads(json.dumps(config)), "sweep": True}
    if (path / CONFIG_FILE).exists():
        stored = storage.read_json(path / CONFIG_FILE)
        if {name: stored.get(name) for name in config} != config:
            raise ConfigError(
                f"--run-dir {path} holds a run with other flags; name another directory"
            )
        for name in (run_files.MEMBERS, tuning.TRIALS, tuning.STUDY, tuning.RAY):
            storage.check_no_links(path / name)
        return run_files.lock(str(path))
    run_files.claim(str(path))
    with run_files.freeing(path):
        storage.write_json(path / CONFIG_FILE, {**config, "versions": machine.versions()})
        return run_files.lock(str(path))


def _wait_for(member: pathlib.Path, stop: Callable[[], bool]) -> None:
    """Waits while another process is at a member: if a sweep is killed,
    its members save what they have learnt.
    """
    deadline = time.monotonic() + subprocesses.GRACE_SECONDS
    said = False
    while (member / run_files.METRICS).exists() and not stop() and time.monotonic() < deadline:
        try:
            run_files.lock(str(member)).close()
            return
        except ConfigError as error:
            if not said:
                say(
                    f"{error.with_flags}: waiting until it has ended, for at most "
                    f"{subprocesses.GRACE_SECONDS:g} s"
                )
            said = True
            time.sleep(0.2)


def _command(args: Sequence[str], config: Train, member: MemberConfig) -> list[str]:
    """Returns the command that trains a member, continues it,
    or leaves it as it is if it has ended.

    Args:
      config: the population's.
    """
    algorithm = vars(member.config.algorithm)
    wanted = {**vars(config.algorithm), **member.values}
    unused = [name for name, value in algorithm.items() if value != wanted[name]]
    replaced = [flag(name) for name in (*_OF_THE_SWEEP, *unused)]
    words = list[str]()
    skipping = False
    for arg in args:
        if arg.startswith("--"):
            skipping = arg.split("=", 1)[0].replace("_", "-").replace("--no-", "--", 1) in replaced
        if not skipping:
            words.append(arg)
    fields = {
        "processes": 1,
        "seed": member.config.seed,
        "run_dir": member.config.run_dir,
        "quiet": True,
        **ALONE,
        **member.values,
    }
    for name, value in fields.items():
        if name not in unused:
            words += flags.written(name, value)
    return [sys.executable, "-P", "-m", "jaxrl_dist.cli", "train", *words, "--resume-or-start"]
