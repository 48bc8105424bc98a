"""Variables to start a run from, which another run has trained."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config.train import CONFIG_FILE, Train
from jaxrl_dist.errors import ConfigError, flag
from jaxrl_dist.learners.league import Pool
from jaxrl_dist.run import arrays, checkpoint
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.stored import stored_content
from jaxrl_dist.types import PyTree, Variables

CORES = ("gru", "lstm", "attention", "linear", "core")
"""Names of recurrent cores among the parameters; ``--init-parts core`` stands for any of them."""

_STATISTICS = {
    "scale_rewards": "--no-scale-rewards",
    "normalize_observations": "--no-normalize-observations",
    "ema_steps": "--ema-steps 0",
}
"""Fields of ``Train`` that ask for wrappers with statistics, and the flags that turn them off."""


def load(run_dir: str, shapes: PyTree, parts: str | None, *, some: bool = False) -> PyTree:
    """Reads the variables of a run, or some of them.

    Args:
      run_dir: ``--init-from``.
      shapes: of all variables of the new run; with several policies, a dict keyed by policy.
      parts: ``--init-parts``: names of parameters or paths to them, separated by commas; None: all.
      some: the run may hold variables of other policies, which are not read.

    Returns:
      Numpy arrays in the structure of ``shapes``, and the shapes themselves where nothing is read.

    Raises:
      ConfigError: the networks have no such part, the run does not have it or has it in another
        shape, or its files are damaged.
    """
    if parts is None:
        return checkpoint.load_variables(run_dir, shapes, some=some)
    names = arrays.names(shapes)
    leaves = jax.tree.leaves(shapes)
    chosen = set[str]()
    for part in map(str.strip, parts.split(",")):
        within = {name for name in names if part and _within(part, name)}
        if not within:
            offered = sorted(_offered(names))
            raise ConfigError(
                f"--init-parts {part!r}: the networks of this run have no such part"
                f"{did_you_mean(part, offered)}; they have: {', '.join(offered)}"
            )
        chosen |= within
    like = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in chosen}
    read = checkpoint.load_variables(run_dir, like, some=True)
    filled = [read.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), filled)


def check_units(config: Train, scale: float) -> None:
    """Checks that the values of the run to start from are in the units of this one.

    Args:
      scale: the factor of this run's rewards, if it learns from records alone.

    Raises:
      ConfigError: they are of rewards that were multiplied by another factor.
    """
    path = pathlib.Path(str(config.init_from))
    if not (path / CONFIG_FILE).exists():
        return
    content = stored_content(path / CONFIG_FILE)
    theirs = 1.0
    if content["clock"] == "updates" and content["run"].get("scale_rewards"):
        read = checkpoint.load_variables(
            path, {"": Variables((), (np.zeros((), np.float32), ()))}, some=True
        )
        theirs = float(read[""].stats[0])
    if not np.isclose(theirs, scale, rtol=1e-4):
        raise ConfigError(
            f"--init-from {config.init_from}: --scale-rewards multiplied its rewards by "
            f"{theirs:.4g}, but this run's by {scale:.4g}; use the same flag and data, or load "
            "only the torso with --init-parts torso"
        )


def check_statistics(config: Train, shapes: Mapping[str, Variables]) -> None:
    """Checks that the run to start from keeps the same statistics, if both runs have one policy.

    Args:
      shapes: of all variables of the new run.

    Raises:
      ConfigError: a wrapper that keeps some is on in one of the runs alone.
    """
    path = pathlib.Path(str(config.init_from)) / CONFIG_FILE
    if "" not in shapes or not path.exists():
        return
    content = stored_content(path)
    if content["algorithm"] == Policies.stored_as:
        return
    for name, off in _STATISTICS.items():
        here = getattr(config, name) or None
        there = content["run"].get(name) or None
        if (here is None) == (there is None):
            continue
        remedy = off
        if there is not None:
            remedy = flag(name) if there is True else " ".join([flag(name), str(there)])
        parts = sorted({part.split("/")[0] for part in arrays.names(shapes[""].params)})
        raise ConfigError(
            f"--init-from {config.init_from}: {flag(name)} is on in one of the two runs alone; add "
            f"{remedy}, or load the networks alone with --init-parts {','.join(parts)}"
        )


def of_one_policy(run_dir: str) -> bool:
    """Returns whether the config of a run says that it has one policy."""
    path = pathlib.Path(run_dir, CONFIG_FILE)
    return path.exists() and stored_content(path)["algorithm"] != Policies.stored_as


def with_copies(variables: dict[str, Variables], copies: Mapping[str, str]) -> dict[str, Variables]:
    """Returns the variables of ``load``; a copy begins with what is read for the policy that it
    copies.

    Args:
      copies: for each policy that copies another, the name of that policy.
    """

    def filled(target: PyTree, source: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: x if isinstance(x, np.ndarray) else y, target, source)

    result = dict(variables)
    for name, source in copies.items():
        params, stats = variables[name]
        theirs = variables[source]
        if isinstance(stats, Pool):  # its versions begin equal
            stats = stats._replace(stats=filled(stats.stats, theirs.stats))
        else:
            stats = filled(stats, theirs.stats)
        result[name] = Variables(filled(params, theirs.params), stats)
    return result


def _within(part: str, name: str) -> bool:
    """Returns whether an array belongs to a part: ``torso`` has
    ``params/actor/torso/params/Dense_0/bias``.
    """
    wanted = part.split("/")
    path = name.split("/")
    # Statistics may hold an average of the networks, with parts of the same names.
    starts = path.index("stats") + 1 if "stats" in path else len(path)
    starts = min(starts, len(path) - len(wanted) + 1)
    return any(all(map(_matches, wanted, path[at:])) for at in range(starts))


def _matches(wanted: str, stored: str) -> bool:
    if wanted == "torso" and stored.endswith("_torso"):  # where policy and value have one each
        return True
    return stored == wanted or (wanted == "core" and stored in CORES)


def _offered(names: Sequence[str]) -> set[str]:
    """Returns the parts that a user may name: groups of arrays in the networks, and the
    statistics.
    """
    offered = set[str]()
    for name in names:
        path = name.split("/")
        if path[0] not in ("params", "stats"):  # the policy's name
            path = path[1:]
        if path[0] == "stats":
            offered.add("stats")
        elif "params" in path[1:]:
            offered.add("/".join(path[1 : path.index("params", 1)]))
    return offered
