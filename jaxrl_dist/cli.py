"""The command ``jaxrl-dist``: trains, evaluates and lists."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from jaxrl_dist.config import PLANS, ConfigError, Train, check_range, did_you_mean

HELP = """\
usage: jaxrl-dist COMMAND ...

  train ALGO --env ID [FLAGS]        train; `jaxrl-dist train ALGO --help` lists the flags
  train --config FILE [FLAGS]        train again as a run's config.json says, but for the flags given
  evaluate RUN_DIR [FLAGS]           play greedy episodes with a trained policy
  list algorithms|envs|plans         what there is

algorithms: {algorithms}

  jaxrl-dist train ppo --env CartPole-v1 --total-env-steps 150000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for input that cannot be run, 130 after Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(help_text(), end="")
            return 0
        command, rest = args[0], args[1:]
        commands = {"train": train_command, "evaluate": evaluate_command, "list": list_command}
        if command not in commands:
            raise ConfigError(f"unknown command {command!r}{did_you_mean(command, commands)}; see: jaxrl-dist --help")
        commands[command](rest)
    except ConfigError as error:
        print(f"jaxrl-dist: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxrl-dist: interrupted", file=sys.stderr)
        return 130
    return 0


def help_text() -> str:
    """What ``jaxrl-dist --help`` prints."""
    from jaxrl_dist.algorithms import ALGORITHMS

    return HELP.format(algorithms=", ".join(ALGORITHMS))


def train_command(args: Sequence[str]) -> None:
    """``train ALGO --env ID [FLAGS]``."""
    from jaxrl_dist import flags

    algorithm = args[0] if args and not args[0].startswith("-") else None
    args = list(args[1:] if algorithm else args)
    if algorithm is None and any(arg in ("-h", "--help") for arg in args):
        print(help_text(), end="")
        return
    args, quiet = _take_switch(args, "--quiet")
    args, config_file = _take_value(args, "--config")
    layers = [args]
    if config_file is not None:
        named, file_args = flags.config_flags(pathlib.Path(config_file))
        if algorithm not in (None, named):
            raise ConfigError(f"{config_file} is of {named}, not of {algorithm}; leave the algorithm's name out")
        algorithm, layers = named, [file_args, args]
    if algorithm is None:
        raise ConfigError("which algorithm? Such as: jaxrl-dist train ppo --env CartPole-v1")
    if any(arg in ("-h", "--help") for arg in args):
        flags.parse_train(["--help"], flags.plain_defaults(algorithm))

    def preset(config: Train[Any]) -> Train[Any]:
        from jaxrl_dist import training

        training.reserve_memory(config.mem_fraction)
        source = training.find_env(config)
        left_open: Train[Any] = Train(algorithm, config.env, config.env_options, config.atari_preset)
        return training.resolve(left_open, source.spec)

    config = flags.resolve_flags(algorithm, layers, preset)
    _train(config, quiet=quiet)


def _train(config: Train[Any], *, quiet: bool) -> None:
    from jaxrl_dist import algorithms, metrics, training
    from jaxrl_dist.console import Display

    if config.run_dir is None:
        name = algorithms.name_of(config.algorithm)
        config = dataclasses.replace(config, run_dir=metrics.default_run_dir(config.env, name, config.seed))
    run = training.prepare(config)
    display = Display(config.total_env_steps, quiet=quiet)
    reports = run.reports(display.evaluating)
    display.console.print(f"{run.describe()}\nwriting {config.run_dir}")
    for report in display.watch(reports):
        last = report
    seconds, compiling = last.wall_time_s, last.metrics["time/compile_s"] or 0.0
    rate = last.env_steps / max(seconds - compiling, 1e-9)
    display.console.print(
        f"{last.env_steps:,} env steps in {seconds - compiling:.1f} s ({rate:,.0f} a second), "
        f"after {compiling:.1f} s of setting up and compiling"
    )
    if last.evaluation:
        display.console.print(_played(last.evaluation))


def _played(evaluation: Mapping[str, float | int]) -> str:
    return (
        f"return {evaluation['return_mean']:.4g} +- {evaluation['return_std']:.4g} "
        f"(mean and standard deviation of {evaluation['episodes']} greedy episodes)"
    )


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Plays greedy episodes with the policy that a finished run has trained."""

    run_dir: tyro.conf.Positional[str]
    """Run directory."""
    episodes: int = 100
    """Number of episodes to play."""
    seed: int = 0
    """Seed of the environments."""


def evaluate_command(args: Sequence[str]) -> None:
    """``evaluate RUN_DIR [--episodes N] [--seed S]``."""
    from jaxrl_dist import flags

    flags.check_known(args, ("--episodes", "--seed"))
    asked = flags.run_tyro(Evaluate, args, prog="jaxrl-dist evaluate")
    check_range(asked, "episodes", low=1)
    check_range(asked, "seed", low=0, high=2**31 - 1)

    from jaxrl_dist.evaluate import evaluate
    from jaxrl_dist.policy import load_policy

    policy = load_policy(asked.run_dir)
    played = evaluate(policy.algorithm, policy.variables, policy.source, asked.episodes, asked.seed)
    print(_played(played.summary()))


def list_command(args: Sequence[str]) -> None:
    """``list algorithms|envs|plans``."""
    what = args[0] if len(args) == 1 else " ".join(args)
    kinds = ("algorithms", "envs", "plans")
    if what not in kinds:
        raise ConfigError(f"list what? {what!r} is none of {', '.join(kinds)}{did_you_mean(what, kinds)}")
    if what == "envs":
        from jaxrl_dist.envs import BACKENDS

        lines = [f"{name}:{env_id}" for name, backend in BACKENDS.items() for env_id in backend.ids()]
    elif what == "algorithms":
        from jaxrl_dist.algorithms import ALGORITHMS, config_class

        lines = [f"{name:6} {config_class(name).__doc__}" for name in ALGORITHMS]
    else:
        lines = [f"{name:12} {text}" for name, text in PLANS.items()]
    print("\n".join(lines))


def _take_switch(args: list[str], name: str) -> tuple[list[str], bool]:
    """Takes a switch out of the arguments."""
    return [arg for arg in args if arg != name], name in args


def _take_value(args: list[str], name: str) -> tuple[list[str], str | None]:
    """Takes a flag and its value, ``--flag value`` or ``--flag=value``, out of the arguments."""
    for i, arg in enumerate(args):
        if arg.startswith(name + "="):
            return args[:i] + args[i + 1 :], arg.split("=", 1)[1]
        if arg == name:
            if i + 1 == len(args):
                raise ConfigError(f"{name} needs a value")
            return args[:i] + args[i + 2 :], args[i + 1]
    return args, None


if __name__ == "__main__":
    sys.exit(main())
