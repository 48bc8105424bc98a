"""How near do algorithms come to the exact truth? On random MDPs, whose tables are known.

    python benchmarks/tables.py --algorithms dqn sac

A row is of an algorithm: over the MDPs, the median and the largest error of its action values in
parts of the largest optimal value (of soft ones, where its values contain the entropy), and the
largest regret of its greedy policy in parts of the optimum. ``--list N`` measures how long it takes
to list N states instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import jaxrl_dist
from jaxrl_dist import exact
from jaxrl_dist.exact.measuring import Measure, Truth
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.algorithm import make_algorithm

DISCOUNT = 0.9
COMMON: dict[str, Any] = {"discount": DISCOUNT, "hidden_sizes": (128,), "learning_rate": 1e-3}
REPLAYS: dict[str, Any] = {
    "num_envs": 64,
    "rollout_length": 16,
    "replay_capacity": 2**20,
    "replay_ratio": 1 / 32,
    "batch_size": 256,
}
"""A million env steps: 60,000 have 750 outcomes of each action,
whose mean itself is off by a percent."""
EXPLORES: dict[str, Any] = {"epsilon_end": 1.0}
PLAIN: dict[str, Any] = {"noisy": False, "priority_exponent": None}
"""Noisy layers take the action that looks best, so the others' values stay open;
priorities bias means of outcomes."""
VALUES: dict[str, Any] = {"value_min": 0.0, "value_max": 10.0}
FLAGS: dict[str, dict[str, Any]] = {
    "dqn": {**REPLAYS, **EXPLORES, "n_step": 1, "target_period": 100},
    "rainbow": {**REPLAYS, **EXPLORES, **PLAIN, **VALUES, "n_step": 1, "target_period": 100},
    "qrdqn": {**REPLAYS, **EXPLORES, "n_step": 1, "target_period": 100, "quantile_huber": 0.1},
    "pqn": {**EXPLORES, "q_lambda": 0.0},
    "sac": {**REPLAYS, "temperature": 0.5, "n_step": 1, "actor_learning_rate": 1e-3},
}
"""Hyperparameters, besides those of ``COMMON``; the others are the presets'.
Values of one step are the truth's."""


class Chain:
    """A binary number whose bits an action sets or clears; each is a state."""

    def __init__(self, bits: int) -> None:
        self.bits, self.default_params = bits, 1000

    def observation_space(self, params: int) -> Any:
        return spaces.Box(0, 1, (self.bits,), np.float32)

    def action_space(self, params: int) -> Any:
        return spaces.Discrete(4)

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, Any]:
        state = {"number": jnp.int32(0), "steps": jnp.int32(0)}
        return self._seen(state), state

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: int) -> Any:
        moves = jnp.stack(
            [
                state["number"] * 2,
                state["number"] * 2 + 1,
                state["number"] // 2,
                state["number"] + 1,
            ]
        )
        new = {"number": moves[action] % 2**self.bits, "steps": state["steps"] + 1}
        return self._seen(new), new, jnp.float32(new["number"] == 1), jnp.bool_(False), {}

    def is_truncated(self, state: Any, params: int) -> jax.Array:
        return state["steps"] >= params

    def _seen(self, state: Any) -> jax.Array:
        return (state["number"] >> jnp.arange(self.bits) & 1).astype(jnp.float32)


def list_states(count: int) -> None:
    """Prints how long it takes to list at least so many states, to solve them,
    and to evaluate a policy.
    """
    began = time.perf_counter()
    table = exact.table(Chain((count - 1).bit_length()), max_states=10**7)
    listed = time.perf_counter()
    q = exact.optimal(table, 0.99)
    solved = time.perf_counter()
    residual = np.max(np.abs(exact.backup(table, q, 0.99) - q))
    text = (
        f"{listed - began:.1f} s to list, {solved - listed:.1f} s to a residual of {residual:.1e}"
    )
    print(f"{table.shape[0]:,} states, {table.shape[1]} actions: {text}")


def measured(algorithm: str, table: exact.Table, steps: int, seed: int) -> dict[str, float]:
    """Trains on a table; returns the numbers of ``Measure``."""
    env = exact.TableEnv(table, time_limit=200)
    made = jaxrl_dist.preset(algorithm, env, **{**COMMON, **FLAGS[algorithm]})
    train = dataclasses.replace(
        made,
        total_env_steps=steps,
        seed=seed,
        evaluation_episodes=0,
        report_interval=steps,
        scale_rewards=False,
    )
    train = dataclasses.replace(
        train,
        algorithm=dataclasses.replace(
            train.algorithm, learning_rate_schedule="linear", learning_rate_steps=steps
        ),
    )
    for report in jaxrl_dist.train(train):
        variables = report.variables()
    config, source = resolved(train)
    measure = Measure(make_algorithm(config, source.spec)[""], table)
    return measure(variables, Truth.of(table, DISCOUNT, 200))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="*", default=[*FLAGS])
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--states", type=int, default=20)
    parser.add_argument("--actions", type=int, default=4)
    parser.add_argument("--total-env-steps", type=int, default=2**20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", type=int)
    options = parser.parse_args()
    if options.list:
        list_states(options.list)
        return
    print(
        "| algorithm | MDPs | error of Q, median | largest | regret, largest | optimal actions, least |"
    )
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for algorithm in options.algorithms:
        rows = []
        for number in range(options.tables):
            rng = np.random.default_rng((options.seed, number))
            table = exact.Table.random(rng, options.states, options.actions, 0.1)
            numbers = measured(algorithm, table, options.total_env_steps, number)
            error = numbers["q_error_max"] / numbers["q_largest"]
            rows.append((error, numbers["regret"] / numbers["value_optimal"], numbers["agreement"]))
        errors, regret, agreement = np.array(rows).T
        print(
            f"| {algorithm} | {len(rows)} | {np.median(errors):.2%} | {errors.max():.2%} | {regret.max():.3%} | "
            f"{agreement.min():.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
