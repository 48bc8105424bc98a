"""Presets of the algorithms that search, as in ``presets``."""

from __future__ import annotations

from typing import Any

# fmt: off
TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "alphazero": {
        "any": {"num_envs": 16, "rollout_length": 32, "scale_rewards": True},
        "classic_control": {
            # Measured on CartPole: the network alone returns 500 after 20k env steps. With
            # observations as they are, training episodes returned 100 to 170 by then.
            "num_epochs": 8, "normalize_observations": True,
        },
        "game": {
            # Measured on tic-tac-toe, with which a network answers nearly every reply after 300k
            # moves. Random moves show it the positions after bad ones.
            "num_envs": 64, "torso": "mlp", "discount": 1.0, "gae_lambda": 0.5, "epsilon": 0.25, "num_simulations": 32,
            "scale_rewards": False,
        },
    },
    "muzero": {
        "any": {"num_envs": 16, "rollout_length": 8},
        "classic_control": {
            # Measured on CartPole. With observations as they are, two of five seeds were near 120
            # or 200 after 30k. Values of nearly equal actions, scaled to 0 and 1 at each state,
            # made one of five greedy policies return 179 at the end of 100k steps that had returned
            # 500. With priorities and weights of exponent 1 (Schrittwieser et al. 2020, appendix G)
            # one returned 440 after 45k steps, without 450 after 19k. A memory of 100k steps has
            # policies of old searches.
            "normalize_observations": True, "search": "puct", "value_bounds": "tree", "hidden_sizes": (64,),
            "state_size": 64, "num_atoms": 51, "value_limit": 500.0, "n_step": 20, "replay_capacity": 16_384,
        },
        "minatar": {
            # Sizes for a CPU; not measured to the end of a run.
            # DQN's number of steps before the first update.
            "num_envs": 64, "search": "puct", "num_atoms": 51, "value_limit": 300.0, "n_step": 10,
            "replay_ratio": 0.125, "replay_capacity": 131_072, "learning_rate": 5e-4, "learning_starts": 5_000,
        },
    },
}
# fmt: on
