"""``jaxrl-dist sweep``: trains the members of a population as processes, several at a time."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from jaxrl_dist.checks import check_range, counted, flag
from jaxrl_dist.commands import flags, request
from jaxrl_dist.config.launch import Processes
from jaxrl_dist.config.train import ALONE, CONFIG_FILE, Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import DIVERGED, ConfigError, say
from jaxrl_dist.run import atomic_files, machine, signals, subprocesses
from jaxrl_dist.run import files as run_files

if TYPE_CHECKING:
    from jaxrl_dist.settings.members import MemberConfig

HELP = """\
usage: jaxrl-dist sweep ALGO --env ID [--seeds N] [--vary NAME=A,B,C ...] [--jobs K] [FLAGS]

Trains the members that --seeds and --vary ask for, each in a process, --jobs of them at a time (default: 2). That
suits plans whose actors are threads; under --plan on_device `jaxrl-dist train` trains all members in one program,
which is faster. The same command with the same --run-dir continues a sweep that was stopped.

`jaxrl-dist train ALGO --help` explains the other flags.
"""
_OURS = (*marked(Processes), *ALONE, "seed", "run_dir", "quiet", "resume_or_start")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The flags that only ``sweep`` has."""

    jobs: int = 2


def run(args: Sequence[str]) -> int:
    """Runs ``sweep ALGO --env ID [FLAGS]``."""
    if not args or flags.wants_help(args):
        print(HELP, end="")
        return 0
    jobs, args = flags.taken(args, "--jobs")
    if jobs is not None and not jobs.isdecimal():
        raise ConfigError(f"--jobs must be a whole number, not {jobs}")
    sweep = Sweep(int(jobs or Sweep.jobs))
    check_range(sweep, "jobs", low=1, high=1000)
    found = request.parse(args)
    assert found is not None, "help is answered above"
    if "plan_memory" in found.fields:
        raise ConfigError(
            "--plan-memory is of train: `jaxrl-dist train ... --plan-memory here` says what one member takes"
        )
    output = request.output_flags(found.fields)
    if output["verbose"]:
        raise ConfigError("--verbose is of train: a sweep prints one line for each member")
    with signals.stopping() as stop:
        config, source = found.resolved()

        from jaxrl_dist.settings.members import is_population, members
        from jaxrl_dist.settings.stored import to_json
        from jaxrl_dist.training.results import Row, refill, score_name, scored, table, write_results

        if not is_population(config) or config.evolve is not None:
            raise ConfigError("a sweep needs members, by --seeds or --vary, which are not selected by --evolve")
        if config.average_every is not None:
            raise ConfigError("--average-every is of train: the members of a sweep do not communicate")
        if config.run_dir is None:
            run_dir = run_files.default_run_dir(found.fields["env"], found.name, config.seed)
            config = dataclasses.replace(config, run_dir=run_dir)
        path, population = pathlib.Path(str(config.run_dir)), members(config)
        rows = [Row(f"{number:03d}", member.config.seed, member.values) for number, member in enumerate(population)]
        commands = [_command(args, config, member) for member in population]
        logs = [path / run_files.MEMBERS / f"{row.member}.log" for row in rows]

        def ended(number: int, status: str = "done") -> None:
            row = rows[number]
            row.status, last = status, refill(row, path / run_files.MEMBERS / row.member)
            if last is not None:
                row.env_steps, row.iteration = last.env_steps, last.iteration
            write_results(path, rows)
            done = sum(row.status == "done" for row in rows)
            if not output["quiet"]:
                field, (score,) = scored([row])
                shown = status if score is None else f"{score_name(field, config.evaluation_policy)} {score:.6g}"
                print(f"member {row.member}: {shown}, {done} of {len(rows)} done", flush=True)

        def failed(number: int, why: str) -> None:
            status = "diverged" if why.startswith(DIVERGED) else "failed"
            what = f"member {rows[number].member} has {status}, the others go on"
            print(f"jaxrl-dist: {what}: {why}; see {logs[number]}", file=sys.stderr)
            ended(number, status)

        with _claimed(path, to_json(config, source.spec)):
            if not output["quiet"]:
                print(f"{counted(len(rows), 'member')}, {sweep.jobs} at a time, in {path}", flush=True)
            logs[0].parent.mkdir(exist_ok=True)
            for log in logs:
                _wait_for(log.with_suffix(""), stop)
            try:
                subprocesses.run_all(commands, logs, sweep.jobs, stop, ended, failed)
            except subprocesses.RefusedError as error:
                raise ConfigError(str(error)) from None
        if stop():
            raise stop.interrupted(f"interrupted; the same command with --run-dir {path} goes on")
        if not output["quiet"]:
            print(table(rows, config.evaluation_policy))
    return int(any(row.status in ("diverged", "failed") for row in rows))


def _claimed(path: pathlib.Path, config: Mapping[str, Any]) -> IO[bytes]:
    """Makes the directory of a new sweep, or checks that an existing one holds this sweep.

    Returns an open file, which locks the sweep against other processes.

    Raises:
      ConfigError: it holds another run, or another process is at it.
    """
    config = json.loads(json.dumps(config))
    if (path / CONFIG_FILE).exists():
        # An older version stored no clock; members with several agents then refuse to go on.
        there = {"clock": config["clock"], **atomic_files.read_json(path / CONFIG_FILE)}
        if {name: there.get(name) for name in config} != config:
            raise ConfigError(f"--run-dir {path} holds a run with other flags; name another directory")
        return run_files.lock(str(path))
    run_files.claim(str(path))
    with run_files.freeing(path):
        atomic_files.write_json(path / CONFIG_FILE, {**config, "versions": machine.versions()})
        return run_files.lock(str(path))


def _wait_for(member: pathlib.Path, stop: Callable[[], bool]) -> None:
    """Waits while another process is at a member: if a sweep is killed, its members save what they have learnt."""
    deadline, said = time.monotonic() + subprocesses.GRACE_SECONDS, False
    while (member / run_files.METRICS).exists() and not stop() and time.monotonic() < deadline:
        try:
            run_files.lock(str(member)).close()
            return
        except ConfigError as error:
            if not said:
                say(f"{error.with_flags}: waiting until it has ended, for at most {subprocesses.GRACE_SECONDS:g} s")
            said = True
            time.sleep(0.2)


def _command(args: Sequence[str], config: Train[Any], member: MemberConfig) -> list[str]:
    """Returns the command that trains a member, goes on with it, or leaves it as it is if it has ended.

    Args:
      config: the population's.
    """
    own, values = member.config, member.values
    wanted = {**vars(config.algorithm), **values}
    unused = [name for name, value in vars(own.algorithm).items() if value != wanted[name]]  # in this member
    others, kept, skipping = [flag(name) for name in (*_OURS, *unused)], list[str](), False
    for arg in args:
        if arg.startswith("--"):
            name = arg.split("=", 1)[0].replace("_", "-")
            skipping = name.replace("--no-", "--", 1) in others
        if not skipping:
            kept.append(arg)
    ours = {"processes": 1, "seed": own.seed, "run_dir": own.run_dir, "quiet": True, **ALONE}  # --config may vary some
    for name, value in {**ours, **values}.items():
        if name not in unused:
            kept += flags.written(name, value)
    return [sys.executable, "-P", "-m", "jaxrl_dist.cli", "train", *kept, "--resume-or-start"]
