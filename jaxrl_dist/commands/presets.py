"""``jaxrl-dist presets``: shows the flags that a run of an algorithm on an environment would
use.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, presets, published
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.named import data_of
from jaxrl_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Presets:
    """Shows what a run of an algorithm on an environment would use:
    all flags that differ from the defaults.
    """

    algorithm: Annotated[str, help.Argument("ALGO")] = ""
    """Name of the algorithm; without it, the command lists the kinds of tasks that have presets."""
    env: str = ""
    """Environment, as for `train`."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment."""
    core: str | None = None
    """Show what a run with this recurrent core would use, such as gru."""
    published: bool = False
    """Show published hyperparameters, as for `train`."""


def run(args: Sequence[str]) -> int:
    """Runs ``presets [ALGO --env ENV]``."""
    options = flags.parse(Presets, args, "jaxrl-dist presets")
    if not options.algorithm:
        print("\n".join(kinds()))
        return 0
    if not options.env:
        raise ConfigError(
            f"which environment? Such as: jaxrl-dist presets {options.algorithm} --env CartPole-v1"
        )
    # refuses an unknown algorithm before JAX is imported
    default = flags.plain_defaults(options.algorithm)
    core = {}
    if options.core is not None:
        core = flags.parse_train(options.algorithm, ["--core", options.core])
    find_modules(options.env)

    from jaxrl_dist.config.train import Train
    from jaxrl_dist.settings.resolve import resolved

    wanted: Train = Train(
        options.algorithm,
        env=options.env,
        env_options=options.env_options,
        data=data_of(options.algorithm),
        published=options.published,
    )
    config, source = resolved(wanted, core)
    print(f"{config.env} is of the kind: {presets.KINDS[presets.kind_of(source.spec)]}")
    words = ["jaxrl-dist", "train", options.algorithm, "--env", config.env]
    words += changed(config, default)
    words += changed(config.algorithm, default.algorithm)
    print(shlex.join(words))
    return 0


def kinds() -> list[str]:
    """Returns a line for each kind of task, with the algorithms that have flags for it."""
    width = max(map(len, presets.KINDS))
    lines = []
    for kind, text in presets.KINDS.items():
        having = [name for name, rows in presets.TABLE.items() if kind in rows]
        lines.append(f"{kind:{width}}  {text}: {', '.join(having) or 'none'}")
    papers = [f"{name} on {where}" for name, rows in published.TABLE.items() for where in rows]
    return [
        *lines,
        f"with --published, from papers and the environments' authors: {', '.join(papers)}",
        f"algorithms: {', '.join([*ALGORITHMS, *PRESETS])}",
        "jaxrl-dist presets ppo --env CartPole-v1 shows the flags that would run",
    ]


def changed(config: Any, default: Any) -> Iterator[str]:
    """Yields the flags and values of the fields that differ from ``default``."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("algorithm", "env") or value == getattr(default, field.name):
            continue
        if value is None and field.default is None:  # as if left out
            continue
        yield from flags.written(field.name, value)
