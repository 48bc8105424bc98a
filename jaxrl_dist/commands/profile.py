"""``jaxrl-dist profile``: shows where the time of a run goes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import counted
from jaxrl_dist.commands import flags, request
from jaxrl_dist.config.train import CONFIG_FILE, Train
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, say, visible
from jaxrl_dist.run.storage import check_place, check_run_dir, replacing

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource
    from jaxrl_dist.profiling.timing import Profile

BAR = 32
"""Width of the bar of a whole iteration, in characters."""
EXTENSIONS = {"json": ("",), "picture": (".png", ".svg", ".pdf"), "trace": (".json.gz",)}
"""What the names of files end with, by flag."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Times a run, then each of its stages separately: environment, policy, replay,
    postprocess, gradient, optimizer.

    RUN_DIR stands in the place of ALGO for a run to repeat. No run directory is written. FLAGS are
    those of `jaxrl-dist train`, and:
    """

    seconds: float = setting(10.0, above=0, high=10**6)
    """Seconds to time the run, until its next report, and again to time the stages; compiling does
    not count."""
    json: str | None = None
    """The file for the numbers, as JSON."""
    picture: str | None = None
    """The file for a picture of them: .png, .svg or .pdf."""
    trace: str | None = None
    """The file for every operation of one pass of each stage: .json.gz, for ui.perfetto.dev."""

    def validate(self) -> None:
        """Checks that the files can be written.

        Raises:
          ConfigError: a directory is missing, or an extension names another format.
        """
        for name, endings in EXTENSIONS.items():
            file = getattr(self, name)
            if file is None:
                continue
            if not file.endswith(endings):
                raise ConfigError(f"--{name} {file} needs the extension {' or '.join(endings)}")
            check_place(pathlib.Path(file))


def run(args: Sequence[str]) -> int:
    """Runs ``profile ALGO --env ID [FLAGS]`` or ``profile RUN_DIR [FLAGS]``."""
    output, config, source = parse(args)

    from jaxrl_dist.profiling import timing

    trace = None
    if output.trace is not None:
        trace = pathlib.Path(output.trace)
    profile = timing.profile(config, source, output.seconds, trace, say)
    print(visible("\n".join(lines(profile))))
    if output.json is not None:
        with replacing(pathlib.Path(output.json)) as partial:
            partial.write_text(json.dumps(profile._asdict(), indent=2) + "\n", encoding="utf-8")
        print(f"wrote {output.json}")
    if output.picture is not None:
        _draw(profile, pathlib.Path(output.picture))
        print(f"wrote {output.picture}")
    if trace is not None:
        print(f"wrote {trace}; ui.perfetto.dev opens it")
    return 0


def parse(args: Sequence[str]) -> tuple[Output, Train, EnvSource]:
    """Returns the files that the arguments ask for, and the run to time.

    Raises:
      ConfigError: an argument is wrong.
    """
    output, args = flags.split(Output, args, "jaxrl-dist profile ALGO --env ID")
    output.validate()
    if not args:
        raise ConfigError("which run? Such as: jaxrl-dist profile ppo --env CartPole-v1")
    if pathlib.Path(args[0]).is_dir():
        check_run_dir(pathlib.Path(args[0]))
        args = ["--config", str(pathlib.Path(args[0], CONFIG_FILE)), *args[1:]]
    train = request.parse(args)
    request.output_flags(train.fields)
    return output, *train.resolved()


def heading(run: Mapping[str, Any], relation: str) -> str:
    """Returns names and sizes of a run in words; ``relation``: to its devices."""
    envs = counted(run["num_envs"], "environment")
    steps = counted(run["rollout_length"], "step")
    return (
        f"{run['algorithm']} on {run['env']} under {run['plan']}, "
        f"{envs} x {steps} an iteration, {relation} {run['devices']} x {run['kind']}"
    )


def lines(profile: Profile) -> list[str]:
    """Formats a profile for reading."""
    whole = profile.iteration_seconds
    shown = [
        heading(profile.run, "on"),
        f"{profile.env_steps_per_second:,.0f} env steps a second, {whole * 1e3:.3g} ms an iteration",
    ]
    for thread, stages in profile.threads.items():
        shown += ["", f"{thread:<24}{'ms':>10}{'share':>8}"]
        for stage, seconds in stages.items():
            share = seconds / whole
            bar = "#" * round(BAR * max(share, 0))
            shown.append(f"  {stage:<22}{seconds * 1e3:>10.3g}{share:>8.1%}  {bar}".rstrip())
    if profile.busy:
        shown += [
            "",
            f"the machine is busy: the stages had a core for {profile.running:.0%} of their time; "
            "profile again when other programs are idle",
        ]
    return shown


def _draw(profile: Profile, out: pathlib.Path) -> None:
    """Draws a bar for each thread, divided into its stages."""
    from jaxrl_dist.commands.plot import drawing

    styles = drawing.styles([stage for stages in profile.threads.values() for stage in stages])
    figure, (ax,) = drawing.figure("two", 1, height=0.9 + 0.5 * len(profile.threads))
    labelled = set[str]()  # several threads may have a stage, which the legend names once
    for row, stages in enumerate(profile.threads.values()):
        left = 0.0
        for stage, seconds in stages.items():
            width = max(seconds, 0.0) * 1e3
            label = None if stage in labelled else stage
            labelled.add(stage)
            ax.barh(row, width, left=left, color=styles[stage]["color"], label=label)
            left += width
    ax.set_yticks(range(len(profile.threads)), list(profile.threads))
    ax.invert_yaxis()
    ax.set_xlabel("ms of an iteration")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    drawing.save(figure, out)
