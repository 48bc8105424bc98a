"""What searching algorithms learn, and how well they play:
``python benchmarks/planning.py TASK [--seeds N]``.

Tasks, each of which trains and then judges the network alone and its search:

- ``tic_tac_toe``: games lost among all games that an opponent's every reply can make of them,
  from both sides.
- ``connect_four``: games won of 200 against full searches of ``--depths`` moves,
  from random openings.
- ``cartpole``: return of 100 greedy episodes.

``--run RUN_DIR`` judges a run that has been trained already, and ``--checkpoints`` those of its
checkpoints; where its policy does not plan, ``--simulations`` takes no number. Each line of the
output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_dist
from jaxrl_dist.nn import observations
from jaxrl_dist.play.games import Player
from jaxrl_dist.play.match import match
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.types import Context, PyTree

SELF = {"opponents": "self"}
SIZES = {"hidden_sizes": (256, 256), "num_epochs": 8}
SETTLES = {
    "learning_rate_schedule": "linear",
    "learning_rate_steps": 9_000_000,
    "ema_steps": 200_000,
}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tic_tac_toe": (
        "pgx:tic_tac_toe",
        {"env_options": SELF, "num_simulations": 32, "total_env_steps": 300_000, **SIZES},
    ),
    "connect_four": (
        "pgx:connect_four",
        {
            "env_options": SELF,
            "num_simulations": 32,
            "total_env_steps": 9_000_000,
            "torso": "minatar",
            **SETTLES,
        },
    ),
    "cartpole": ("gymnax:CartPole-v1", {"num_simulations": 16, "total_env_steps": 20_480}),
}
"""The environment of each task, and the fields that differ from AlphaZero's preset."""


def full_search(depth: int) -> Player:
    """Returns the player that searches all moves to a depth, and draws among the best;
    nothing is known of leaves.
    """

    def value(
        step: Callable[..., Any], state: PyTree, legal: jax.Array, key: jax.Array, depth: int
    ) -> jax.Array:
        """The values ``[A]`` of the moves from one position."""

        def of_move(move: jax.Array) -> jax.Array:
            then = step(state, move, key)
            ahead = (
                jnp.max(value(step, then.state, then.obs["mask"], key, depth - 1))
                if depth > 1
                else 0.0
            )
            return then.reward + then.discount * ahead

        return observations.masked(jax.vmap(of_move)(jnp.arange(len(legal))), legal)

    def act(
        variables: Any,
        obs: PyTree,
        legal: jax.Array,
        state: Any,
        keys: jax.Array,
        simulator: Simulator,
    ) -> Any:
        of_row = jax.vmap(lambda state, legal, key: value(simulator.step, state, legal, key, depth))
        drawn = jax.vmap(lambda key: jax.random.uniform(key, legal.shape[1:]))(keys)
        return jnp.argmax(of_row(simulator.state, legal, keys) + 1e-3 * drawn, axis=1), state

    return Player(f"search of {depth}", act, searches=True)


def taken(tree: PyTree, rows: np.ndarray) -> PyTree:
    """Returns these rows of arrays, as numpy arrays."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], jax.device_get(tree))


def padded(rows: int) -> np.ndarray:
    """Returns the indices of so many rows, repeated up to a power of two,
    so that few programs are compiled.
    """
    return np.resize(np.arange(rows), 1 << (rows - 1).bit_length())


def lost_games(policy: Policy) -> dict[str, int]:
    """Counts the games of tic-tac-toe that a greedy policy loses,
    of all that every reply of an opponent can make.

    Games that reach a position by other moves count apart,
    though the policy answers equal positions alike.
    """
    env = policy.source.device()
    assert env.simulate is not None
    state, obs = env.reset(jax.random.split(jax.random.key(0), 1))
    simulator = env.simulate(state)

    @jax.jit
    def choose(states: PyTree, obs: PyTree) -> jax.Array:
        core = policy.algorithm.initial_core(len(jax.tree.leaves(obs)[0]))
        context = Context(simulator=simulator._replace(state=states))
        return policy.algorithm.policy(policy.variables, obs, core, context)[0]

    step = jax.jit(jax.vmap(simulator.step, (0, 0, None)))
    counts = {"games": 0, "lost": 0, "drawn": 0}
    for agent in (0, 1):
        states, seen, games = simulator.state, obs, np.ones(1, np.int64)
        for ply in range(9):
            size, mine = len(games), ply % 2 == agent
            states, seen = taken((states, seen), padded(size))
            legal = seen["mask"][:size]
            moves = (
                np.eye(9, dtype=bool)[np.asarray(choose(states, seen))[:size]] if mine else legal
            )
            rows, actions = np.nonzero(moves & legal)
            if mine:
                assert len(rows) == size, "the policy's moves are legal"
            again = padded(len(rows))
            then = step(taken(states, rows[again]), actions[again], jax.random.key(0))
            then = taken(then, np.arange(len(rows)))
            count, over = games[rows], then.discount == 0
            counts["games"] += int(count[over].sum())
            counts["lost"] += int(count[over & (then.reward > 0)].sum()) * (not mine)
            counts["drawn"] += int(count[over & (then.reward == 0)].sum())
            going = np.flatnonzero(~over)
            if not len(going):
                break
            boards = then.obs["observation"][going].reshape(len(going), -1)
            _, first, inverse = np.unique(boards, axis=0, return_index=True, return_inverse=True)
            games = np.bincount(inverse.reshape(-1), weights=count[going]).astype(np.int64)
            states, seen = taken((then.state, then.obs), going[first])
    return counts


def judge(
    task: str, run_dir: str, checkpoint: int | None, simulations: int | None, depths: Sequence[int]
) -> dict[str, Any]:
    """Returns what a run's policy, or that of a checkpoint, does with this number of
    simulations.
    """
    options = TASKS[task][1].get("env_options")
    policy = jaxrl_dist.load_policy(
        run_dir, checkpoint=checkpoint, num_simulations=simulations, env_options=options
    )
    if task == "tic_tac_toe":
        return dict(lost_games(policy))
    if task == "cartpole":
        return {"return": float(policy.evaluate(100).returns.mean())}
    won = {}
    for plies in depths:
        (result,) = match(policy, full_search(plies), games=200).results
        won[f"won drawn lost, search of {plies}"] = result.counts()
    return won


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[1, 2], help="of the searches to play against"
    )
    parser.add_argument("--run", help="a run that has been trained")
    parser.add_argument(
        "--checkpoints", type=int, nargs="+", default=[None], metavar="STEPS", help="of that run"
    )
    parser.add_argument("--simulations", type=int, nargs="*", default=[0, 32])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other hyperparameters"
    )
    options = parser.parse_args()
    env, fields = TASKS[options.task]
    fields = fields | {
        name: json.loads(text) for name, text in (pair.split("=") for pair in options.set)
    }
    for seed in range(
        options.first_seed, options.first_seed + (1 if options.run else options.seeds)
    ):
        with tempfile.TemporaryDirectory() as folder:
            began, cpu = time.perf_counter(), time.process_time()
            run_dir, said = options.run or f"{folder}/run", dict[str, Any](task=options.task)
            if options.run:
                said["run"] = run_dir
            else:
                config = jaxrl_dist.preset(
                    "alphazero", env, **fields, seed=seed, run_dir=run_dir, evaluation_episodes=0
                )
                list(jaxrl_dist.train(config))
                said |= {"seed": seed, **{k: v for k, v in fields.items() if k != "env_options"}}
                said |= {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
            for checkpoint, simulations in itertools.product(
                options.checkpoints, options.simulations or [None]
            ):
                judged = judge(options.task, run_dir, checkpoint, simulations, options.depths)
                print(
                    json.dumps(
                        {**said, "checkpoint": checkpoint, "played_with": simulations, **judged}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
