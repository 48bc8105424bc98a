"""Measures the gain of overlapping acting and learning.

    python benchmarks/overlap.py impala --env envpool:Pong-v5

Times only the actors (their samples are discarded), only the learner (it learns from one batch
repeatedly), and both together under the plan ``asynchronous``, in turn. On shared cores, taking
turns would give ``1 / (1/acting + 1/learning)``, and a run should not be much slower. On separate
devices, the slower of the two bounds the run. Flags of ``train`` may follow, such as
``--num-envs 16``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable

import jax

from jaxrl_dist import flow
from jaxrl_dist.actors.pool import ParamStore
from jaxrl_dist.commands import flags
from jaxrl_dist.config.train import Train
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.asynchronous import asynchronous
from jaxrl_dist.plans.dataflow import start_actors
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.threaded import exchange
from jaxrl_dist.rng import Stream
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm")
    parser.add_argument("--env", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="of each way in a round")
    args, more = parser.parse_known_args()

    more += [
        "--env",
        args.env,
        "--plan",
        "asynchronous",
        "--total-env-steps",
        str(10**9),
        "--report-interval",
        "1",
    ]
    session = setup.prepare(
        *resolved(Train(args.algorithm), flags.parse_train(args.algorithm, more))
    ).session
    job = session.job
    assert job.algorithm[""].replay is None, "this measures plans that learn from each rollout once"

    steps = args.iterations * job.steps_per_iteration
    rates: dict[str, list[float]] = {"acting": [], "learning": [], "together": []}
    for _ in range(args.rounds):
        for name, way in (("acting", act), ("learning", learn), ("together", together)):
            rates[name].append(steps / way(session, args.iterations))
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in median.items():
        print(f"{name:10} {value:10,.0f} env steps/s")
    turns = [1 / (1 / a + 1 / b) for a, b in zip(rates["acting"], rates["learning"], strict=True)]
    slower = [min(pair) for pair in zip(rates["acting"], rates["learning"], strict=True)]
    for name, bounds in (("taking turns", turns), ("the slower", slower)):
        ratios = sorted(rate / bound for rate, bound in zip(rates["together"], bounds, strict=True))
        print(
            f"together / {name}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def act(session: Session, iterations: int) -> float:
    """Returns the seconds that the actors take without the learner."""
    job = session.job
    store = ParamStore(job.pool.meshes)
    store.publish(session.initial_state())
    with contextlib.closing(start_actors(session, store, exchange(session))) as pool:
        rounds = flow.batch(flow.gather_async(pool.streams), job.pool.num_actors)
        return timed(lambda: next(rounds), iterations)


def learn(session: Session, iterations: int) -> float:
    """Returns the seconds that the updates take without the actors."""
    job = session.job
    state, key, update = (
        session.initial_state(),
        session.key(Stream.LEARN),
        compile_update(job.learner, job.mesh),
    )
    store = ParamStore(job.pool.meshes)
    store.publish(state)
    with contextlib.closing(start_actors(session, store, exchange(session))) as pool:
        samples = next(flow.batch(flow.gather_async(pool.streams), job.pool.num_actors))
        (rollout,) = exchange(session).join(samples)

    def once() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(update(state, rollout, key))

    return timed(once, iterations)


def together(session: Session, iterations: int) -> float:
    """Returns the seconds that a run takes."""
    with contextlib.closing(asynchronous(session)) as reports:
        return timed(lambda: next(reports), iterations)


def timed(once: Callable[[], object], iterations: int) -> float:
    """Returns the seconds of ``iterations`` calls, after two that compile and fill queues."""
    for _ in range(2):
        once()
    began = time.perf_counter()
    for _ in itertools.repeat(None, iterations):
        once()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
