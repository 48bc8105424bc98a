"""``jaxrl-dist profile``: shows where the time of a run goes."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_dist.checks import counted
from jaxrl_dist.commands import flags, request
from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.run.atomic_files import replacing
from jaxrl_dist.run.directories import check_run_dir

if TYPE_CHECKING:
    from jaxrl_dist.profiling.timing import Profile

HELP = """\
usage: jaxrl-dist profile ALGO --env ID [FLAGS]
       jaxrl-dist profile RUN_DIR [FLAGS]

Times a run, then each of its stages separately: environment, policy, replay, postprocess, gradient, optimizer. FLAGS
are those of `jaxrl-dist train`, and:

  --seconds S        seconds for the run, and again for the stages (default 10), without compiling
  --json FILE        write the numbers as JSON
  --picture FILE     draw them, as .png, .svg or .pdf
  --trace FILE       write every operation of one pass of each stage, as .json.gz for ui.perfetto.dev

No run directory is written.
"""
BAR = 32
"""Width of the bar of a whole iteration, in characters."""
LAYERS = 5
"""Maximum number of layers that are printed for a stage; JSON has all."""


def run(args: Sequence[str]) -> int:
    """Runs ``profile ALGO --env ID [FLAGS]`` or ``profile RUN_DIR [FLAGS]``."""
    if flags.wants_help(args):
        print(HELP, end="")
        return 0
    if not args:
        raise ConfigError("which run? Such as: jaxrl-dist profile ppo --env CartPole-v1")
    wanted, args = flags.taken(args, "--seconds")
    files = {}
    for name in ("--json", "--picture", "--trace"):
        files[name], args = flags.taken(args, name)
    seconds = _seconds(wanted)
    for name, file in files.items():
        if file is not None and not pathlib.Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{name} {file}: there is no directory {pathlib.Path(file).parent}")
    if files["--picture"] is not None and pathlib.Path(files["--picture"]).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {files['--picture']} needs the extension .png, .svg or .pdf")
    trace = None if files["--trace"] is None else pathlib.Path(files["--trace"])
    if trace is not None and not trace.name.endswith(".json.gz"):
        raise ConfigError(f"--trace {trace} needs the extension .json.gz")
    if args and pathlib.Path(args[0]).is_dir():
        check_run_dir(pathlib.Path(args[0]))
        args = ["--config", str(pathlib.Path(args[0], CONFIG_FILE)), *args[1:]]
    asked = request.parse(args)
    assert asked is not None, "help has been printed"
    request.output_flags(asked.fields)
    config, source = asked.resolved()

    from jaxrl_dist.profiling import timing
    from jaxrl_dist.run.console import one_line_warnings

    with one_line_warnings():
        found = timing.profile(config, source, seconds, trace)
    print(visible("\n".join(lines(found))))
    if (file := files["--json"]) is not None:
        with replacing(pathlib.Path(file)) as partial:
            partial.write_text(json.dumps(timing.to_json(found), indent=2) + "\n", encoding="utf-8")
        print(f"wrote {file}")
    if (file := files["--picture"]) is not None:
        _draw(found, pathlib.Path(file))
        print(f"wrote {file}")
    if trace is not None:
        print(f"wrote {trace}; ui.perfetto.dev opens it")
    return 0


def _seconds(text: str | None) -> float:
    """Converts the value of ``--seconds``.

    Raises:
      ConfigError: it is not a positive number.
    """
    try:
        seconds = 10.0 if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise ConfigError(f"--seconds {text} is no number of seconds above 0")
    return seconds


def lines(found: Profile) -> list[str]:
    """Formats a profile for reading."""
    from jaxrl_dist.profiling import timing

    run, whole = found.run, found.iteration_seconds
    shown = [
        f"{run['algorithm']} on {run['env']} under {run['plan']}, {counted(run['num_envs'], 'environment')} x "
        f"{counted(run['rollout_length'], 'step')} an iteration, on {run['devices']} x {run['kind']}",
        f"{found.env_steps_per_second:,.0f} env steps a second, {whole * 1e3:.3g} ms an iteration",
    ]
    for thread, stages in found.threads.items():
        shown += ["", f"{thread:<24}{'ms':>10}{'share':>8}"]
        for stage, seconds in stages.items():
            share = seconds / whole
            bar = f"{'#' * round(BAR * max(share, 0)):<{BAR}}"
            shown.append(f"  {stage:<22}{seconds * 1e3:>10.3g}{share:>8.1%}  {bar}{_reached(found, stage)}".rstrip())
            layers = found.layers.get(stage, {})
            if len(layers) > 1:
                largest = [f"{layer} {part:.0%}" for layer, part in layers.items()][:LAYERS]
                shown.append(f"    products: {', '.join(largest)}{', ...' * (len(layers) > LAYERS)}")
    _, _, share, advice = timing.bound(found)
    return [*shown, "", f"{share:.0%} of the time: {advice}"]


def _reached(found: Profile, stage: str) -> str:
    """Returns a stage's shares of the peaks of matrix products and of memory, where it does not surpass them.

    A stage whose arrays stay in caches is faster than memory, and then its peak is not known.
    """
    peaks = {"matrix products": (found.matmul_rates, found.matmul_ceiling)}
    peaks["memory"] = found.memory_rates, found.memory_ceiling
    shares = {what: rates.get(stage, math.inf) / ceiling for what, (rates, ceiling) in peaks.items()}
    return "  " + ", ".join(f"{share:.0%} of the peak of {what}" for what, share in shares.items() if share <= 1)


def _draw(found: Profile, out: pathlib.Path) -> None:
    """Draws a bar for each thread, divided into its stages."""
    from jaxrl_dist.commands.plot import drawing

    names = list(dict.fromkeys(stage for stages in found.threads.values() for stage in stages))
    colors = dict(zip(names, drawing.styles(names).values(), strict=True))
    figure, (ax,) = drawing.figure("two", 1, height=0.9 + 0.5 * len(found.threads))
    labelled = set[str]()  # several threads may have a stage, which the legend names once
    for y, stages in enumerate(found.threads.values()):
        left = 0.0
        for stage, seconds in stages.items():
            label = None if stage in labelled else stage
            labelled.add(stage)
            ax.barh(y, max(seconds, 0.0) * 1e3, left=left, color=colors[stage]["color"], label=label)
            left += max(seconds, 0.0) * 1e3
    ax.set_yticks(range(len(found.threads)), list(found.threads))
    ax.invert_yaxis()
    ax.set_xlabel("ms of an iteration")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    drawing.save(figure, out)
