"""Makes the algorithm of each policy of a run, wrapped as the run's fields ask."""

from __future__ import annotations

import jax

from jaxrl_dist import algorithms
from jaxrl_dist import mesh as meshes
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.checks import did_you_mean, parse_bounds
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs import goals
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run import checkpoint
from jaxrl_dist.settings.policies import by_policy, naming
from jaxrl_dist.settings.still import Copy, Fixed, Still
from jaxrl_dist.settings.stored import acting_config
from jaxrl_dist.spaces import describe
from jaxrl_dist.types import Algorithm, Algorithms, EnvSpec, Goals, Variables


def make_algorithm(config: Train, spec: EnvSpec, record_scale: float = 1.0) -> Algorithms:
    """Returns the algorithm of each policy of a resolved config.

    Args:
      record_scale: factor of the rewards in its data set, for new variables;
        trained ones hold theirs.

    Raises:
      ConfigError: an algorithm cannot handle the environment's spaces.
    """
    return {name: _of_policy(config, name, spec, record_scale) for name in by_policy(config)}


def variable_shapes(algorithm: Algorithms) -> dict[str, Variables]:
    """Returns the shapes and dtypes of each policy's variables."""
    key = jax.random.key(0)
    shapes: dict[str, Variables] = meshes.over_policies(
        lambda policy: jax.eval_shape(policy.init, key)
    )(algorithm)
    return shapes


def _of_policy(config: Train, policy: str, spec: EnvSpec, record_scale: float = 1.0) -> Algorithm:
    with naming(policy):
        policies = by_policy(config)
        part = policies[policy]
        kind = part.algorithm
        if isinstance(kind, Copy):
            original = copied(config, kind, spec.policies[policy], spec)
            return kind.acting_as(_of_policy(config, original, spec))
        algorithm = _wrapped(part, spec.by_policy[policy], record_scale)
        if algorithm.episodic and len(policies) > 1:
            name = algorithms.name_of(kind)
            raise ConfigError(
                f"{name} restarts all environments before each rollout, so it must be the only "
                "policy"
            )
    return algorithm


def _wrapped(config: Train, spec: EnvSpec, record_scale: float = 1.0) -> Algorithm:
    """Returns the algorithm of a policy in the wrappers of ``algorithms.wrappers`` that the run's
    fields ask for.
    """
    if isinstance(config.algorithm, Fixed):
        algorithm = _fixed(config.algorithm, spec)
    else:
        algorithm = config.algorithm.make(spec)
    if config.ema_steps:
        algorithm = wrappers.average_parameters(
            algorithm, config.ema_steps, spec.num_agents, by_update=config.offline
        )
    if config.normalize_observations:
        algorithm = wrappers.normalize_observations(algorithm, spec)
    if config.scale_rewards and config.offline:
        algorithm = wrappers.scaled_records(algorithm, record_scale)
    elif config.scale_rewards:
        algorithm = wrappers.scale_rewards(algorithm, _scaling_discount(config, algorithm))
    if (bounds := parse_bounds("clip_rewards", config.clip_rewards)) is not None:
        # outermost: the others see clipped rewards
        algorithm = wrappers.clip_rewards(algorithm, *bounds)
    if config.her is not None:
        if config.action_repeat > 1:
            raise ConfigError(
                "--her needs the reward of each step, which --action-repeat sums; remove one"
            )
        # outermost: goals and rewards of the memory are the environment's
        algorithm = wrappers.hindsight(
            algorithm, spec, config.her, config.her_horizon, _goals(config, spec)
        )
    return algorithm


def _goals(config: Train, spec: EnvSpec) -> Goals | None:
    """Returns what reaching a goal pays; None: not known."""
    if config.goal_reward is not None:
        return goals.parse(config.goal_reward)
    return spec.goals


def _fixed(fixed: Fixed, spec: EnvSpec) -> Algorithm:
    """Returns the policy of another run, with the variables of its checkpoint."""
    config, policy = acting_config(fixed.run_dir, fixed.policy, f"{spec.backend}:{spec.id}")
    acting = _wrapped(config, spec)
    (shapes,) = variable_shapes({"": acting}).values()
    variables = checkpoint.load_variables(fixed.run_dir, shapes, policy, which=fixed.checkpoint)
    return fixed.acting_with(acting, variables)


def _scaling_discount(config: Train, algorithm: Algorithm) -> float:
    """Returns the discount of the returns whose deviation scales the rewards."""
    name = algorithms.name_of(config.algorithm)
    if algorithm.episodic:
        raise ConfigError(
            f"--scale-rewards does nothing for {name}, which compares whole returns; remove it"
        )
    discount = Traits.of(config.algorithm).discount
    if discount is None:
        raise ConfigError(
            f"--scale-rewards needs a field 'discount', which {name} does not have; remove it"
        )
    return discount


def copied(config: Train, copy: Copy, copy_spec: EnvSpec, spec: EnvSpec) -> str:
    """Returns the name of the policy that a policy is a copy of.

    Raises:
      ConfigError: there is no such policy, it does not train, or its spaces differ.
    """
    kinds = {name: part.algorithm for name, part in by_policy(config).items()}
    problems = {
        f"and there is no such policy{did_you_mean(copy.policy, kinds)}": copy.policy not in kinds,
        "which does not train": isinstance(kinds.get(copy.policy), Still),
        f"and under --plan {config.plan} none waits for another": not PLANS[config.plan].copies,
    }
    for problem in filter(problems.get, problems):
        raise ConfigError(f"it is a copy of {copy.policy}, {problem}")
    pools = sum(
        isinstance(kind, Copy) and kind.policy == copy.policy and kind.size > 1
        for kind in kinds.values()
    )
    if pools > 1:
        raise ConfigError(
            f"{copy.policy} has {pools} pools of copies; use one, which may act for several agents"
        )
    other = spec.policies[copy.policy]
    for kind in ("observation", "action"):
        mine = describe(getattr(copy_spec, kind))
        theirs = describe(getattr(other, kind))
        if mine != theirs:
            raise ConfigError(
                f"it is a copy of {copy.policy}; its agents have the {kind}s {theirs}, not {mine}"
            )
    return copy.policy
