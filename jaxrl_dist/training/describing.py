"""What a run says of itself: its size and devices, and the command that resumes it."""

from __future__ import annotations

import shlex
import sys

from jaxrl_dist import algorithms
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import cluster
from jaxrl_dist.checks import counted
from jaxrl_dist.config.envs import env_name, module_of_user, split_env
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.agents.groups import team_size
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.job import Job
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import Policies, label
from jaxrl_dist.settings.stored import to_ask
from jaxrl_dist.types import EnvSpec

FEW = 16
"""Environments a device below which one CPU device alone is faster: two ran PPO at 0.7 of its speed
with 4 or 8 each, and at 1.0 to 1.2 with 16."""


def describe(
    config: Train, first: Train, job: Job, members: int, programs: int, name: str | None = None
) -> str:
    """Describes a run and its devices in a line,
    and says in another one if fewer devices would be faster.

    Args:
      first: the config of the first member.
      job: its job.
      members: number of members.
      programs: number of programs that train them.
      name: the user's name for the algorithm.
    """
    population = ""
    if is_population(config):
        several = f" in {counted(programs, 'program')}" if programs > 1 else ""
        population = f"{counted(members, 'member')}{several}, each "
    environment = _environment(first) or "no environment"
    return (
        f"{population}{name or label(first.algorithm)} on {environment}, plan {first.plan}, "
        f"{_devices(first, job)}, {_work(first, job)}{_faster(config, job)}"
    )


def _environment(config: Train) -> str:
    """Returns the user's own name for the environment."""
    name = env_name(config.env)
    _, module, made_by = split_env(name)
    if module:
        return f"{module}:{made_by}"
    return name


def _devices(config: Train, job: Job) -> str:
    mesh = job.mesh
    devices = counted(mesh.devices.size, f"{mesh.devices.flat[0].platform} device")
    if not PLANS[config.plan].threaded:
        return devices
    actors = counted(job.pool.num_actors, "actor")
    if config.actors_on:
        return f"{actors} on Ray ({cluster.find_nodes()}), {devices}"
    if config.actor_devices:
        return f"{actors} on {len(job.pool.meshes)}, learner on {devices}"
    return f"{actors}, {devices}"


def _work(config: Train, job: Job) -> str:
    """Returns what an iteration takes, or the data set."""
    if job.data is not None and not job.acts:
        return f"{int(job.data.sizes.sum()):,} recorded steps of {config.data}"
    steps = counted(config.rollout_length, "step")
    return (
        f"{counted(config.num_envs, 'environment')} x {agents_of(job.source.spec)}{steps} "
        "an iteration"
    )


def _faster(config: Train, job: Job) -> str:
    """Returns a line that says how fewer devices of a CPU would be faster;
    "" if they would not.
    """
    sharing = job.mesh.shape[meshes.DATA]
    on_cpu = job.mesh.devices.flat[0].platform == "cpu" and peers.world() is None
    few = sharing > 1 and config.num_envs < FEW * sharing
    if not (on_cpu and few and PLANS[config.plan].compiled):
        return ""
    return (
        f"\n{sharing} CPU devices share {config.num_envs} environments; one alone is faster "
        "(--num-devices 1)"
    )


def agents_of(spec: EnvSpec) -> str:
    """Returns the agents of an environment as ``describe`` counts them; "" if it has one."""
    teams = {name: team_size(part) for name, part in spec.by_policy.items()}
    alone = sum(part.num_agents for name, part in spec.by_policy.items() if not teams[name])
    words = [f"a team of {counted(size, 'agent')}" for size in teams.values() if size]
    if alone > (not words):
        words.append(counted(alone, "agent"))
    if len(words) > 1:
        return f"({' and '.join(words)}) x "
    if words:
        return f"{words[0]} x "
    return ""


def resume_command(config: Train) -> str:
    """Returns the command, or in Python the call, that resumes a run, and says what no file may."""
    run_dir = str(config.run_dir)
    again = to_ask(vars(config))
    if not isinstance(config.env, str):
        more = "".join(f", {name}={getattr(config, name)!r}" for name in again)
        return f"jaxrl_dist.resume({run_dir!r}, env=...{more})"
    words = ["jaxrl-dist", "resume", run_dir]
    if module_of_user(config.env) is not None:
        words += ["--env", config.env]
    kind = type(config.algorithm)
    if kind is not Policies and algorithms.name_of(kind) not in algorithms.ALGORITHMS:
        module = sys.modules.get(kind.__module__)
        words += ["--algorithm", getattr(module, "__file__", None) or "FILE.py"]
    return " ".join([shlex.join(words), *again.values()])
