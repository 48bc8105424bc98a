"""``jaxrl-dist list algorithms|envs [LIBRARY]|plans|placements``: lists what is available."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import LIBRARIES
from jaxrl_dist.errors import ConfigError


def run(args: Sequence[str]) -> int:
    """Runs ``list KIND``."""
    what = " ".join(args)
    kinds = ("algorithms", "envs", "plans", "placements")
    if what in (f"envs {library}" for library in LIBRARIES):
        from jaxrl_dist.envs.device import libraries

        library = args[-1]
        print("\n".join(f"{library}:{env_id}" for env_id in libraries.load(library).ids()))
        return 0
    if what not in kinds:
        raise ConfigError(
            f"list what? {what!r} is none of {', '.join(kinds)}{did_you_mean(what, kinds)}; envs may be followed by "
            f"one of {', '.join(LIBRARIES)}"
        )
    if what == "envs":
        from jaxrl_dist.envs.device import libraries
        from jaxrl_dist.envs.source import BACKENDS

        lines = [f"{name}:{env_id}" for name, backend in BACKENDS.items() for env_id in backend.ids()]
        lines += libraries.summary()
        lines.append("MODULE:NAME, such as my_module:make: what makes a gymnasium.Env or a gymnax-style one")
    elif what == "algorithms":
        from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class

        lines = [f"{name:9} {config_class(name).__doc__.splitlines()[0]}" for name in ALGORITHMS]
        lines += [f"{name:9} {algorithm}, --plan {fields['plan']}" for name, (algorithm, fields) in PRESETS.items()]
    elif what == "placements":
        from jaxrl_dist.settings import placements

        lines = [
            f"{name:12} {placement.says}"
            for name, placement in zip(placements.spelled(), placements.PLACEMENTS.values(), strict=True)
        ]
    else:
        lines = [f"{name:12} {plan.help}" for name, plan in PLANS.items()]
    print("\n".join(lines))
    return 0
