"""The command ``jaxrl-dist``: trains, resumes, evaluates, films, plots, lists, and checks environments and machines."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxrl_dist.checks import check_range, did_you_mean, flag
from jaxrl_dist.config import PLANS, RESUMABLE, Train, split_env
from jaxrl_dist.errors import (
    CheckpointError,
    ConfigError,
    ConfigWarning,
    DivergedError,
    EnvError,
    EnvWarning,
    FileWarning,
)
from jaxrl_dist.run import signals
from jaxrl_dist.run.signals import Interrupted

if TYPE_CHECKING:
    from jaxrl_dist.play.policy import Policy
    from jaxrl_dist.training.run import Run

HELP = """\
usage: jaxrl-dist COMMAND ...

  train ALGO --env ID [FLAGS]        train; `jaxrl-dist train ALGO --help` lists the flags
  train FILE.py --env ID [FLAGS]     train by an algorithm of your own: docs/adding-an-algorithm.md
  train --config FILE [FLAGS]        train again as a run's config.json says, but for the flags given
  resume RUN_DIR [FLAGS]             go on with a run; --total-env-steps N with one that is finished
  evaluate RUN_DIR [FLAGS]           play greedy episodes with a trained policy
  video RUN_DIR FILE.gif [FLAGS]     play some and film them
  plot RUN_DIR ... -o FILE           draw learning curves, over the seeds of each configuration
  check-env ENV [FLAGS]              say what is wrong with an environment of your own
  doctor                             say whether this machine can train, on what, and what is missing
  list algorithms|envs|plans         what there is
  --version                          which jaxrl-dist this is

algorithms: {algorithms}

  jaxrl-dist train ppo --env CartPole-v1 --total-env-steps 150000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: done; 1: it failed on the way, such as by a full disk, or ``check-env`` or ``doctor`` has found faults; 2: the
    input cannot be run; 130: Ctrl-C; 143: SIGTERM. Failures come with one line on stderr, which the traceback of an
    environment that failed precedes.
    """
    code = 0
    try:
        try:
            _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as stop:  # after --help, and of check-env and doctor
            code = int(stop.code or 0)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(str(error), 2)
    except Interrupted as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has enough, as `head` does
        from jaxrl_dist.run.console import discard_output

        discard_output()
        return 1
    except (OSError, EnvError, DivergedError, CheckpointError) as error:
        for note in getattr(error, "__notes__", ()):  # an environment's traceback tells its author more than our line
            print(note, file=sys.stderr)
        if isinstance(error, OSError) and error.filename:
            return _fail(f"{error.filename}: {error.strerror}", 1)
        return _fail(str(error), 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's name for it
            raise
        return _fail(f"out of memory; fewer --num-envs or a shorter --rollout-length need less ({error})", 1)


def _fail(message: str, code: int) -> int:
    print(f"jaxrl-dist: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _run(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return
    commands = {
        "train": train_command,
        "resume": resume_command,
        "evaluate": evaluate_command,
        "video": video_command,
        "plot": plot_command,
        "check-env": check_env_command,
        "doctor": doctor_command,
        "list": list_command,
    }
    if args[0] == "--version":
        print(f"jaxrl-dist {version()}")
    elif args[0] in commands:
        commands[args[0]](args[1:])
    else:
        near = did_you_mean(args[0], [*commands, "--version", "--help"])
        raise ConfigError(f"unknown command {args[0]!r}{near}; see: jaxrl-dist --help")


def help_text() -> str:
    """What ``jaxrl-dist --help`` prints."""
    from jaxrl_dist.algorithms import ALGORITHMS, PRESETS

    return HELP.format(algorithms=", ".join([*ALGORITHMS, *PRESETS]))


def version() -> str:
    """The version that is installed."""
    try:
        return importlib.metadata.version("jaxrl-dist")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its source tree)"


def train_command(args: Sequence[str]) -> None:
    """``train ALGO --env ID [FLAGS]``; ``ALGO`` is a name or a file."""
    from jaxrl_dist import flags
    from jaxrl_dist.algorithms import from_file

    algorithm: Any = args[0] if args and not args[0].startswith("-") else None
    args = list(args[1:] if algorithm else args)
    own = from_file(algorithm) if algorithm is not None and algorithm.endswith(".py") else None
    name, algorithm = (own.__name__, own) if own else (algorithm, algorithm)
    wants_help = any(arg in ("-h", "--help") for arg in args)
    layers = [args]
    config_file = flags.value_of(args, "--config")
    if config_file is not None and not wants_help:
        named, file_args = flags.config_flags(pathlib.Path(config_file), own, flags.value_of(args, "--env"))
        if name not in (None, named):
            raise ConfigError(f"{config_file} is of {named}, not of {name}; leave the algorithm's name out")
        name, algorithm, layers = named, own or named, [file_args, args]
    if algorithm is None:
        if wants_help:
            print(help_text(), end="")
            return
        raise ConfigError("which algorithm? Such as: jaxrl-dist train ppo --env CartPole-v1")
    if wants_help:
        flags.parse_train(["--help"], flags.plain_defaults(algorithm))

    def preset(config: Train[Any]) -> Train[Any]:
        from jaxrl_dist.plans import devices
        from jaxrl_dist.training import setup

        devices.reserve_memory(config.mem_fraction)
        source = setup.find_env(config)
        left_open: Train[Any] = Train(algorithm, config.env, config.env_options, atari_preset=config.atari_preset)
        return setup.resolve(left_open, source.spec)

    with signals.stopping() as stop:
        _find_modules(flags.value_of(args, "--env"))
        command = flags.resolve_flags(algorithm, layers, preset)
        _train(name, command.train(), stop, quiet=command.quiet)


def _find_modules(env: str | None) -> None:
    """Where ``--env`` names a module, the current directory is looked in first, as by ``python -m``."""
    if env is not None and split_env(env)[1]:
        sys.path.insert(0, os.getcwd())


def _train(name: str, config: Train[Any], stop: signals.Stop, *, quiet: bool) -> None:
    from jaxrl_dist.run import files
    from jaxrl_dist.training import setup

    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=files.default_run_dir(config.env, name, config.seed))
    with _warnings_of_one_line(quiet):
        _show(name, setup.prepare(config), stop, quiet=quiet)


def _show(name: str, run: Run, stop: signals.Stop, *, quiet: bool) -> None:
    """Runs and shows it."""
    from jaxrl_dist.run.console import Display

    if stop():  # before anything was begun
        raise stop.interrupted()
    if not quiet:
        stop.notice = "jaxrl-dist: stopping after this update, which is saved; once more ends the run at once"
    config = run.config
    display = Display(config.evaluation_episodes, quiet=quiet)
    reports = run._replace(job=run.job._replace(stop=stop)).reports(display.evaluating)
    begun = f", from {run.job.env_steps:,} env steps on" if run.job.resumed else ""
    display.print(f"{run.describe(name)}\nwriting {config.run_dir}{begun}")
    for report in display.watch(reports, config.total_env_steps):
        last = report
    if stop():
        run_dir = shlex.quote(str(config.run_dir))
        if last.env_steps < config.total_env_steps:
            raise stop.interrupted(
                f"interrupted; `jaxrl-dist resume {run_dir}` goes on from {last.env_steps} env steps"
            )
        if config.evaluation_episodes and not last.evaluation:
            raise stop.interrupted(f"interrupted; it is trained and saved, and `jaxrl-dist evaluate {run_dir}` works")
    seconds, compiling = last.wall_time_s, last.metrics["time/compile_s"] or 0.0
    rate = last.env_steps / max(seconds - compiling, 1e-9)
    display.print(
        f"{last.env_steps:,} env steps in {seconds - compiling:.1f} s ({rate:,.0f} a second), "
        f"after {compiling:.1f} s of setting up and compiling"
    )
    if last.evaluation:
        display.print(_played(last.evaluation))


RESUME_HELP = """\
usage: jaxrl-dist resume RUN_DIR [FLAGS]

Goes on with a run from the newest of its checkpoints that is whole. What no file may name is to be named again: by
--env an environment of the form my_module:make, by --algorithm the file of an algorithm of your own. These may change;
`jaxrl-dist train ALGO --help` explains them:

  {flags}
"""


def resume_command(args: Sequence[str]) -> None:
    """``resume RUN_DIR [FLAGS]``."""
    from jaxrl_dist import flags
    from jaxrl_dist.algorithms import from_file
    from jaxrl_dist.training import resuming, stored

    allowed = (*RESUMABLE, "env", "quiet")
    if any(arg in ("-h", "--help") for arg in args):
        print(RESUME_HELP.format(flags=" ".join(map(flag, allowed))), end="")
        return
    if not args or args[0].startswith("-"):
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist resume runs/NAME")
    run_dir, env = pathlib.Path(args[0]), flags.value_of(args, "--env")
    file, args = flags.taken(args[1:], "--algorithm")
    own = from_file(file) if file else None
    algorithm, file_args = flags.config_flags(run_dir, own, env)
    before = flags.parse_train(file_args, flags.plain_defaults(algorithm, own))
    given = flags.parse_train(args, before)
    given.validate()
    was, now = ({**vars(command), **vars(command.algorithm), "algorithm": None} for command in (before, given))
    changes = {name: value for name, value in now.items() if value != was[name]}
    for name in changes:
        if name not in allowed:
            raise ConfigError(f"{flag(name)} cannot change where a run is resumed; see: jaxrl-dist resume --help")
    changes = {name: value for name, value in changes.items() if name in RESUMABLE}
    with signals.stopping() as stop, _warnings_of_one_line(given.quiet):
        _find_modules(env)
        run = resuming.prepare_resume(stored.stored_config(run_dir, own, env), run_dir, changes)
        _show(algorithm, run, stop, quiet=given.quiet)


@contextlib.contextmanager
def _warnings_of_one_line(quiet: bool) -> Iterator[None]:
    """Shows our own warnings as we show errors; those of others stay as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def one_line(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, ConfigWarning | EnvWarning | FileWarning):
                show(message, category, *where, **more)
            elif not quiet:
                print(f"jaxrl-dist: warning: {message}", file=sys.stderr)

        for kind in (ConfigWarning, EnvWarning, FileWarning):
            warnings.simplefilter("always", kind)
        warnings.showwarning = one_line
        yield


def _played(evaluation: Mapping[str, float | int]) -> str:
    cut = f", {evaluation['cut']} of them cut before they had ended" if evaluation["cut"] else ""
    return (
        f"return {evaluation['return_mean']:.4g} +- {evaluation['return_std']:.4g} "
        f"(mean and standard deviation of {evaluation['episodes']} greedy episodes{cut})"
    )


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Plays greedy episodes with the policy that a run has trained, or has so far."""

    run_dir: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]] = ""
    """Directory of the run, such as runs/NAME."""
    episodes: int = 100
    """Number of episodes to play."""
    seed: int = 0
    """Seed of the environments."""
    env: str | None = None
    """Environment to play instead of the run's; to be named again if it is of the form my_module:make."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment, instead of the run's."""
    algorithm: str | None = None
    """File of the algorithm, if the run is of one of your own."""
    max_steps: int | None = None
    """Env steps after which an episode is cut; None: 27,000, or the environment's own limit if longer."""


def _asked_policy(asked: Evaluate) -> Policy:
    """The policy of a run that is to play."""
    from jaxrl_dist import flags
    from jaxrl_dist.algorithms import from_file

    check_range(asked, "seed", low=0, high=2**31 - 1)
    check_range(asked, "max_steps", low=1, high=10**9)
    own = from_file(asked.algorithm) if asked.algorithm else None
    flags.config_flags(pathlib.Path(asked.run_dir), own, asked.env)  # refuses what is no run before JAX is imported
    _find_modules(asked.env)

    from jaxrl_dist.play.policy import load_policy

    return load_policy(asked.run_dir, own, env=asked.env, env_options=asked.env_options or None)


_EVALUATE_FLAGS = ("episodes", "seed", "env", "env_options", "algorithm", "max_steps")


def evaluate_command(args: Sequence[str]) -> None:
    """``evaluate RUN_DIR [FLAGS]``."""
    from jaxrl_dist import flags

    flags.check_flags(args, _EVALUATE_FLAGS)
    asked = flags.run_tyro(Evaluate, args, prog="jaxrl-dist evaluate")
    if not asked.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist evaluate runs/NAME")
    check_range(asked, "episodes", low=1, high=10**6)
    policy = _asked_policy(asked)

    from jaxrl_dist.run.console import Display

    display = Display(asked.episodes)
    with display.live:
        played = policy.evaluate(asked.episodes, asked.seed, max_steps=asked.max_steps, progress=display.evaluating)
    display.console.print(_played(played.summary()))


@dataclasses.dataclass(frozen=True)
class Video(Evaluate):
    """Films greedy episodes, the first that ``evaluate`` with the same seed plays, as an animated GIF."""

    out: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FILE.gif")]] = ""
    """The file to write."""
    episodes: int = 1
    """Number of episodes to play, one after the other."""
    fps: int = 30
    """Pictures a second, one for each step."""
    max_steps: int | None = 1000
    """Env steps after which an episode is cut; None: as in evaluate."""


def video_command(args: Sequence[str]) -> None:
    """``video RUN_DIR FILE.gif [FLAGS]``."""
    from jaxrl_dist import flags

    flags.check_flags(args, (*_EVALUATE_FLAGS, "fps"))
    asked = flags.run_tyro(Video, args, prog="jaxrl-dist video")
    if not asked.run_dir or not asked.out:
        raise ConfigError("which run, and which file? As in: jaxrl-dist video runs/NAME episode.gif")
    check_range(asked, "episodes", low=1, high=100)
    check_range(asked, "fps", low=1, high=50)
    policy = _asked_policy(asked)

    from jaxrl_dist.play.video import record
    from jaxrl_dist.run.console import Display

    display = Display(asked.episodes)
    with display.live:
        how = asked.episodes, asked.seed, asked.fps, asked.max_steps
        played, pictures = record(policy, asked.out, *how, progress=display.evaluating)
    display.console.print(f"{_played(played.summary())}\nwrote {asked.out}: {pictures} pictures")


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draws learning curves of runs, over the seeds of each configuration."""

    run_dirs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN_DIR ...")]] = ()
    """Directories of runs; those that differ in their seed alone are put together."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "curves.png"
    """The picture to write, in the format of its ending: png, pdf, svg ..."""
    metric: str = "episode/return"
    """A metric of files.jsonl."""
    x: Literal["steps", "time"] = "steps"
    """What the horizontal axis shows: environment steps or seconds."""


def plot_command(args: Sequence[str]) -> None:
    """``plot RUN_DIR ... [-o FILE]``."""
    from jaxrl_dist import flags

    flags.check_flags(args, ("out", "metric", "x"))
    asked = flags.run_tyro(Plot, args, prog="jaxrl-dist plot")

    from jaxrl_dist.commands.plot import plot

    plot(asked.run_dirs, asked.out, metric=asked.metric, x=asked.x)
    print(f"wrote {asked.out}")


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Plays an environment at random and says what is wrong with it, a line for each fault."""

    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]] = ""
    """Environment such as my_module:make, a function or class of yours; see train's --env."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment."""
    env_timeout: float = 120.0
    """Seconds in which each of its calls must come back."""


def check_env_command(args: Sequence[str]) -> None:
    """``check-env ENV [FLAGS]``.

    Raises:
      SystemExit: with code 1, if there are faults.
    """
    from jaxrl_dist import flags

    flags.check_flags(args, ("env_options", "env_timeout"))
    asked = flags.run_tyro(CheckEnv, args, prog="jaxrl-dist check-env")
    if not asked.env:
        raise ConfigError("which environment? Such as: jaxrl-dist check-env my_module:make")
    check_range(asked, "env_timeout", above=0, high=10**6)
    _find_modules(asked.env)

    from jaxrl_dist.commands.check_env import check

    found = check(asked.env, asked.env_options, asked.env_timeout)
    for fault in found.faults:
        print(f"{asked.env}: {fault}")
    for note in found.notes:
        print(f"{asked.env}: note: {note}")
    if not found.faults:
        print(f"{asked.env}: no fault found in {found.steps} steps, {found.episodes} episodes")
    else:
        raise SystemExit(1)


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Says whether this machine can train, on which devices, with which libraries, and what is missing."""


def doctor_command(args: Sequence[str]) -> None:
    """``doctor``.

    Raises:
      SystemExit: with code 1, if nothing can be trained here.
    """
    from jaxrl_dist import flags

    flags.check_flags(args, ())
    flags.run_tyro(Doctor, args, prog="jaxrl-dist doctor")

    from jaxrl_dist.commands.doctor import examine

    answer = examine()
    width = max(len(name) for name, _ in answer.facts)
    for name, value in answer.facts:
        print(f"{name:{width}}  {value}")
    for note in answer.notes:
        print(f"note: {note}")
    for problem in answer.problems:
        print(f"problem: {problem}")
    if answer.problems:
        raise SystemExit(1)
    print("this machine can train")


def list_command(args: Sequence[str]) -> None:
    """``list algorithms|envs|plans``."""
    what = " ".join(args)
    kinds = ("algorithms", "envs", "plans")
    if what not in kinds:
        raise ConfigError(f"list what? {what!r} is none of {', '.join(kinds)}{did_you_mean(what, kinds)}")
    if what == "envs":
        from jaxrl_dist.envs.source import BACKENDS

        lines = [f"{name}:{env_id}" for name, backend in BACKENDS.items() for env_id in backend.ids()]
        lines.append("MODULE:NAME, such as my_module:make: what makes a gymnasium.Env or a gymnax-style one")
    elif what == "algorithms":
        from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class

        lines = [f"{name:9} {config_class(name).__doc__.splitlines()[0]}" for name in ALGORITHMS]
        lines += [f"{name:9} {algorithm}, --plan {fields['plan']}" for name, (algorithm, fields) in PRESETS.items()]
    else:
        lines = [f"{name:12} {text}" for name, text in PLANS.items()]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
