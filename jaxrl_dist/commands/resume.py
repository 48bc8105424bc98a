"""``jaxrl-dist resume``: resumes a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import find_modules, flags, request
from jaxrl_dist.commands.train import joined, show
from jaxrl_dist.config.train import RESUMABLE, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.run import signals
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings import members as populations
from jaxrl_dist.settings.policies import label
from jaxrl_dist.settings.stored import check_asked, stored_config


@dataclasses.dataclass(frozen=True)
class Resume:
    """Continues a run from its newest complete checkpoint.

    Stored files never name code, so name yours again: --env for an environment of the form
    my_module:make, --algorithm for the file of your own algorithm. Nor do they choose to send
    metrics away, or to write a data set outside of the current directory: say --wandb or
    --no-wandb, and --record DIR or --record None, again. These flags may change;
    `jaxrl-dist train ALGO --help` explains them: {flags}
    """

    algorithm: str | None = None
    """File of the algorithm, if the run trained your own."""
    change_env_options: bool = False
    """Let --env-options change, as in a curriculum. The spaces must stay the same."""


_TRAIN = (*RESUMABLE, "env", "quiet", "verbose")
Resume.__doc__ = str(Resume.__doc__).format(flags=" ".join(map(flag, _TRAIN)))


def run(args: Sequence[str]) -> int:
    """Runs ``resume RUN_DIR [FLAGS]``."""
    options, args = flags.split(Resume, args, "jaxrl-dist resume RUN_DIR")
    if not args or args[0].startswith("-"):
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist resume runs/NAME")
    run_dir = pathlib.Path(args[0])
    env = flags.value_of(args, "--env")
    check_run_dir(run_dir)
    algorithm = from_file(options.algorithm) if options.algorithm else None
    before = stored_config(run_dir, algorithm, env)
    user_values = flags.parse_train(type(before.algorithm), args[1:])
    changeable = RESUMABLE
    if options.change_env_options:
        changeable = (*RESUMABLE, "env_options")
    changes = _changes(before, user_values, changeable, run_dir)
    check_asked(vars(before), user_values)
    output = request.output_flags(user_values)
    dataclasses.replace(before, **changes).validate()

    from jaxrl_dist.plans import devices
    from jaxrl_dist.training import resuming

    with (
        signals.stopping() as stop,
        joined("resume", user_values, stop),
        one_line_warnings(output["quiet"]),
    ):
        devices.divide_cpu(populations.number_of_members(vars(before)))
        find_modules(env)
        prepared = resuming.prepare_resume(
            before, run_dir, changes, change_env_options=options.change_env_options
        )
        show(label(before.algorithm), prepared, stop, **output)
    return 0


def _changes(
    before: Train,
    user_values: Mapping[str, Any],
    changeable: Sequence[str],
    run_dir: pathlib.Path,
) -> dict[str, Any]:
    """Returns the ``user_values`` that differ from the stored run and change it.

    Raises:
      ConfigError: one of them cannot change.
    """
    stored = {**vars(before), **vars(before.algorithm)}
    old = {**vars(flags.Command(before.algorithm)), **stored}
    changes = {name: value for name, value in user_values.items() if value != old[name]}
    for name in changes:
        if name in (*_TRAIN, *changeable):
            continue
        if name == "env_options":
            raise ConfigError("resume keeps --env-options; add --change-env-options to change them")
        if name not in stored:
            raise ConfigError(f"resume does not take {flag(name)}; remove it")
        raise ConfigError(
            f"resume keeps {flag(name)}; to change it, start a new run with `jaxrl-dist train "
            f"--config {run_dir} {flag(name)} ...`"
        )
    return {name: value for name, value in changes.items() if name in changeable}
