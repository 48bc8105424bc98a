"""The composition root: turns a ``Train`` config into a run that is ready to start."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_dist import algorithms, plans
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.evaluate import check_samples
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.checks import did_you_mean, flag, parse_bounds
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import LIBRARIES, Train, split_env
from jaxrl_dist.config.values import marked, varied
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError, ConfigWarning, EnvWarning
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans.devices import learner_devices, undivided
from jaxrl_dist.plans.job import Job, ProgramCache
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run import checkpoint, trackers
from jaxrl_dist.settings import members as populations
from jaxrl_dist.settings.policies import by_policy, learner, naming
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.still import Copy, Fixed, Still
from jaxrl_dist.settings.stored import acting_config, differences, to_json
from jaxrl_dist.spaces import describe
from jaxrl_dist.training import contract, recording, weights
from jaxrl_dist.training.compile_cache import keep_programs
from jaxrl_dist.training.data import load_data, scale_of_records
from jaxrl_dist.training.learner import check_sizes, make_learner
from jaxrl_dist.training.member import Member, ProgramShared
from jaxrl_dist.training.planning import check_simulator
from jaxrl_dist.training.rows import Row
from jaxrl_dist.training.run import Run, resume_command
from jaxrl_dist.types import Algorithm, Algorithms, Array, EnvSpec

KEEP = 8
"""Configs whose programs stay in memory: a notebook
that trains again with one of them begins at once."""
_job_cache = collections.OrderedDict[str, Job]()


@in_32_bits
def prepare(config: Train, source: EnvSource | None = None) -> Run:
    """Checks that a config can be run, and prepares the run.

    Args:
      source: the environment that ``resolved`` returned with ``config``; None:
        ``config`` is resolved here.

    Raises:
      ConfigError: the config cannot be run.
    """
    if source is None:
        config, source = resolved(config)
    config = _same(config)
    trackers.check(config)
    if config.compile_cache:
        keep_programs()
    prepared = _prepared(config, source)
    if source.spec.unread_mask and peers.first():
        warnings.warn(
            f"{label_of(source.spec)}: {source.spec.unread_mask}", EnvWarning, stacklevel=3
        )
    if source.spec.inside and peers.first():
        warnings.warn(f"{label_of(source.spec)}: {source.spec.inside}", ConfigWarning, stacklevel=3)
    _check_schedules(config)
    notice = undivided(config, max(map(len, prepared.groups)))
    if notice:
        _warn_once(notice)
    return prepared


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=5)  # names the caller of ``train``


def _check_schedules(config: Train) -> None:
    """Warns if the run goes on after the step sizes of a policy have become zero."""
    for part in by_policy(config).values():
        steps = Traits.of(part.algorithm).learning_rate_steps
        if steps is not None and steps < config.total:
            text = (
                f"--learning-rate-steps {steps} is less than {flag(f'total_{config.clock}')} {config.total}: step "
                "sizes are 0 from there to the end"
            )
            warnings.warn(text, ConfigWarning, stacklevel=4)


def _same(config: Train) -> Train:
    """Checks that all processes of the run have this config,
    and returns it with the run directory of process 0.

    Raises:
      ConfigError: a field differs.
    """
    if peers.world() is None:
        return config
    mine = json.loads(json.dumps(to_json(config)))
    mine["run"]["processes"] = config.processes  # which is no part of a run, but must be the same
    for process, theirs in enumerate(peers.all_gather(mine, "the config")):
        for name, old, new in differences(mine, theirs):
            raise ConfigError(
                f"all processes of a run need the same flags, and {flag(name)} is {old} in process {peers.index()} "
                f"and {new} in process {process}"
            )
    return dataclasses.replace(config, run_dir=peers.broadcast(config.run_dir, "the run directory"))


def _checked(job: Job) -> Job:
    """Checks that the algorithm can play as the config says,
    and says in it whether checkpoints hold the memory.
    """
    config = job.config
    if config.evaluation_policy == "sampled":
        check_samples(job.algorithm)
    memory = jax.eval_shape(job.learner.init, jax.random.key(0)).memory
    replay = checkpoint.keeps_replay(config.checkpoint_replay, memory)
    return job._replace(config=dataclasses.replace(config, checkpoint_replay=replay))


def _prepared(config: Train, source: EnvSource) -> Run:
    """Prepares the members of a run; a single run has one.
    They share programs where the plan lets them.
    """
    recording.check(config, source.spec)
    several = populations.is_population(config)
    hyper = list[str]()
    if several:
        population = populations.members(config)
    else:
        population = [populations.MemberConfig(config, {})]
    groups = [[number] for number in range(len(population))]
    if several and plans.population_plan(config.plan) is not None:
        hyper = _traced(population, source)
        groups = populations.programs(population, hyper)
    _check_one_program(config, groups, population[0].values, hyper)
    members = dict[int, Member]()
    for group in groups:
        base = _checked(
            make_job(population[group[0]].config, source, len(group) if several else None)
        )
        shared = ProgramShared(base, resume_command(config))
        members |= {
            number: _member(number, population[number], base, shared, hyper) for number in group
        }
    return Run(
        config if several else members[0].config,
        [members[number] for number in sorted(members)],
        groups,
    )


def _member(
    number: int,
    member: populations.MemberConfig,
    base: Job,
    shared: ProgramShared,
    hyper: Sequence[str],
) -> Member:
    """Returns a member of the program of ``base``, whose jobs differ in ``hyper``."""
    config = dataclasses.replace(member.config, checkpoint_replay=base.config.checkpoint_replay)
    scale = 1.0 if base.data is None else base.data.reward_scale
    if hyper:
        algorithm = make_algorithm(config, base.source.spec, scale)
    else:
        algorithm = base.algorithm
    job = base._replace(
        config=config, algorithm=algorithm, hyper={name: member.values[name] for name in hyper}
    )
    return Member(job, shared, Row(f"{number:03d}", config.seed, member.values))


def _check_one_program(
    config: Train,
    groups: Sequence[Sequence[int]],
    values: Mapping[str, Any],
    hyper: Sequence[str],
) -> None:
    """Checks that one program trains all members where they select or average,
    and the ``values`` vary in ``hyper``.
    """
    for name in (x for x in ("evolve", "average_every") if getattr(config, x) is not None):
        if plans.population_plan(config.plan) is None:
            acting = (plan for plan, info in PLANS.items() if info.clock == "env_steps")
            needed = " or ".join(filter(plans.population_plan, acting))
            raise ConfigError(
                f"{flag(name)} needs --plan {needed}: under --plan {config.plan} members train in turn"
            )
        if len(groups) > 1:
            fixed = ", ".join(name for name in values if name not in hyper)
            raise ConfigError(
                f"{flag(name)} needs all members in one program, and values of {fixed} need a program each; "
                f"--vary other fields, or remove {flag(name)}"
            )


def _traced(population: Sequence[populations.MemberConfig], source: EnvSource) -> list[str]:
    """Returns the varied hyperparameters that may differ between members of one program."""
    first = population[0]
    may = populations.tunable(first.config)
    names = [
        x
        for x in first.values
        if x in may and all(isinstance(y.values[x], float) for y in population)
    ]
    job = make_job(first.config, source, devices=learner_devices(first.config)[:1])

    def traces(*names: str) -> bool:
        return compiled.traces(job._replace(hyper={name: first.values[name] for name in names}))

    if not names or traces(*names):
        return names
    return [name for name in names if traces(name)]


def variable_shapes(algorithm: Algorithms) -> Any:
    """Returns the shapes and dtypes of each policy's variables."""
    return meshes.over_policies(lambda policy: jax.eval_shape(policy.init, jax.random.key(0)))(
        algorithm
    )


def make_algorithm(config: Train, spec: EnvSpec, record_scale: float = 1.0) -> Algorithms:
    """Returns the algorithm of each policy of a resolved config.

    Args:
      record_scale: factor of the rewards in its data set, for new variables;
        trained ones hold theirs.

    Raises:
      ConfigError: an algorithm cannot handle the environment's spaces.
    """
    return {name: _of_policy(config, name, spec, record_scale) for name in by_policy(config)}


def _wrapped(config: Train, spec: EnvSpec, record_scale: float = 1.0) -> Algorithm:
    """Returns the algorithm of a policy, wrapped as the fields of the run ask;
    see ``algorithms.wrappers``.
    """
    if isinstance(config.algorithm, Fixed):
        fixed = config.algorithm
        trained, policy = acting_config(fixed.run_dir, fixed.policy, f"{spec.backend}:{spec.id}")
        acting = _wrapped(trained, spec)
        (shapes,) = variable_shapes({"": acting}).values()
        variables = checkpoint.load_variables(fixed.run_dir, shapes, policy, which=fixed.checkpoint)
        algorithm: Algorithm = fixed.of(acting, variables)
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
        name = algorithms.name_of(config.algorithm)
        if algorithm.episodic:
            raise ConfigError(
                f"--scale-rewards changes nothing for {name}, which compares whole returns: remove it"
            )
        if (discount := Traits.of(config.algorithm).discount) is None:
            raise ConfigError(
                f"--scale-rewards needs a field 'discount', which {name} does not have: remove it"
            )
        algorithm = wrappers.scale_rewards(algorithm, discount)
    if (bounds := parse_bounds("clip_rewards", config.clip_rewards)) is not None:
        # outermost: the others see clipped rewards
        algorithm = wrappers.clip_rewards(algorithm, *bounds)
    return algorithm


def _of_policy(config: Train, policy: str, spec: EnvSpec, record_scale: float = 1.0) -> Algorithm:
    with naming(policy):
        part = by_policy(config)[policy]
        kind = part.algorithm
        if isinstance(kind, Copy):
            return kind.of(
                _of_policy(config, copied(config, kind, spec.policies[policy], spec), spec)
            )
        algorithm = _wrapped(part, spec.by_policy[policy], record_scale)
        if algorithm.episodic and len(by_policy(config)) > 1:
            name = algorithms.name_of(kind)
            raise ConfigError(
                f"{name} restarts all environments before each rollout; it works as the only policy"
            )
    return algorithm


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
            f"{copy.policy} has {pools} pools of copies; one works, which may act for several agents"
        )
    other = spec.policies[copy.policy]
    for kind in ("observation", "action"):
        mine, theirs = (describe(getattr(policy_spec, kind)) for policy_spec in (copy_spec, other))
        if mine != theirs:
            raise ConfigError(
                f"it is a copy of {copy.policy}, whose agents have the {kind}s {theirs}, and not {mine}"
            )
    return copy.policy


@in_32_bits
def make_job(
    config: Train,
    source: EnvSource,
    num_members: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Job:
    """Returns the job that a plan executes for a resolved config.

    Args:
      num_members: members of a population that share the job's program; None: a single run.
      devices: the devices that learn, which need not be of this machine; None:
        those that the config names.

    Raises:
      ConfigError: sizes do not divide, the plan does not fit,
        or the variables to start from cannot be loaded.
    """
    if devices is not None:
        key = None
    else:
        key = _computed(config, num_members)
    job = None if key is None else _job_cache.pop(key, None)
    if devices is None:
        devices = learner_devices(config, num_members)
    else:
        devices = devices
    if job is None:
        job = _new_job(config, source, num_members or 1, devices)
    else:  # its run may have been shorter, and has warned already
        _pool(config, job.algorithm, job.source, devices)
        check_sizes(config, job.algorithm, job.source.spec, job.mesh.shape[meshes.DATA])
    if key is not None:
        _job_cache[key] = job = job._replace(cache=job.cache or ProgramCache())
        if len(_job_cache) > KEEP:
            _job_cache.popitem(last=False)
    if config.init_from is not None and config.init_parts is None:
        weights.check_units(config, 1.0 if job.data is None else job.data.reward_scale)
    return job._replace(config=config, init_variables=init_variables(config, job.algorithm))


def init_variables(config: Train, algorithm: Algorithms) -> Any:
    """Returns the variables that a new run of this config starts from; None: the algorithm's own.

    Raises:
      ConfigError: they cannot be loaded.
    """
    if config.init_from is None:
        return None
    kinds = {name: part.algorithm for name, part in by_policy(config).items()}
    shapes = variable_shapes(algorithm)
    one = learner(config)
    # from which the policy that trains goes on
    if one is not None and weights.of_one_policy(config.init_from):
        variables = shapes | {
            one: weights.load(config.init_from, {"": shapes[one]}, config.init_parts)[""]
        }
    else:  # fixed policies have a run of their own
        wanted = {name: x for name, x in shapes.items() if not isinstance(kinds[name], Fixed)}
        variables = shapes | weights.load(
            config.init_from, wanted, config.init_parts, some=len(wanted) < len(shapes)
        )
    copies = {name: kind.policy for name, kind in kinds.items() if isinstance(kind, Copy)}
    if copies:
        return weights.with_copies(variables, copies)
    return variables


def _new_job(
    config: Train, source: EnvSource, num_members: int, devices: Sequence[jax.Device]
) -> Job:
    if PLANS[config.plan].compiled:
        source.device()
    contract.check_own(config, source.spec, len(devices))
    scale = scale_of_records(config)
    algorithm = make_algorithm(config, source.spec, scale)
    check_simulator(algorithm, source, config.plan, _names(config))
    pool = _pool(config, algorithm, source, devices)
    rows = meshes.rows_of(num_members, len(devices))
    # a row has its devices
    member_devices = devices[: len(devices) // rows]
    members_per_row = num_members // rows
    learner = make_learner(config, algorithm, source.spec, member_devices, members_per_row)

    def vary(hyper: Mapping[str, Array]) -> tuple[Algorithms, Learner]:
        other = dataclasses.replace(config, algorithm=varied(config.algorithm, hyper))
        algorithm = make_algorithm(other, source.spec, scale)
        return algorithm, make_learner(
            other, algorithm, source.spec, member_devices, members_per_row
        )

    job = Job(
        config, algorithm, learner, source, meshes.make_mesh(devices, rows), vary=vary, pool=pool
    )
    if config.data is None:
        return job
    data, data_identity = load_data(config, algorithm, source.spec, len(member_devices), scale)
    return job._replace(data=data, data_identity=data_identity)


def _pool(
    config: Train, algorithm: Algorithms, source: EnvSource, devices: Sequence[jax.Device]
) -> PoolOptions:
    return plans.pool_options(
        config, algorithm, _names(config), devices, on_host=not source.is_pure
    )


def _names(config: Train) -> dict[str, str]:
    return {
        policy: algorithms.name_of(part.algorithm) for policy, part in by_policy(config).items()
    }


def _computed(config: Train, num_members: int | None) -> str | None:
    """Returns a text that is equal for configs whose programs are equal; None:
    they depend on the user's code.

    JAX's own settings count, too, such as ``jax.default_matmul_precision``.
    """
    if config.data is not None:  # its content may change
        return None
    if isinstance(config.env, str):
        backend, module, _ = split_env(config.env)
    else:
        backend = None
        module = ""
        _ = None
    if backend not in {"gymnax", "envpool", *LIBRARIES} or module is not None:
        return None
    if not type(config.algorithm).__module__.startswith("jaxrl_dist.algorithms."):
        return None
    described = {
        **vars(config),
        **dict.fromkeys(marked(Train, compiled=False)),
        "algorithm": vars(config.algorithm),
    }
    of_jax = {name: str(getattr(jax.config, name, None)) for name in jax.config.values}
    try:
        return json.dumps([algorithms.name_of(config.algorithm), described, num_members, of_jax])
    except TypeError:  # one of the user's objects, such as a torso
        return None
