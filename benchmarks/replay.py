"""Measures what a run costs beyond its updates:
``python benchmarks/replay.py dqn --env CartPole-v1``.

Times the updates of an algorithm that replays experience in two ways, in turn: within a run under
the plan ``on_device``, which also steps environments, stores experience and samples windows; and
bare, as one jitted update on the same batch repeatedly. Flags of the algorithm may follow, such as
``--num-envs 8``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh as meshes
from jaxrl_dist.commands import flags
from jaxrl_dist.config.train import Train
from jaxrl_dist.learners import sgd
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.memory import ring
from jaxrl_dist.plans.on_device import on_device
from jaxrl_dist.plans.session import Session
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup
from jaxrl_dist.types import TrainState


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm")
    parser.add_argument("--env", required=True, help="a gymnax environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=1000, help="of each way in a round, about")
    args, more = parser.parse_known_args()

    more += ["--env", args.env, "--num-devices", "1", "--total-env-steps", str(10**9)]
    config, source = resolved(Train(args.algorithm), flags.parse_train(args.algorithm, more))
    replay = setup.prepare(config, source).job.algorithm[""].replay
    assert replay is not None, f"{args.algorithm} replays nothing"
    config = dataclasses.replace(config, report_interval=int(args.updates / replay.ratio))
    session = setup.prepare(config, source).session

    reports = on_device(session)
    while next(reports).updates == 0:
        pass  # the memory fills
    updates = next(reports).updates
    bare = make_bare(session)
    bare(10)  # compiles
    run_rates, bare_rates = [], []
    for _ in range(args.rounds):
        began = time.perf_counter()
        made = next(reports).updates - updates
        updates += made
        run_rates.append(made / (time.perf_counter() - began))
        began = time.perf_counter()
        bare(made)
        bare_rates.append(made / (time.perf_counter() - began))
    ratios = sorted(run / alone for run, alone in zip(run_rates, bare_rates, strict=True))
    print(f"run   {statistics.median(run_rates):10,.0f} updates/s")
    print(f"bare  {statistics.median(bare_rates):10,.0f} updates/s")
    print(
        f"run / bare: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {args.rounds} rounds)"
    )


def make_bare(session: Session) -> Callable[[int], None]:
    """Returns ``(count) -> None``, which makes ``count`` updates on one batch,
    one jitted call each.
    """
    job = session.job
    algorithm, key = job.algorithm[""], jax.random.key(0)
    replay, window = algorithm.replay, algorithm.window
    assert replay is not None and window is not None
    state = state_of(session.initial_state(), "")
    keys = jax.random.split(key, replay.batch_size)

    def draw(state: TrainState) -> object:
        memory = state.memory._replace(added=jnp.full_like(state.memory.added, window))
        windows = ring.gather(
            memory.steps, ring.draw_uniform(memory, key, replay.batch_size, window), window
        )
        return algorithm.postprocess(state.variables, windows, state.context(keys))

    def update(state: TrainState, batch: object, keys: jax.Array) -> tuple[TrainState, object]:
        grads, metrics, _ = sgd.gradient(algorithm, state, batch, keys)
        return sgd.apply(algorithm, state, grads), metrics

    one, batched = meshes.REPLICATED, meshes.BATCH
    batch = meshes.Program(draw, job.mesh, (meshes.STATE,), batched)(state)
    slim = state._replace(memory=())
    program = meshes.Program(update, job.mesh, (one, batched, batched), (one, one), donate=(0,))

    def bare(count: int) -> None:
        nonlocal slim
        for _ in range(count):
            slim, _ = program(slim, batch, keys)
        jax.block_until_ready(slim)

    return bare


if __name__ == "__main__":
    main()
