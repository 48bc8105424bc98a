"""``jaxrl-dist sweep``: trains the members of a population as processes, several at a time."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import check_range, counted, flag
from jaxrl_dist.commands import flags
from jaxrl_dist.commands.train import asked, shown_as
from jaxrl_dist.config import CONFIG_FILE, Train, split_env
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts.config import NAMES as LAUNCH
from jaxrl_dist.run import directories, processes, signals, text
from jaxrl_dist.run import files as run_files

if TYPE_CHECKING:
    from jaxrl_dist.training.results import Row

HELP = """\
usage: jaxrl-dist sweep ALGO --env ID [--seeds N] [--vary NAME=A,B,C ...] [--jobs K] [FLAGS]

Trains the members that --seeds and --vary ask for, each in a process, --jobs of them at a time (default: 2). That
suits plans whose actors are threads; under --plan on_device `jaxrl-dist train` trains all members in one program,
which is faster. The same command with the same --run-dir continues a sweep that was stopped.

`jaxrl-dist train ALGO --help` explains the other flags.
"""
_OURS = (*LAUNCH, "seeds", "seed", "vary", "zip", "run_dir", "quiet", "evolve", "evolve_interval", "average_every")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The flags that only ``sweep`` has."""

    jobs: int = 2


def run(args: Sequence[str]) -> int:
    """Runs ``sweep ALGO --env ID [FLAGS]``."""
    if not args or any(arg in ("-h", "--help", "--help-all") for arg in args):
        print(HELP, end="")
        return 0
    jobs, args = flags.taken(args, "--jobs")
    if jobs is not None and not jobs.isdecimal():
        raise ConfigError(f"--jobs must be a whole number, not {jobs}")
    sweep = Sweep(int(jobs or Sweep.jobs))
    check_range(sweep, "jobs", low=1, high=1000)
    found = asked(args)
    assert found is not None, "help is answered above"
    if "plan_memory" in found.fields:
        raise ConfigError(
            "--plan-memory is of train: `jaxrl-dist train ... --plan-memory here` says what one member takes"
        )
    output = shown_as(found.fields)
    if output["verbose"]:
        raise ConfigError("--verbose is of train: a sweep prints one line for each member")
    with signals.stopping() as stop:
        config, source = found.resolved()

        from jaxrl_dist.training.members import is_population, members
        from jaxrl_dist.training.results import Row, table, write_results
        from jaxrl_dist.training.stored import to_json

        if not is_population(config) or config.evolve is not None:
            raise ConfigError("a sweep needs members, by --seeds or --vary, which are not selected by --evolve")
        if config.run_dir is None:
            run_dir = run_files.default_run_dir(found.fields["env"], found.name, config.seed)
            config = dataclasses.replace(config, run_dir=run_dir)
        path, population = pathlib.Path(str(config.run_dir)), members(config)
        _claim(path, to_json(config, source.spec))
        rows = [Row(f"{number:03d}", member.config.seed, member.values) for number, member in enumerate(population)]
        commands = [_command(args, config, member.config, member.values) for member in population]

        def ended(number: int) -> None:
            rows[number] = _row(rows[number], path / run_files.MEMBERS)
            write_results(path, rows)
            done = sum(row.status == "done" for row in rows)
            if not output["quiet"]:
                print(
                    f"member {rows[number].member}: return {rows[number].score}, {done} of {len(rows)} done", flush=True
                )

        if not output["quiet"]:
            print(f"{counted(len(rows), 'member')}, {sweep.jobs} at a time, in {path}", flush=True)
        logs = [path / run_files.MEMBERS / f"{row.member}.log" for row in rows]
        logs[0].parent.mkdir(exist_ok=True)
        try:
            processes.run_all(commands, logs, sweep.jobs, stop, ended)
        except processes.RefusedError as error:
            raise ConfigError(str(error)) from None
        if stop():
            raise stop.interrupted(f"interrupted; the same command with --run-dir {path} goes on")
        if not output["quiet"]:
            print(table(rows))
    return 0


def _claim(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Makes the directory of a new sweep, or checks that an existing one holds this sweep.

    Raises:
      ConfigError: it holds another run.
    """
    config = json.loads(json.dumps(config))
    if (path / CONFIG_FILE).exists():
        there = text.read_json(path / CONFIG_FILE)
        if {name: there.get(name) for name in config} != config:
            raise ConfigError(f"--run-dir {path} holds a run with other flags; name another directory")
        return
    run_files.claim(str(path))
    text.write_json(path / CONFIG_FILE, {**config, "versions": run_files.versions()})


def _command(
    args: Sequence[str], config: Train[Any], member: Train[Any], values: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """Returns a function that builds the command to train a member, or to resume it if it has a checkpoint."""
    algorithm = "" if args[0].startswith("-") else args[0]  # --config or --policy may name it instead
    kept, skipping = [], False
    for arg in args:
        if arg.startswith("--"):
            name = arg.split("=", 1)[0].replace("_", "-")
            skipping = name.replace("--no-", "--", 1) in [flag(ours) for ours in _OURS]
        if not skipping:
            kept.append(arg)
    run_dir = pathlib.Path(str(member.run_dir))
    own = ["--processes", "1", "--seed", str(member.seed), "--run-dir", str(run_dir), "--quiet"]
    for name, value in values.items():
        own += (
            [flag(name) if value else "--no-" + flag(name)[2:]] if isinstance(value, bool) else [flag(name), str(value)]
        )

    def command() -> list[str]:
        words = [sys.executable, "-m", "jaxrl_dist.cli"]
        if any((run_dir / run_files.CHECKPOINTS).glob("[0-9]*")):
            code = ["--algorithm", algorithm] if algorithm.endswith(".py") else []
            code += ["--env", str(config.env)] if split_env(str(config.env))[1] else []
            return [*words, "resume", str(run_dir), "--processes", "1", "--quiet", *code]
        directories.remove(run_dir)  # it holds only reports of progress that is lost
        return [*words, "train", *kept, *own]

    return command


def _row(row: Row, folder: pathlib.Path) -> Row:
    """Returns the row of a member that is done, from its run's files."""
    summary = text.read_json(folder / row.member / run_files.SUMMARY)
    lines = (folder / row.member / run_files.METRICS).read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    returns = [report["episode/return"] for report in reports if report["episode/return"] is not None]
    evaluation = (summary["evaluation"] or {}).get("return_mean")
    return dataclasses.replace(
        row,
        status="done",
        env_steps=summary["env_steps"],
        iteration=reports[-1]["iteration"],
        episode_return=returns[-1] if returns else None,
        evaluation_return=evaluation,
    )
