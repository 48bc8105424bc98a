"""``jaxrl-dist list algorithms|envs [LIBRARY]|plans|placements``: lists what is available."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class
from jaxrl_dist.checks import did_you_mean, flag, install_extra
from jaxrl_dist.commands import flags
from jaxrl_dist.config.envs import LIBRARIES
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import placements


def run(args: Sequence[str]) -> int:
    """Runs ``list KIND``."""
    if flags.wants_help(args):
        flags.show("usage: jaxrl-dist list algorithms|envs [LIBRARY]|plans|placements\n")
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "algorithms": _algorithms,
        "envs": _envs,
        "plans": lambda: (f"{name:12} {plan.help}" for name, plan in PLANS.items()),
        "placements": _placements,
    }
    libraries = {f"envs {library}": functools.partial(_envs, library) for library in LIBRARIES}
    kind = " ".join(args)
    if kind not in kinds | libraries:
        raise ConfigError(
            f"list what? {kind!r} is not one of {', '.join(kinds)}{did_you_mean(kind, kinds)}; "
            f"after envs, name a library: {', '.join(LIBRARIES)}"
        )
    print("\n".join((kinds | libraries)[kind]()))
    return 0


def _algorithms() -> Iterator[str]:
    for name in ALGORITHMS:
        yield f"{name:9} {str(config_class(name).__doc__).splitlines()[0]}"
    for name, (algorithm, fields) in PRESETS.items():
        shown = ["plan"] if "plan" in fields else list(fields)[:2]
        values = " ".join(f"{flag(field)} {fields[field]}" for field in shown)
        yield f"{name:9} {algorithm}, {values}"


def _envs(library: str | None = None) -> Iterator[str]:
    from jaxrl_dist.envs.device import libraries
    from jaxrl_dist.envs.source import BACKENDS

    backends: Mapping[str, Any] = BACKENDS
    if library:
        backends = {library: libraries.load(library)}
    for name, backend in backends.items():
        if name == "envpool" and not libraries.installed(name):
            yield f"envpool:ID      {install_extra(name)}"
            continue
        yield from (f"{name}:{env_id}" for env_id in backend.ids())
    if library is None:
        yield from libraries.summary()
        yield "MODULE:NAME, such as my_module:make: a function that makes a gymnasium.Env or a gymnax-style environment"


def _placements() -> Iterator[str]:
    for name, placement in zip(placements.spelled(), placements.PLACEMENTS.values(), strict=True):
        yield f"{name:12} {placement.says}"
