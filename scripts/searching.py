"""Measures searches by their number of simulations:
``python scripts/searching.py`` prints a row of JSON for each.

For each number of simulations, a policy of MuZero with the preset's model acts on all its
environments at once, as in training. A row holds steps a second of one process (the best of five
times), and the bytes that one compiled call needs beside its arguments, most of which are the
trees. ``--memory`` counts bytes alone, which other work on the machine does not change; measure
times on idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_dist.algorithms.muzero import MuZero
from jaxrl_dist.envs.source import find
from jaxrl_dist.types import Context

SIMULATIONS = 1, 8, 16, 32, 64
ENVS = {"CartPole-v1": 16, "Breakout-MinAtar": 64}
"""Environments, and how many act at once."""


def measured(env: str, num_envs: int, simulations: int, *, timed: bool) -> dict[str, Any]:
    """Returns a row of the table."""
    spec = find(env).spec
    config = dataclasses.replace(
        MuZero(
            **{
                name: x
                for name, x in MuZero.preset(spec).items()
                if name in MuZero.__dataclass_fields__
            }
        ),
        num_simulations=simulations,
    )
    algorithm = config.make(spec)
    variables = algorithm.init(jax.random.key(0))
    obs = jnp.zeros((num_envs, *spec.observation.shape), spec.observation.dtype)  # type: ignore[union-attr]
    keys = jax.random.split(jax.random.key(1), num_envs)
    program = jax.jit(
        lambda variables, obs, keys: algorithm.policy(
            variables, obs, (), Context(keys, jnp.float32(0))
        )
    )
    compiled = program.lower(variables, obs, keys).compile()
    needed: Any = compiled.memory_analysis()
    row: dict[str, Any] = {"env": env, "num_envs": num_envs, "simulations": simulations}
    row["bytes"] = needed.temp_size_in_bytes + needed.output_size_in_bytes
    if timed:
        row["steps_per_second"] = round(
            max(_rate(compiled, variables, obs, keys) for _ in range(5))
        )
    return row


def _rate(compiled: Any, variables: Any, obs: jax.Array, keys: jax.Array, calls: int = 50) -> float:
    jax.block_until_ready(compiled(variables, obs, keys))
    began = time.perf_counter()
    for _ in range(calls):
        out = compiled(variables, obs, keys)
    jax.block_until_ready(out)
    return calls * len(keys) / (time.perf_counter() - began)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="count bytes alone")
    flags = parser.parse_args(arguments)
    rows = [
        measured(env, num_envs, simulations, timed=not flags.memory)
        for env, num_envs in ENVS.items()
        for simulations in SIMULATIONS
    ]
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
