"""Makes the learner of a run, and checks that its sizes fit the devices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_dist import packing, spaces
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.checks import check_divides, counted, flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train, settings_of
from jaxrl_dist.data.columns import returns_to_go
from jaxrl_dist.data.dataset import PIECES, Dataset, check_spaces
from jaxrl_dist.data.files import identity
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners import off_policy, on_policy, policies
from jaxrl_dist.learners.league import Copies
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.memory import ring
from jaxrl_dist.memory.records import ROWS, HostRecords, divide
from jaxrl_dist.nn import observations
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.settings.policies import Copy, by_policy, naming
from jaxrl_dist.types import Algorithm, Algorithms, EnvSpec, Replay, Rollout

LEGAL_BLOCK = 2**18
"""Steps of a data set whose actions are compared with their masks at a time."""
RETURN_SPAN = 1000.0
"""Largest minus smallest return of a data set whose rewards
are scaled (the authors' code of Kostrikov et al. 2021)."""


def make_learner(
    config: Train,
    algorithm: Algorithms,
    spec: EnvSpec,
    devices: Sequence[jax.Device],
    members: int = 1,
) -> Learner:
    """Returns the learners of all policies as one.

    Args:
      members: number of members of a population that share these devices.

    Raises:
      ConfigError: sizes do not divide, or the replay memory does not fit.
    """
    learners = {}
    copies = {}
    specs = spec.by_policy
    check_sizes(config, algorithm, spec, len(devices))
    for name, part in by_policy(config).items():
        with naming(name):
            learners[name] = _learner(part, algorithm[name], specs[name], devices, members)
        if isinstance(kind := part.algorithm, Copy):
            rows = specs[kind.policy].num_agents, specs[name].num_agents
            copies[name] = Copies(kind.policy, kind.every, kind.size, rows)
    return policies.combined_learner(learners, copies)


def _learner(
    config: Train,
    algorithm: Algorithm,
    spec: EnvSpec,
    devices: Sequence[jax.Device],
    members: int,
) -> Learner:
    """Returns the on-policy or off-policy learner of a policy, or that of one that does not
    train.
    """
    if not algorithm.trains:
        return policies.still(algorithm)
    num_envs = config.num_envs * spec.num_agents
    length = config.rollout_length
    packed = packing.starts_kernel_per_array(devices[0])
    offline = config.offline
    if algorithm.replay is None or PLANS[config.plan].sends_gradients:
        return on_policy.on_policy(algorithm, spec.num_agents, packed=packed)

    def shapes(key: jax.Array) -> Rollout:
        obs = spaces.zeros(spec.observation, num_envs)
        return blank_rollout(
            algorithm, algorithm.init(key), obs, algorithm.initial_core(num_envs), length
        )

    like = jax.eval_shape(shapes, jax.random.key(0))
    if config.data is not None:
        _check_extras(config, algorithm, like)
    if not offline:
        check_memory(algorithm.replay, like, devices, spec.frame_stack, members)
    if offline:
        data_windows = algorithm.replay.batch_size
    else:
        data_windows = round((config.data_share or 0) * algorithm.replay.batch_size)
    return off_policy.off_policy(
        algorithm, like, spec.frame_stack, spec.num_agents, data_windows=data_windows, packed=packed
    )


def _check_extras(config: Train, algorithm: Algorithm, like: Rollout) -> None:
    """Raises ``ConfigError`` if the algorithm learns from what it stores as it acts,
    and cannot add it to records.
    """
    if _return_discount(algorithm) is None:
        added: Mapping[str, Any] = {}
    else:
        added = {"return": like.reward}
    if algorithm.add_extras is not None:
        added = jax.eval_shape(algorithm.add_extras, like._replace(extras={})).extras
    if lacking := [name for name in like.extras if name not in added]:
        raise ConfigError(
            f"--data {config.data}: records hold no {', '.join(lacking)}, which this run stores as it acts"
        )


def check_sizes(config: Train, algorithm: Algorithms, spec: EnvSpec, num_devices: int) -> None:
    """Checks that sizes divide over the devices, and that the run's counts fit 32 bits.

    Raises:
      ConfigError: they do not; the message names sizes that do.
        Or an algorithm with replay has no window.
    """
    for name, policy_spec in spec.by_policy.items():
        with naming(name):
            _check_sizes(config, algorithm[name], policy_spec, num_devices)


def _check_sizes(config: Train, algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> None:
    if algorithm.replay is not None and algorithm.window is None:
        raise ConfigError(
            "an algorithm with replay needs windows of a fixed length, such as window=1 for transitions"
        )
    check_recorded(config, algorithm, spec, num_devices)
    if config.offline:
        return
    check_divides(
        "num_envs",
        config.num_envs,
        (1 if PLANS[config.plan].sends_gradients else num_devices, "devices"),
    )
    num_envs = config.num_envs * spec.num_agents
    if PLANS[config.plan].sends_gradients:
        pass  # each actor has one device
    elif algorithm.replay is None:
        on_policy.check_sizes(algorithm, num_envs, config.rollout_length, num_devices)
    else:
        length = config.rollout_length
        frame_stack = spec.frame_stack
        num_agents = spec.num_agents
        off_policy.check_sizes(algorithm, num_envs, length, num_devices, frame_stack, num_agents)
    check_counts(config, algorithm, num_envs)


def check_recorded(config: Train, algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> None:
    """Checks that an algorithm can learn from the data set of a run, if there is one.

    Raises:
      ConfigError: it cannot.
    """
    replay = algorithm.replay
    if config.data is None:
        if _return_discount(algorithm) is not None:
            raise ConfigError("--cql-floor takes returns from a data set: --data names one")
        return
    prioritized = replay is not None and replay.priority_exponent is not None
    changed = config.clip_rewards is not None or (config.scale_rewards and not config.offline)
    problems = {
        "are for algorithms that replay experience": replay is None or algorithm.window is None,
        "are drawn uniformly: --priority-exponent None works": prioritized,
        "are those of one agent": bool(spec.policies) or spec.num_agents > 1,
        "hold no stacked frames": spec.frame_stack > 1,
        "are scaled by --scale-rewards, and --core-inputs reads rewards that are not: --no-scale-rewards works": (
            config.scale_rewards
            and config.offline
            and "reward" in Traits.of(config.algorithm).core_inputs
        ),
        "have returns of raw rewards, as --cql-floor needs: it works without --clip-rewards and --scale-rewards": (
            _return_discount(algorithm) is not None and changed
        ),
        "are not for --plan gradients": PLANS[config.plan].sends_gradients,
        "on the host (--data-memory) give no running statistics: --normalize-observations and --ema-steps need "
        "--data-memory device": config.data_memory == "host" and algorithm.update_stats is not None,
    }
    for problem in filter(problems.get, problems):
        raise ConfigError(f"--data {config.data}: records {problem}")
    assert replay is not None
    if config.data_share is None:
        recorded = replay.batch_size
    else:
        recorded = round(config.data_share * replay.batch_size)
    for size in (recorded, replay.batch_size - recorded):
        if size % num_devices or not (size or config.data_share is None):
            if config.data_share is None:
                of = ""
            else:
                of = f"--data-share {config.data_share} of "
            if num_devices > 1:
                needed = f"a multiple of {num_devices} devices"
            else:
                needed = "one or more"
            raise ConfigError(
                f"{of}--batch-size {replay.batch_size} makes {recorded} records and {replay.batch_size - recorded} new "
                f"steps: each must be {needed}"
            )


MAX_COUNT = 2**31 - 1
"""Maximum of updates, iterations and steps of an environment: devices count them as int32."""


def check_counts(config: Train, algorithm: Algorithm, num_envs: int) -> None:
    """Checks that devices can count the run's updates,
    iterations and steps of each environment to its end.

    Args:
      num_envs: number of environments, times the agents of each, which share a policy.

    Raises:
      ConfigError: they cannot; the message names the total that works.
    """
    steps = config.num_envs * config.rollout_length
    length = config.rollout_length
    if PLANS[config.plan].sends_gradients:
        most = config.num_actors or 1  # each actor's gradient is an update and an iteration
    elif algorithm.replay is None:
        most = max(1, algorithm.num_epochs * algorithm.num_minibatches)
    else:
        most = max(off_policy.updates_per_iteration(algorithm.replay, num_envs * length), length)
    works = (MAX_COUNT // most - 1) * steps
    if not config.offline and config.total_env_steps > works:
        raise ConfigError(
            f"--total-env-steps {config.total_env_steps} is more than devices can count: {MAX_COUNT} updates, of which "
            f"{steps} env steps make {most}; {works} works"
        )


def check_memory(
    plan: Replay, like: Rollout, devices: Sequence[jax.Device], frame_stack: int, members: int = 1
) -> None:
    """Checks that the replay memories of all members fit the devices, before anything is allocated.

    Raises:
      ConfigError: they do not; the message names a capacity that fits.
    """
    num_envs = like.reward.shape[1]
    slots = plan.capacity // num_envs
    prioritized = plan.priority_exponent is not None
    needed = members * ring.nbytes(like, slots, prioritized=prioritized, frame_stack=frame_stack)
    if devices[0].platform == "cpu":
        available = memory_size() * peers.count()
    elif devices[0] in jax.local_devices():
        available = (devices[0].memory_stats() or {}).get("bytes_limit", 2**63) * len(devices)
    else:  # a description of a device, for which a program is compiled
        return
    if needed > available:
        if members > 1:
            whose = f" for {counted(members, 'member')}"
        else:
            whose = ""
        fits = int(plan.capacity * 0.8 * available / needed) // num_envs * num_envs
        raise ConfigError(
            f"--replay-capacity {plan.capacity} needs {needed / 1e9:.1f} GB{whose}, and {available / 1e9:.1f} GB are "
            f"available; {fits} fits"
        )


def scale_of_records(config: Train) -> float:
    """Returns the factor of the rewards of a run that learns from records alone; 1:
    they stay as they are.

    Raises:
      ConfigError: the data set cannot be read, or ``scale_rewards`` cannot scale it.
    """
    if not config.scale_rewards or not config.offline:
        return 1.0
    span = float(np.ptp(Dataset.load(str(config.data)).returns))
    if not span:
        raise ConfigError(
            f"--scale-rewards: all episodes of --data {config.data} have the same return; --no-scale-rewards works"
        )
    return RETURN_SPAN / span


def load_data(
    config: Train, algorithm: Algorithms, spec: EnvSpec, num_devices: int, scale: float
) -> tuple[HostRecords, str]:
    """Returns the windows of the data set of a run, and the identity of the set as
    ``data.files.identity`` has it.

    Args:
      scale: as ``scale_of_records`` returns it.

    Raises:
      ConfigError: it cannot be read, is too small, has other spaces,
        or is another one in another process.
    """
    (trained,) = algorithm.values()
    name = identity(str(config.data))
    arrays.check_equal(np.frombuffer(name.encode(), np.uint8), f"--data {config.data}")
    data = Dataset.load(str(config.data))
    check_spaces(f"--data {config.data}", data, spec.observation, spec.action)
    if PIECES in data.about and (
        scale != 1 or _return_discount(trained) is not None or trained.add_extras is not None
    ):
        raise ConfigError(
            f"--data {config.data}: its rows are not in the order in which they were played, so that --scale-rewards, "
            "--cql-floor and --core have no whole episodes; remove these"
        )
    if data.interface.both_sides and not trained.imitates:
        raise ConfigError(
            f"--data {config.data}: its agent moved for both sides of a game, and algorithms learn for one side; "
            "bc imitates its moves"
        )
    if data.steps < (least := math.lcm(ROWS, num_devices)):
        raise ConfigError(f"--data {config.data} has {data.steps} steps; {least} or more work")
    _check_bounds(str(config.data), data, spec)
    _check_legal(str(config.data), data, spec)
    _check_settings(config, data, spec)
    record = data.rollout()
    if scale != 1:
        record = record._replace(reward=(record.reward * scale).astype(np.float32))
    if (discount := _return_discount(trained)) is not None:
        returned = returns_to_go(np.asarray(record.reward), data.ends, data.terminated, discount)
        record = record._replace(extras={"return": returned})
    windows = divide(record, trained.window, num_devices, whole_windows=trained.whole_windows)
    return windows._replace(reward_scale=scale), name


def _return_discount(algorithm: Algorithm) -> float | None:
    if algorithm.replay is None:
        return None
    return algorithm.replay.return_discount


def _check_legal(name: str, data: Dataset, spec: EnvSpec) -> None:
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
        chosen = np.take_along_axis(legal, action, axis=1).all(axis=1)
        illegal += int(np.count_nonzero(~chosen & data.valid[rows]))
    if illegal:
        share = illegal / data.steps
        text = f"{share:.2%} of its actions are illegal by the mask {spec.mask!r}; leave their steps out to imitate it"
        warnings.warn(f"--data {name}: {text}", ConfigWarning, stacklevel=3)


def _check_settings(config: Train, data: Dataset, spec: EnvSpec) -> None:
    """Warns of a data set that was recorded in another form of the run's environment."""
    theirs = data.about.get("settings")
    if not isinstance(theirs, Mapping) or data.about.get("env") != spec.id:
        return
    own = settings_of(config)
    unequal = sorted(name for name in {**theirs, **own} if theirs.get(name) != own.get(name))
    if unequal:
        name = unequal[0]
        text = (
            f"was recorded with {flag(name)} {theirs.get(name)}, and this run has {own.get(name)}"
        )
        warnings.warn(f"--data {config.data} {text}; give the same", ConfigWarning, stacklevel=3)


def _check_bounds(name: str, data: Dataset, spec: EnvSpec) -> None:
    """Warns of actions that no policy can take in the environment:
    an unclipped policy may have recorded its own.
    """
    actions = spaces.leaves(data.action)
    kinds = spaces.leaves(spec.action)
    for path, kind in kinds.items():
        if isinstance(kind, spaces.Box) and np.issubdtype(kind.dtype, np.floating):
            slack = 1e-3 * np.maximum(kind.high - kind.low, 1e-6)
            beyond = (actions[path] < kind.low - slack) | (actions[path] > kind.high + slack)
            if share := float(beyond.reshape(len(beyond), -1).any(axis=1)[data.valid].mean()):
                text = f"{share:.0%} of its actions are beyond the bounds of {label_of(spec)}, within which policies act"
                warnings.warn(
                    f"--data {name}: {text}; clip them if the environment did",
                    ConfigWarning,
                    stacklevel=2,
                )
