"""The data set of a run: whether its algorithm can learn from it, and the windows that it gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train, settings_of
from jaxrl_dist.data import files
from jaxrl_dist.data.columns import returns_to_go
from jaxrl_dist.data.dataset import PIECES, Dataset, check_spaces
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import arrays
from jaxrl_dist.memory.records import ROWS, HostRecords, divide
from jaxrl_dist.nn import observations
from jaxrl_dist.protocols import Traits
from jaxrl_dist.types import Algorithm, Algorithms, EnvSpec, Replay, Rollout

LEGAL_BLOCK = 2**18
"""Steps of a data set, with actions that are compared with their masks at a time."""
RETURN_SPAN = 1000.0
"""Largest minus smallest return of a data set whose rewards
are scaled (the authors' code of Kostrikov et al. 2021)."""


# --- Before the data are read ---------------------------------------------------------------------


def check_data(config: Train, algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> None:
    """Checks that an algorithm can learn from the data set of a run, if there is one.

    Raises:
      ConfigError: it cannot.
    """
    if config.data is None:
        if _return_discount(algorithm) is not None:
            raise ConfigError("--cql-floor takes returns from a data set; name one with --data")
        return
    for problem, holds in _problems(config, algorithm, spec).items():
        if holds:
            raise ConfigError(f"--data {config.data}: {problem}")
    assert algorithm.replay is not None
    _check_shares(config, algorithm.replay, num_devices)


def _problems(config: Train, algorithm: Algorithm, spec: EnvSpec) -> dict[str, bool]:
    """Returns what may stand against learning from records, and whether it does."""
    replay = algorithm.replay
    replays_windows = replay is not None and algorithm.window is not None
    scales_data = config.scale_rewards and config.offline
    scales_online = config.scale_rewards and not config.offline
    changes_rewards = scales_online or config.clip_rewards is not None
    return {
        "records need an algorithm with replay": not replays_windows,
        "records are drawn uniformly; use --priority-exponent None": (
            replay is not None and replay.priority_exponent is not None
        ),
        "records hold the steps of one agent": bool(spec.policies) or spec.num_agents > 1,
        "records cannot hold stacked frames": spec.frame_stack > 1,
        "--scale-rewards scales records, but --core-inputs reads raw rewards; use "
        "--no-scale-rewards": (scales_data and "reward" in Traits.of(config.algorithm).core_inputs),
        "--cql-floor needs returns of raw rewards; remove --clip-rewards and --scale-rewards": (
            changes_rewards and _return_discount(algorithm) is not None
        ),
        "records do not work with --plan gradients": PLANS[config.plan].sends_gradients,
        "records on the host give no running statistics, which --normalize-observations and "
        "--ema-steps need; use --data-memory device": (
            config.data_memory == "host" and algorithm.update_stats is not None
        ),
    }


def windows_per_batch(config: Train, replay: Replay) -> int:
    """Returns how many windows of each batch come from the data set of a run."""
    if config.offline:
        return replay.batch_size
    return round((config.data_share or 0) * replay.batch_size)


def _check_shares(config: Train, replay: Replay, num_devices: int) -> None:
    """Checks that records and new steps of a batch divide over the devices."""
    old = windows_per_batch(config, replay)
    new = replay.batch_size - old
    empty = config.data_share is not None and not (old and new)
    if not (empty or old % num_devices or new % num_devices):
        return
    share = "" if config.data_share is None else f"--data-share {config.data_share} of "
    needed = "one or more" if num_devices == 1 else f"a multiple of {num_devices} devices"
    raise ConfigError(
        f"{share}--batch-size {replay.batch_size} makes {old} records and {new} new steps: "
        f"each must be {needed}"
    )


def check_extras(config: Train, algorithm: Algorithm, like: Rollout) -> None:
    """Checks that records get all extras from which the algorithm learns.

    Args:
      like: shapes and dtypes of a rollout.

    Raises:
      ConfigError: it learns from what it stores as it acts, and cannot add it to records.
    """
    added: Mapping[str, Any] = {}
    if algorithm.add_extras is not None:
        added = jax.eval_shape(algorithm.add_extras, like._replace(extras={})).extras
    elif _return_discount(algorithm) is not None:
        added = {"return": like.reward}
    lacking = [name for name in like.extras if name not in added]
    if lacking:
        raise ConfigError(
            f"--data {config.data}: records have no {', '.join(lacking)}, which this run stores "
            "when it acts"
        )


def _return_discount(algorithm: Algorithm) -> float | None:
    if algorithm.replay is None:
        return None
    return algorithm.replay.return_discount


# --- The data -------------------------------------------------------------------------------------


def scale_of_records(config: Train) -> float:
    """Returns the factor of the rewards of a run that learns from records alone; 1: they stay as
    they are.

    Raises:
      ConfigError: the data set cannot be read, or ``scale_rewards`` cannot scale it.
    """
    if not config.scale_rewards or not config.offline:
        return 1.0
    span = float(np.ptp(Dataset.load(str(config.data)).returns))
    if not span:
        raise ConfigError(
            f"--scale-rewards: all episodes of --data {config.data} have the same return; use "
            "--no-scale-rewards"
        )
    return RETURN_SPAN / span


def load_data(
    config: Train, algorithms: Algorithms, spec: EnvSpec, num_devices: int, scale: float
) -> tuple[HostRecords, str]:
    """Returns the windows of the data set of a run, and the identity of the set as
    ``data.files.identity`` has it.

    Args:
      scale: as ``scale_of_records`` returns it.

    Raises:
      ConfigError: the data set cannot be read, is too small, has other spaces, or is another one
        in another process.
    """
    (algorithm,) = algorithms.values()
    identity = files.identity(str(config.data))
    arrays.check_equal(np.frombuffer(identity.encode(), np.uint8), f"--data {config.data}")
    data = Dataset.load(str(config.data))
    _check_content(config, algorithm, spec, num_devices, data, scale)
    _warn_of_bounds(config, spec, data)
    _warn_of_illegal(config, spec, data)
    _warn_of_settings(config, spec, data)
    steps = data.rollout()
    if scale != 1:
        steps = steps._replace(reward=(steps.reward * scale).astype(np.float32))
    discount = _return_discount(algorithm)
    if discount is not None:
        returns = returns_to_go(np.asarray(steps.reward), data.ends, data.terminated, discount)
        steps = steps._replace(extras={"return": returns})
    windows = divide(steps, algorithm.window, num_devices, whole_windows=algorithm.whole_windows)
    return windows._replace(reward_scale=scale), identity


def _check_content(
    config: Train,
    algorithm: Algorithm,
    spec: EnvSpec,
    num_devices: int,
    data: Dataset,
    scale: float,
) -> None:
    check_spaces(f"--data {config.data}", data, spec.observation, spec.action)
    needs_order = (
        scale != 1 or algorithm.add_extras is not None or _return_discount(algorithm) is not None
    )
    if needs_order and PIECES in data.about:
        raise ConfigError(
            f"--data {config.data}: its rows are not in the order of play, so --scale-rewards, "
            "--cql-floor and --core have no whole episodes; remove these"
        )
    if data.interface.both_sides and not algorithm.imitates:
        raise ConfigError(
            f"--data {config.data}: its agent moved for both sides of a game, but algorithms learn "
            "for one side; imitate its moves with bc"
        )
    least = math.lcm(ROWS, num_devices)
    if data.steps < least:
        raise ConfigError(
            f"--data {config.data} has {data.steps} steps, but {least} or more are needed"
        )


def _warn_of_bounds(config: Train, spec: EnvSpec, data: Dataset) -> None:
    """Warns of actions that no policy can take in the environment: an unclipped policy may have
    recorded its own.
    """
    actions = spaces.leaves(data.action)
    for path, kind in spaces.leaves(spec.action).items():
        if not isinstance(kind, spaces.Box) or not np.issubdtype(kind.dtype, np.floating):
            continue
        slack = 1e-3 * np.maximum(kind.high - kind.low, 1e-6)
        beyond = (actions[path] < kind.low - slack) | (actions[path] > kind.high + slack)
        share = float(beyond.reshape(len(beyond), -1).any(axis=1)[data.valid].mean())
        if share:
            warnings.warn(
                f"--data {config.data}: {share:.0%} of its actions are beyond the bounds of "
                f"{label_of(spec)}, within which policies act; clip them if the environment did",
                ConfigWarning,
                stacklevel=3,
            )


def _warn_of_illegal(config: Train, spec: EnvSpec, data: Dataset) -> None:
    """Warns of actions that the mask forbids, to which policies give no probability."""
    if spec.mask is None:
        return
    sizes = spaces.num_choices(spec.action)
    first = np.cumsum([0, *sizes[:-1]])
    illegal = 0
    for begin in range(0, len(data.valid), LEGAL_BLOCK):  # the arrays may be larger than the memory
        rows = slice(begin, begin + LEGAL_BLOCK)
        legal = np.asarray(observations.legal(spec, {spec.mask: data.obs[spec.mask][rows]}))
        action = data.action[rows].reshape(len(legal), -1) + first
        allowed = np.take_along_axis(legal, action, axis=1).all(axis=1)
        illegal += int(np.count_nonzero(~allowed & data.valid[rows]))
    if illegal:
        warnings.warn(
            f"--data {config.data}: {illegal / data.steps:.2%} of its actions are illegal by the "
            f"mask {spec.mask!r}; leave out their steps",
            ConfigWarning,
            stacklevel=3,
        )


def _warn_of_settings(config: Train, spec: EnvSpec, data: Dataset) -> None:
    """Warns of a data set that was recorded in another form of the run's environment."""
    theirs = data.about.get("settings")
    if not isinstance(theirs, Mapping) or data.about.get("env") != spec.id:
        return
    own = settings_of(config)
    unequal = [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]
    if unequal:
        name = min(unequal)
        warnings.warn(
            f"--data {config.data} was recorded with {flag(name)} {theirs.get(name)}, but this run "
            f"has {own.get(name)}; use the same",
            ConfigWarning,
            stacklevel=3,
        )
