"""Makes the learner of a run, and checks that its sizes fit the devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxrl_dist import packing, spaces
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import name_of
from jaxrl_dist.checks import check_divides, counted
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners import off_policy, on_policy, policies
from jaxrl_dist.learners.league import Copies
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.memory import ring
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.settings.policies import by_policy, naming
from jaxrl_dist.settings.still import Copy
from jaxrl_dist.training import data
from jaxrl_dist.types import Algorithm, Algorithms, EnvSpec, Replay, Rollout

MAX_COUNT = 2**31 - 1
"""Maximum of updates, iterations and steps of an environment: devices count them as int32."""


def make_learner(
    config: Train,
    algorithm: Algorithms,
    spec: EnvSpec,
    devices: Sequence[jax.Device],
    members: int = 1,
) -> Learner:
    """Returns the learners of all policies as one, for sizes that ``check_sizes`` accepts.

    Args:
      members: number of members of a population that share these devices.

    Raises:
      ConfigError: the replay memory does not fit.
    """
    learners = {}
    copies = {}
    specs = spec.by_policy
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
    """Returns the learner of one policy; a policy that does not train has one that does nothing."""
    if not algorithm.trains:
        return policies.still(algorithm)
    packed = packing.starts_kernel_per_array(devices[0])
    if spec.logs_actions:
        _check_logged(config, algorithm, spec)
    if algorithm.replay is None or PLANS[config.plan].sends_gradients:
        return on_policy.on_policy(algorithm, spec.num_agents, packed=packed)
    like = _rollout_shapes(config, algorithm, spec)
    if config.data is not None:
        data.check_extras(config, algorithm, like)
    if not config.offline:
        check_memory(algorithm.replay, like, devices, spec.frame_stack, members)
    return off_policy.off_policy(
        algorithm,
        like,
        spec.frame_stack,
        spec.num_agents,
        data_windows=data.windows_per_batch(config, algorithm.replay),
        packed=packed,
    )


def _check_logged(config: Train, algorithm: Algorithm, spec: EnvSpec) -> None:
    """Checks that an algorithm learns from actions that others have taken.

    Raises:
      ConfigError: it does not, because it needs more of its own policy than the action.
    """
    extras = _rollout_shapes(config, algorithm, spec).extras
    if algorithm.replay is None or jax.tree.leaves(extras) or algorithm.behaviour is not None:
        raise ConfigError(
            f"{name_of(config.algorithm)} learns from its own actions only; use an algorithm with a "
            "replay memory and without a core, such as dqn or sac, or remove --env-options "
            "log_action"
        )


def _rollout_shapes(config: Train, algorithm: Algorithm, spec: EnvSpec) -> Rollout:
    num_envs = config.num_envs * spec.num_agents

    def blank(key: jax.Array) -> Rollout:
        obs = spaces.zeros(spec.observation, num_envs)
        core = algorithm.initial_core(num_envs)
        return blank_rollout(algorithm, algorithm.init(key), obs, core, config.rollout_length)

    return jax.eval_shape(blank, jax.random.key(0))


def check_sizes(config: Train, algorithm: Algorithms, spec: EnvSpec, num_devices: int) -> None:
    """Checks that sizes divide over the devices, and that the run's counts fit 32 bits.

    Raises:
      ConfigError: they do not, and the message names sizes that do; or an algorithm with replay has
        no window.
    """
    for name, policy_spec in spec.by_policy.items():
        with naming(name):
            _check_sizes(config, algorithm[name], policy_spec, num_devices)


def _check_sizes(config: Train, algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> None:
    if algorithm.replay is not None and algorithm.window is None:
        raise ConfigError(
            "an algorithm with replay needs windows of a fixed length; set window, such as "
            "window=1 for transitions"
        )
    data.check_data(config, algorithm, spec, num_devices)
    if config.offline:
        return
    sends_gradients = PLANS[config.plan].sends_gradients  # then each actor has one device
    check_divides("num_envs", config.num_envs, (1 if sends_gradients else num_devices, "devices"))
    num_envs = config.num_envs * spec.num_agents
    length = config.rollout_length
    if not sends_gradients:
        if algorithm.replay is None:
            on_policy.check_sizes(algorithm, num_envs, length, num_devices)
        else:
            off_policy.check_sizes(
                algorithm, num_envs, length, num_devices, spec.frame_stack, spec.num_agents
            )
    check_counts(config, algorithm, num_envs)


def check_counts(config: Train, algorithm: Algorithm, num_envs: int) -> None:
    """Checks that devices can count the run's updates, iterations and steps of each environment.

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
            f"--total-env-steps {config.total_env_steps} is more than devices can count: "
            f"{MAX_COUNT} updates, of which {steps} env steps make {most}; use {works}"
        )


def check_memory(
    replay: Replay, like: Rollout, devices: Sequence[jax.Device], frame_stack: int, members: int = 1
) -> None:
    """Checks that the replay memories of all members fit the devices, before anything is allocated.

    Raises:
      ConfigError: they do not; the message names a capacity that fits.
    """
    num_envs = like.reward.shape[1]
    slots = replay.capacity // num_envs
    prioritized = replay.priority_exponent is not None
    needed = members * ring.nbytes(like, slots, prioritized=prioritized, frame_stack=frame_stack)
    if devices[0].platform == "cpu":
        available = memory_size() * peers.count()
    elif devices[0] in jax.local_devices():
        available = (devices[0].memory_stats() or {}).get("bytes_limit", 2**63) * len(devices)
    else:  # a description of a device, for which a program is compiled
        return
    if needed > available:
        whose = f" for {counted(members, 'member')}" if members > 1 else ""
        fits = int(replay.capacity * 0.8 * available / needed) // num_envs * num_envs
        raise ConfigError(
            f"--replay-capacity {replay.capacity} needs {needed / 1e9:.1f} GB{whose}, "
            f"and {available / 1e9:.1f} GB are available; {fits} fits"
        )
