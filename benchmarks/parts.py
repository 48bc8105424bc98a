"""Compares a synchronous run with the bound of its parts: environment, inference and update,
each timed separately.

    python benchmarks/parts.py ppo --env envpool:Pong-v5 --rounds 10

The parts are bare: EnvPool without our adapter, the jitted policy without storage, the compiled
update without a plan. Serial execution cannot beat ``1 / (1/env + 1/inference + 1/update)``. Parts
and whole take turns, one iteration each, so that machine drift slows them equally; the result is
the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import envpool
import jax
import numpy as np

from jaxrl_dist.actors.host import HostActor
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.host import envpool as adapter
from jaxrl_dist.envs.host.calls import Caller
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.session import Session
from jaxrl_dist.rng import Stream
from jaxrl_dist.spaces import Box
from jaxrl_dist.training import setup
from jaxrl_dist.types import Context


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm")
    parser.add_argument("--env", required=True, help="an EnvPool environment")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    config: Train[Any] = Train(args.algorithm, env=args.env, plan="synchronous")
    session = setup.prepare(config).session
    job = session.job
    with contextlib.closing(job.source.host(job.num_envs, 0)) as env:
        stages = make_stages(session, env)
        for stage in stages.values():
            stage()  # compiles
        seconds: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(args.rounds):
            for name, stage in stages.items():
                began = time.perf_counter()
                stage()
                seconds[name].append(time.perf_counter() - began)
    steps = job.steps_per_iteration
    median = {name: statistics.median(values) for name, values in seconds.items()}
    bound = steps / sum(value for name, value in median.items() if name != "whole")
    for name, value in median.items():
        print(f"{name:10} {steps / value:10,.0f} env steps/s")
    print(f"{'bound':10} {bound:10,.0f} env steps/s")
    ratio = steps / median["whole"] / bound
    print(f"whole / bound: {ratio:.3f}  (medians of {args.rounds} rounds of {steps} env steps)")


def make_stages(session: Session, env: Any) -> dict[str, Callable[[], object]]:
    """Returns functions that run one iteration of each part, and of the whole."""
    job = session.job
    spec, source = job.source.spec, job.source
    options = adapter.options(spec.id, source.options, source.atari_preset, training=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns about the precision of float64 bounds
        bare = envpool.make_gymnasium(spec.id, num_envs=job.num_envs, **options)
        obs, _ = bare.reset()
    rng = np.random.default_rng(0)
    shape = (job.rollout_length, job.num_envs, *spec.action.shape)
    if isinstance(spec.action, Box):
        actions = rng.uniform(spec.action.low, spec.action.high, shape).astype(np.float32)
    else:
        actions = rng.integers(
            0, getattr(spec.action, "n", None) or spec.action.nvec, shape, np.int32
        )

    device, algorithm = job.mesh.devices.flat[0], job.algorithm[""]
    variables, core, keys = jax.device_put(
        (
            algorithm.init(jax.random.key(0)),
            algorithm.initial_core(job.num_envs),
            jax.random.split(jax.random.key(0), job.num_envs),
        ),
        device,
    )
    policy = jax.jit(algorithm.policy)
    programs = compile_acting(
        job.algorithm, env.spec, job.mesh, job.rollout_length, session.key(Stream.ACT)
    )
    actor = HostActor(job.algorithm, env, job.mesh, job.rollout_length, programs)
    update, key = compile_update(job.learner, job.mesh), session.key(Stream.LEARN)
    state, thread = session.initial_state(), Caller("the environments")
    rollout, _, _ = actor.rollout(state.variables, state.iteration, state.env_step)

    def step_env() -> None:
        for action in actions:
            bare.step(action)

    def infer() -> None:
        for _ in range(job.rollout_length):
            np.asarray(policy(variables, obs, core, Context(keys))[0])

    def learn() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(update(state, rollout, key))

    def whole() -> None:
        nonlocal rollout
        fill = partial(actor.rollout, state.variables, state.iteration, state.env_step)
        rollout, _, _ = thread.call(fill)  # as the plan does
        learn()

    return {"env": step_env, "inference": infer, "update": learn, "whole": whole}


if __name__ == "__main__":
    main()
