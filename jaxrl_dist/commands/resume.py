"""``jaxrl-dist resume``: resumes a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import find_modules, flags, request
from jaxrl_dist.commands.train import joined, show
from jaxrl_dist.config.train import RESUMABLE
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import signals, trackers
from jaxrl_dist.run.directories import check_run_dir
from jaxrl_dist.settings.policies import label
from jaxrl_dist.settings.stored import stored_config

HELP = """\
usage: jaxrl-dist resume RUN_DIR [FLAGS]

Continues a run from its newest complete checkpoint. Stored files never name code, so name yours again: --env for an
environment of the form my_module:make, --algorithm for the file of your own algorithm. Nor do they choose to send
metrics away: say --wandb or --no-wandb again. These flags may change; `jaxrl-dist train ALGO --help` explains them:

  {flags}

--change-env-options lets --env-options change: a step of a curriculum. The spaces must stay the same.
"""
CHANGE = "--change-env-options"


def run(args: Sequence[str]) -> int:
    """Runs ``resume RUN_DIR [FLAGS]``."""
    change = CHANGE in args
    args = [arg for arg in args if arg != CHANGE]
    allowed = (*RESUMABLE, "env", "quiet", "verbose", *(["env_options"] if change else []))
    if flags.wants_help(args):
        print(HELP.format(flags=" ".join(map(flag, allowed))), end="")
        return 0
    if not args or args[0].startswith("-"):
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist resume runs/NAME")
    run_dir, env = pathlib.Path(args[0]), flags.value_of(args, "--env")
    file, args = flags.taken(args[1:], "--algorithm")
    own = from_file(file) if file else None
    check_run_dir(run_dir)
    before = stored_config(run_dir, own, env)
    given = flags.parse_train(type(before.algorithm), args)
    defaults = {field.name: field.default for field in dataclasses.fields(flags.Command)}
    was = {**defaults, **vars(before), **vars(before.algorithm)}
    changes = {name: value for name, value in given.items() if value != was[name]}
    for name in changes:
        if name not in allowed:
            how = f"a new run takes it: jaxrl-dist train --config {run_dir} {flag(name)} ..."
            how = f"{CHANGE} allows it" if name == "env_options" else how
            raise ConfigError(f"{flag(name)} cannot change where a run is resumed; {how}")
    trackers.check_asked(before.wandb, given)
    output = request.output_flags(given)
    changes = {name: value for name, value in changes.items() if name in (*RESUMABLE, "env_options")}
    dataclasses.replace(before, **changes).validate()

    from jaxrl_dist.run.console import one_line_warnings
    from jaxrl_dist.training import resuming

    with signals.stopping() as stop, joined("resume", given, stop), one_line_warnings(output["quiet"]):
        find_modules(env)
        prepared = resuming.prepare_resume(before, run_dir, changes, change_env_options=change)
        show(label(before.algorithm), prepared, stop, **output)
    return 0
