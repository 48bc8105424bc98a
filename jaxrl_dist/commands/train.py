"""``jaxrl-dist train``: trains and shows progress."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pathlib
import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist.algorithms import config_class, from_file
from jaxrl_dist.commands import find_modules, flags, help, help_text, policies
from jaxrl_dist.config.launch import launch_of
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError, FinishedError, visible
from jaxrl_dist.hosts import peers, start
from jaxrl_dist.run import signals, subprocesses, trackers
from jaxrl_dist.settings import placements
from jaxrl_dist.settings.policies import Policies, label
from jaxrl_dist.settings.resolve import resolved

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource
    from jaxrl_dist.training.population import PopulationRun
    from jaxrl_dist.training.run import Run


class Asked(NamedTuple):
    """A training run as the command line names it."""

    name: str
    """The algorithm's display name."""
    algorithm: Any
    """Its name or config class; with several policies, all of them, as ``Train`` takes them."""
    fields: dict[str, Any]
    """Fields of ``Train`` and hyperparameters, including those of ``--config``."""
    stored: Collection[str] = ()
    """Names of the fields that only ``--config`` gives."""
    config: str | None = None
    """The file or run directory of ``--config``."""

    def resolved(self) -> tuple[Train[Any], EnvSource]:
        """Returns the complete config, and its environment."""
        if "env" not in self.stored:
            find_modules(self.fields.get("env"))
        config, source = resolved(Train(self.algorithm), self.fields, self.stored)
        if self.config is not None:
            from jaxrl_dist.settings.stored import CLOCK, check_clock, file_of, stored_content

            path = file_of(pathlib.Path(self.config))
            instead = f'divide its numbers of env steps by the agents that they count, and add "clock": "{CLOCK}" to it'
            check_clock(stored_content(path), source.spec, path, instead)
        return config, source


def asked(args: Sequence[str]) -> Asked | None:
    """Parses ``ALGO --env ID [FLAGS]``; ``ALGO`` is a name or a file. Returns None after printing help.

    Raises:
      ConfigError: the algorithm is missing, or a flag is wrong.
    """
    if policies.given(args):
        return _several(args)
    first, args = _algorithm(args)
    wants_help, everything = flags.wants_help(args), "--help-all" in args
    args = [arg for arg in args if arg not in flags.HELP]
    algorithm, stored = _stored(first, args)
    if wants_help and (algorithm is None or isinstance(algorithm, Policies)):
        print(help_text() if algorithm is None else policies.help_text(), end="")
        return None
    if algorithm is None:
        raise ConfigError("which algorithm? Such as: jaxrl-dist train ppo --env CartPole-v1")
    found = _changed(algorithm, stored, args)
    if wants_help:
        print(visible(_help(found, everything=everything)), end="")
        return None
    return found


def _algorithm(args: Sequence[str]) -> tuple[str | type | None, Sequence[str]]:
    """Returns the algorithm that the arguments begin with, if any, and the flags behind it."""
    first = args[0] if args and not args[0].startswith("-") else None
    args = args[1:] if first else args
    if args and not args[0].startswith("-"):
        network = args[0].endswith("Policy")  # as in Stable-Baselines3
        meant = "--torso and --hidden-sizes choose the network" if network else None
        raise ConfigError(f"{args[0]!r} is no flag; {meant or f'an environment is named by --env {args[0]}'}")
    return from_file(first) if first is not None and first.endswith(".py") else first, args


def _stored(algorithm: str | type | None, args: Sequence[str]) -> tuple[str | type | Policies | None, dict[str, Any]]:
    """Returns the algorithm and the fields that ``--config`` names; without it, ``algorithm`` and no fields."""
    config_file = flags.value_of(args, "--config")
    if config_file is None:
        return algorithm, {}
    from jaxrl_dist.settings.stored import stored_fields

    own = algorithm if isinstance(algorithm, type) else None
    named, fields = stored_fields(pathlib.Path(config_file), own, flags.value_of(args, "--env"))
    parts = fields.pop("parts", None)
    stored = named if parts is None else Policies(parts)
    name = _name(stored)
    of_a_policy = own is not None and parts is not None  # the file of one of the stored policies
    if algorithm is not None and _name(algorithm) != name and not of_a_policy:
        raise ConfigError(f"{config_file} is of {name}, not of {_name(algorithm)}; leave the algorithm's name out")
    return stored if own is None or of_a_policy else own, fields


def _name(algorithm: str | type | Policies) -> str:
    """Returns the display name of an algorithm, or of several policies."""
    return algorithm if isinstance(algorithm, str) else label(algorithm)


def _changed(algorithm: str | type | Policies, stored: dict[str, Any], args: Sequence[str]) -> Asked:
    """Returns the run of an algorithm, or of several stored policies, with the fields of ``--config`` and flags."""
    if isinstance(algorithm, Policies):
        parts, given = policies.changed(algorithm.parts, args)
        config_file = given.pop("config", None)
        return Asked(_name(algorithm), parts, {**stored, **given}, stored.keys() - given.keys(), config_file)
    given = flags.parse_train(algorithm, args)
    config_file = given.pop("config", None)
    word = given.pop("placement", None)
    placed = {} if word is None else placements.fields(word, config_class(algorithm), given)
    unsaid = stored.keys() - placed.keys() - given.keys()
    return Asked(_name(algorithm), algorithm, {**stored, **placed, **given}, unsaid, config_file)


def _several(args: Sequence[str]) -> Asked | None:
    """As ``asked``, for ``--policy NAME=ALGO:AGENTS ... --env ID [FLAGS]``."""
    if flags.wants_help(args):
        print(policies.help_text(), end="")
        return None
    if not args[0].startswith("-"):
        raise ConfigError(f"{args[0]!r} is too much beside --policy, which names each policy's algorithm")
    parts, fields = policies.asked(args)
    names = (getattr(algorithm, "__name__", str(algorithm)).split("(")[0] for algorithm, _ in parts.values())
    return Asked("+".join(names), parts, fields)


def _help(asked: Asked, *, everything: bool) -> str:
    """Returns the help of an algorithm; if ``--env`` is given, with the values that the run would use."""
    config: Train[Any] = flags.plain_defaults(asked.algorithm)
    shown = vars(config)
    about = "In parentheses: values without a preset; with --env ID, those that would run."
    if asked.fields.get("env"):
        asked.fields.pop("plan_memory", None)
        shown_as(asked.fields)
        config, _ = asked.resolved()
        shown = {**shown, **vars(config)}
        about = f"In parentheses: the values that would run on {config.env}."
    values = {**shown, **vars(config.algorithm)}
    del values["algorithm"]
    kind, prog = type(config.algorithm), f"jaxrl-dist train {asked.name}"
    return help.train_page(flags.Command, kind, values, prog, about, everything=everything)


def run(args: Sequence[str]) -> int:
    """Runs ``train ALGO --env ID [FLAGS]``."""
    subprocesses.end_with_parent()
    found = asked(args)
    if found is not None and (target := found.fields.pop("plan_memory", None)) is not None:
        from jaxrl_dist.commands import compile_for

        shown_as(found.fields)
        print("\n".join(compile_for.memory(compile_for.report(target, found))))
    elif found is not None:
        again = found.fields.pop("resume_or_start", False)
        if again and found.fields.get("run_dir") is None:
            raise ConfigError("--resume-or-start needs --run-dir: the directory of the run to resume or start")
        output = shown_as(found.fields)
        command = "train --resume-or-start" if again else "train"
        with signals.stopping() as stop, joined(command, found.fields, stop):
            _train(found, stop, again=again, **output)
    return 0


@contextlib.contextmanager
def joined(command: str, fields: Mapping[str, Any], stop: signals.Stop) -> Iterator[None]:
    """Joins the processes of a run while the context lasts, and tells the others of signals and errors here.

    Raises:
      ConfigError: the command is another one in another process.
      Interrupted: a signal has arrived before all processes have joined.
    """

    def check() -> None:
        if stop():
            raise stop.interrupted("interrupted while waiting for the other processes of the run")

    start.start(launch_of(fields), detect=True, waiting=check)
    if (watch := start.watch()) is not None:
        watch.asked = lambda: stop.number or 0
    with start.failing(), contextlib.nullcontext() if peers.first() else start.no_stdout():
        for process, other in enumerate(peers.gather(command, "the command")):
            if other != command:
                raise ConfigError(
                    f"all processes of a run need the same command, and it is `{command}` in process {peers.index()} "
                    f"and `{other}` in process {process}"
                )
        yield


def shown_as(fields: dict[str, Any]) -> dict[str, bool]:
    """Removes ``quiet`` and ``verbose`` from ``fields``, and returns them.

    Raises:
      ConfigError: they contradict each other, or ``fields`` ask for what only ``train`` does.
    """
    if "plan_memory" in fields:
        raise ConfigError("--plan-memory is of train: `jaxrl-dist train ... --plan-memory here` says what a run takes")
    output = {name: fields.pop(name, False) for name in ("quiet", "verbose")}
    fields.pop("resume_or_start", None)
    if all(output.values()):
        raise ConfigError("--verbose contradicts --quiet")
    return output


def _train(run: Asked, stop: signals.Stop, *, again: bool, quiet: bool, verbose: bool) -> None:
    """Trains as the command line asks; ``again``: resumes the run if it has saved a checkpoint."""
    trackers.check_asked(bool(run.fields.get("wandb")), run.fields.keys() - {*run.stored})
    config, source = run.resolved()

    from jaxrl_dist.run import files
    from jaxrl_dist.run.console import one_line_warnings
    from jaxrl_dist.training import setup

    if config.run_dir is None:
        run_dir = files.default_run_dir(run.fields["env"], run.name, config.seed)
        config = dataclasses.replace(config, run_dir=run_dir)
    with one_line_warnings(quiet):
        try:
            prepared = _resumed_or_started(config) if again else None
        except FinishedError as error:
            if not quiet and peers.first():
                print(error.with_flags)
            return
        show(run.name, prepared or setup.prepare(config, source), stop, quiet=quiet, verbose=verbose)


def _resumed_or_started(config: Train[Any]) -> Run | PopulationRun | None:
    """Prepares to resume the run in a config's directory; without a checkpoint, deletes its files and returns None.

    Raises:
      ConfigError: the run there has other flags, or another process uses it.
      FinishedError: it is finished, or trained without a checkpoint to go on from: a full disk or a kill may end a run
        between its trained variables and its last checkpoint.
    """
    from jaxrl_dist.run import checkpoint, files
    from jaxrl_dist.training import resuming

    path = pathlib.Path(str(config.run_dir))
    folders = [path, *files.members_of(path)]
    if peers.told(any(map(checkpoint.saved, folders)), "whether a checkpoint is there"):
        return resuming.prepare_resume(config, path, {})
    if peers.told(any(map(checkpoint.trained, folders)), "whether the run is trained"):
        raise FinishedError(f"{path} is trained, but has no checkpoint to go on from; jaxrl-dist evaluate {path} works")
    if peers.first():
        files.abandon(path)
    return None


def show(name: str, run: Run | PopulationRun, stop: signals.Stop, *, quiet: bool, verbose: bool) -> None:
    """Executes a run, or a population, and shows its progress; ``name`` is the algorithm's display name.

    Raises:
      Interrupted: a signal ended the run.
    """
    from jaxrl_dist.run.console import Display, played
    from jaxrl_dist.training.population import PopulationRun
    from jaxrl_dist.training.results import table

    if stop():  # the signal arrived before the run began
        raise stop.interrupted()
    quiet = quiet or not peers.first()
    stop.last_words = partial(_goes_on, run)
    if (watch := start.watch()) is not None:
        watch.advice = stop.last_words
    if not quiet:
        stop.notice = (
            "stopping after this update, which is saved; once more, 1 s from now or later, ends the run at once"
        )
    config = run.config
    display = Display(config.evaluation_episodes, quiet=quiet, verbose=verbose)
    reports = run.stopped_by(stop).reports(display.evaluating)
    begun = f", from {run.env_steps:,} env steps on" if run.env_steps else ""
    display.print(f"{run.describe(name)}\nwriting {config.run_dir}{begun}")
    try:
        for report in display.watch(reports, run.total_env_steps):
            last = report
    except OSError as error:
        if not stop() or error.errno != errno.EIO or error.filename:
            raise
        raise stop.interrupted() from None  # SIGHUP: the terminal has closed, and the run is saved
    stop.number = max(peers.gather(stop.number or 0, "signals")) or None
    if stop():
        run_dir = shlex.quote(str(config.run_dir))
        if last.ended_by is None:
            raise stop.interrupted(f"interrupted; `{run.resume_command()}` goes on from {last.env_steps} env steps")
        if config.evaluation_episodes and not last.evaluation:
            raise stop.interrupted(f"interrupted; it is trained and saved, and `jaxrl-dist evaluate {run_dir}` works")
    seconds, compiling = last.wall_time_s, last.metrics["time/compile_s"] or 0.0
    rate = last.env_steps / max(seconds - compiling, 1e-9)
    agents = "" if last.agent_steps is None else f" ({last.agent_steps:,} agent steps)"
    display.print(
        f"{last.env_steps:,} env steps{agents} in {seconds - compiling:.1f} s ({rate:,.0f} a second), "
        f"after {compiling:.1f} s of setting up and compiling"
    )
    if last.ended_by == "stop_at_return":
        display.print(f"ended early, by --stop-at-return {config.stop_at_return:g}")
    if last.evaluation:
        display.print(played(last.evaluation))
    if isinstance(run, PopulationRun):
        display.print(table(run.rows, config.evaluation_policy))


def _goes_on(run: Run | PopulationRun) -> str:
    """Says where a run goes on whose process ends at once."""
    from jaxrl_dist.run import checkpoint, files

    path, newest = pathlib.Path(str(run.config.run_dir)), list[int]()

    def look() -> None:
        for folder in (path, *files.members_of(path)):
            newest.extend(map(checkpoint.number_of, checkpoint.saved(folder)[:1]))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(1.0)  # its disk may hang, and must not keep the process
    if newest:
        return f"nothing after {max(newest)} env steps is saved, and `{run.resume_command()}` goes on from there"
    return "" if thread.is_alive() else "the run has saved no checkpoint"
