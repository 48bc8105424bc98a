"""How exploitable self-play leaves a policy of Kuhn poker:
``python benchmarks/poker.py [--seeds N] [--steps N]``.

PPO plays against copies of itself, which ``--opponent`` names. Each line of the output is JSON: the
exploitability of the mixture of all checkpoints so far, one of which is drawn for each game, and of
the newest alone, at tenths of the run. A last line has that of counterfactual regret minimisation
by iterations.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import tempfile
import time

import jaxrl_dist
from jaxrl_dist.exact.games import Game
from jaxrl_dist.exact.measuring import of_game
from jaxrl_dist.run import checkpoint

ENV = "pgx:kuhn_poker"
ITERATIONS = 1, 3, 10, 30, 100, 300, 1000


def config(seed: int, steps: int, opponent: str, run_dir: str) -> jaxrl_dist.Train:
    """Returns the run's config; it keeps 100 checkpoints.

    The step size falls to zero at the end: schedules count resets too,
    which are a third of these steps.
    """
    ppo = jaxrl_dist.preset(
        "ppo",
        ENV,
        discount=1.0,
        gae_lambda=1.0,
        hidden_sizes=(32,),
        learning_rate=1e-3,
        learning_rate_schedule="linear",
        learning_rate_steps=steps * 3 // 2,
        entropy_coefficient=0.1,
    ).algorithm
    return jaxrl_dist.Train(
        {"new": ppo, "old": opponent},
        env=ENV,
        policies={"new": "player_0", "old": "player_1"},
        num_envs=256,
        rollout_length=16,
        total_env_steps=steps,
        checkpoint_interval=steps // 100,
        keep_checkpoints=100,
        evaluation_episodes=0,
        seed=seed,
        run_dir=run_dir,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60_000_000)
    parser.add_argument("--opponent", default="copy(new,1)", help="as in --policy")
    options = parser.parse_args()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            began, cpu = time.perf_counter(), time.process_time()
            run_dir = f"{folder}/run"
            list(jaxrl_dist.train(config(seed, options.steps, options.opponent, run_dir)))
            said = {
                "seed": seed,
                "wall_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
            }
            numbers = [checkpoint.number_of(path) for path in reversed(checkpoint.saved(run_dir))]
            policies = [
                jaxrl_dist.load_policy(
                    run_dir, checkpoint=number, env_options={"opponents": "self"}
                )
                for number in numbers
            ]
            for count in sorted({max(1, len(policies) * tenth // 10) for tenth in range(1, 11)}):
                played = of_game(policies[:count])
                line = {
                    "env_steps": numbers[count - 1],
                    "mixture": played.mixture,
                    "newest": played.drawn,
                }
                print(json.dumps({**said, **line}), flush=True)
    tests = runpy.run_path(
        str(pathlib.Path(__file__).parents[1] / "tests" / "exact" / "test_exact_games.py"),
        run_name="tests",
    )
    table, states = tests["kuhn"]()
    curve = {n: Game(table).exploitability(tests["cfr"](states, n)) for n in ITERATIONS}
    print(json.dumps({"counterfactual regret minimisation, by iterations": curve}), flush=True)


if __name__ == "__main__":
    main()
