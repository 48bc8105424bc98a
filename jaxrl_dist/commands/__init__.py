"""The commands of ``jaxrl-dist``: one module each,
whose ``run(args)`` runs the command and returns the exit code.

They import heavy libraries late, so ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import pathlib
import sys

from jaxrl_dist.errors import ConfigError

USES = (
    ("train ALGO --env ID [FLAGS]", "train; `jaxrl-dist train ALGO --help` lists the flags"),
    ("train FILE.py --env ID [FLAGS]", "train your own algorithm: docs/adding-an-algorithm.md"),
    (
        "train --policy NAME=ALGO:AGENTS ... --env ID [FLAGS]",
        "train several policies in one environment: docs/agents.md",
    ),
    ("train --config FILE [FLAGS]", "rerun a saved config; other flags override it"),
    ("sweep ALGO --env ID [FLAGS]", "train many runs as processes, such as --seeds 8 --jobs 4"),
    ("resume RUN_DIR [FLAGS]", "continue a run; --total-env-steps N trains a finished one further"),
    ("evaluate RUN_DIR [FLAGS]", "play greedy episodes with a trained policy"),
    ("video RUN_DIR FILE.gif [FLAGS]", "film greedy episodes"),
    ("record RUN_DIR -o DIR [FLAGS]", "store what a trained policy experiences as a data set"),
    (
        "data DIR ... [-o DIR]",
        "show what is in a data set; join several, or take the best episodes",
    ),
    (
        "estimate RUN_DIR --data DIR [FLAGS]",
        "estimate a policy's return from a data set, without playing",
    ),
    ("exact RUN_DIR [FLAGS]", "compare a policy with the exact optimum of a small environment"),
    (
        "match RUN_DIR RUN_DIR ... [FLAGS]",
        "play games between policies, and say which plays better",
    ),
    ("plot RUN_DIR ... -o FILE", "plot learning curves, or compare scores: --kind"),
    ("export RUN_DIR [-o FILE]", "write the policy as StableHLO, which runs without this package"),
    ("serve RUN_DIR [FLAGS]", "answer observations with a policy's actions, over HTTP"),
    ("new ALGO FILE.py [--env ID]", "write an algorithm as one file, for you to change"),
    ("check-env ENV [FLAGS]", "check your own environment: one line for each fault"),
    (
        "check-algorithm FILE.py --env ID [FLAGS]",
        "check your own algorithm: one line for each fault",
    ),
    ("doctor", "say whether this machine can train, on which devices, and what is missing"),
    (
        "doctor --compile-for h200x8 ALGO --env ID [FLAGS]",
        "compile a run for a GPU or TPU that is not here",
    ),
    ("list algorithms|envs|plans|placements", "list what is available"),
    ("presets [ALGO --env ID]", "show the flags that a run would use"),
    ("profile ALGO --env ID [FLAGS]", "show where the time of a run goes, stage by stage"),
)
"""What a user may type, and what it does."""
COMMANDS = tuple(dict.fromkeys(use.partition(" ")[0] for use, _ in USES))
"""Each is a module of this package, with ``_`` in place of ``-``."""


def help_text() -> str:
    """Returns the text of ``jaxrl-dist --help``."""
    from jaxrl_dist.algorithms import ALGORITHMS, PRESETS

    uses = "".join(
        f"  {use:33}  {text}\n"
        for use, text in (*USES, ("--version", "print the version of jaxrl-dist"))
    )
    example = "jaxrl-dist train ppo --env CartPole-v1 --total-env-steps 150000"
    algorithms = ", ".join([*ALGORITHMS, *PRESETS])
    return f"usage: jaxrl-dist COMMAND ...\n\n{uses}\nalgorithms: {algorithms}\n\n  {example}\n"


def find_modules(env: str | None) -> None:
    """Puts the current directory last on the module path if ``--env``,
    as the user has typed it, names a module.

    In the first place, its files would also replace what others import, such as numpy.

    Raises:
      ConfigError: the module is one of the current directory,
        and Python finds another one of its name.
    """
    from jaxrl_dist.config.envs import is_here, module_of_user

    module = None if env is None else module_of_user(env)
    if module is None:
        return
    name = module.partition(".")[0]
    directory = pathlib.Path.cwd()
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    if any(
        (directory / file).is_file() for file in (f"{name}.py", f"{name}/__init__.py")
    ) and not is_here(name):
        raise ConfigError(
            f"--env {env}: Python has another module {name}, so rename the one in this directory"
        )
