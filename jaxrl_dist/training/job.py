"""Makes the job of a resolved config, which runs of one process share, and its session."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence

import jax

from jaxrl_dist import algorithms, plans
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.config.envs import LIBRARIES, split_env
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked, varied
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.plans.devices import learner_devices
from jaxrl_dist.plans.job import Job, ProgramCache
from jaxrl_dist.plans.session import Session
from jaxrl_dist.settings.policies import by_policy, learner_name
from jaxrl_dist.settings.still import Copy, Fixed
from jaxrl_dist.training import contract, weights
from jaxrl_dist.training.algorithm import make_algorithm, variable_shapes
from jaxrl_dist.training.data import load_data, scale_of_records
from jaxrl_dist.training.learner import check_sizes, make_learner
from jaxrl_dist.training.planning import check_simulator
from jaxrl_dist.types import Algorithms, Array, Variables

KEEP = 8
"""Jobs whose programs stay in memory: a notebook
that trains again with one of their configs begins immediately."""
_jobs = collections.OrderedDict[str, Job]()
"""These jobs by ``_key``, the newest last."""


@in_32_bits
def make_session(config: Train, source: EnvSource, num_members: int | None = None) -> Session:
    """Returns the new session of a resolved config; the arguments are as for ``make_job``.

    Raises:
      ConfigError: as ``make_job``, or the variables to start from cannot be loaded.
    """
    job = make_job(config, source, num_members)
    if config.init_from is not None and config.init_parts is None:
        weights.check_units(config, 1.0 if job.data is None else job.data.reward_scale)
        weights.check_statistics(config, variable_shapes(job.algorithm))
    return Session(config, job, init_variables=init_variables(config, job.algorithm))


def init_variables(config: Train, algorithm: Algorithms) -> dict[str, Variables] | None:
    """Returns the variables that a new run of this config starts from; None: the algorithm's own.

    Raises:
      ConfigError: they cannot be loaded.
    """
    if config.init_from is None:
        return None
    kinds = {name: part.algorithm for name, part in by_policy(config).items()}
    shapes = variable_shapes(algorithm)
    learner = learner_name(config)
    if learner is not None and weights.of_one_policy(config.init_from):
        # the policy that trains continues from it
        loaded = weights.load(config.init_from, {"": shapes[learner]}, config.init_parts)
        variables = shapes | {learner: loaded[""]}
    else:  # fixed policies have a run of their own
        wanted = {name: x for name, x in shapes.items() if not isinstance(kinds[name], Fixed)}
        some = len(wanted) < len(shapes)
        loaded = weights.load(config.init_from, wanted, config.init_parts, some=some)
        variables = shapes | loaded
    copies = {name: kind.policy for name, kind in kinds.items() if isinstance(kind, Copy)}
    if copies:
        return weights.with_copies(variables, copies)
    return variables


@in_32_bits
def make_job(
    config: Train,
    source: EnvSource,
    num_members: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Job:
    """Returns the job of a resolved config, an earlier run's if it computes the same.

    Args:
      num_members: members of a population that share the job; None: a single run.
      devices: the devices that learn, which need not be of this machine; None:
        those that the config names.

    Raises:
      ConfigError: sizes do not divide, or the plan does not fit.
    """
    if devices is not None:
        return _new_job(config, source, num_members or 1, devices)
    devices = learner_devices(config, num_members)
    key = _key(config, num_members)
    if key is None:
        return _new_job(config, source, num_members or 1, devices)
    job = _jobs.pop(key, None)
    if job is None:
        job = _new_job(config, source, num_members or 1, devices)
        job = job._replace(cache=ProgramCache())
    else:
        # Its run may have been shorter, and has warned already.
        _pool(config, job.algorithm, job.source, devices)
        check_sizes(config, job.algorithm, job.source.spec, job.mesh.shape[meshes.DATA])
    _jobs[key] = job
    if len(_jobs) > KEEP:
        _jobs.popitem(last=False)
    return job


def _new_job(
    config: Train, source: EnvSource, num_members: int, devices: Sequence[jax.Device]
) -> Job:
    """Checks a config, and makes its job of ``_compiled_part`` alone."""
    if PLANS[config.plan].compiled:
        source.device()
    contract.check_own(config, source.spec, len(devices))
    compiled = _compiled_part(config)
    scale = scale_of_records(compiled)
    algorithm = make_algorithm(compiled, source.spec, scale)
    check_simulator(algorithm, source, config.plan, _names(config))
    pool = _pool(config, algorithm, source, devices)
    rows = meshes.rows_of(num_members, len(devices))
    row = devices[: len(devices) // rows]
    check_sizes(config, algorithm, source.spec, len(row))

    def of(config: Train, algorithm: Algorithms) -> Learner:
        return make_learner(config, algorithm, source.spec, row, num_members // rows)

    def vary(hyper: Mapping[str, Array]) -> tuple[Algorithms, Learner]:
        other = dataclasses.replace(compiled, algorithm=varied(compiled.algorithm, hyper))
        algorithm = make_algorithm(other, source.spec, scale)
        return algorithm, of(other, algorithm)

    mesh = meshes.make_mesh(devices, rows)
    job = Job(compiled, algorithm, of(compiled, algorithm), source, mesh, vary=vary, pool=pool)
    if config.data is None:
        return job
    data, data_identity = load_data(compiled, algorithm, source.spec, len(row), scale)
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


def _compiled_part(config: Train) -> Train:
    """Returns the config with the fields on which programs depend; the others have their defaults.

    So a job is a function of its ``_key``: nothing of the run that has made it goes into others.
    """
    blank = Train(config.algorithm)
    others = marked(Train, compiled=False)
    return dataclasses.replace(config, **{name: getattr(blank, name) for name in others})


def _key(config: Train, num_members: int | None) -> str | None:
    """Returns a text that is equal for configs whose jobs are equal; None:
    they depend on the user's code, or on a data set.

    JAX's own settings count, too, such as ``jax.default_matmul_precision``.
    """
    if config.data is not None:  # its content may change
        return None
    if not isinstance(config.env, str):
        return None
    backend, module, _ = split_env(config.env)
    if backend not in {"gymnax", "envpool", *LIBRARIES} or module is not None:
        return None
    if not type(config.algorithm).__module__.startswith("jaxrl_dist.algorithms."):
        return None
    fields = {**vars(_compiled_part(config)), "algorithm": vars(config.algorithm)}
    of_jax = {name: str(getattr(jax.config, name, None)) for name in jax.config.values}
    try:
        return json.dumps([algorithms.name_of(config.algorithm), fields, num_members, of_jax])
    except TypeError:  # one of the user's objects, such as a torso
        return None
