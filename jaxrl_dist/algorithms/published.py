"""Published hyperparameters, which ``--published`` uses in place of the presets for kinds of tasks.

A row comes from a paper, or from the authors of an environment. Its values are in the units of the
flags here: an Atari step is 4 of a paper's frames, and losses are means where papers sum. A comment
names settings without a flag.
"""

from __future__ import annotations

from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import EnvSpec


def row(algorithm: str, spec: EnvSpec) -> dict[str, Any]:
    """Returns the published flags of an algorithm for an environment.

    Raises:
      ConfigError: there are none.
    """
    rows = TABLE.get(algorithm, {})
    for name in (spec.family, f"{spec.backend}:{spec.id}"):
        if name in rows:
            return rows[name]
    known = ", ".join(
        f"{algorithm} on {where}" for algorithm, rows in TABLE.items() for where in rows
    )
    raise ConfigError(
        f"--published has no values for {algorithm} on {spec.backend}:{spec.id}; it has: {known}"
    )


# fmt: off
_BRAX_PPO = {
    # Brax's notebooks/training.ipynb, and the defaults of its brax/training/agents/ppo/train.py and
    # networks.py (clip range, GAE, swish). Its rollouts are cut after unroll_length steps; here
    # they are as long as all steps that an environment makes between two updates. Its policy
    # network is 4 x 32, and its actions are squashed by tanh, with a standard deviation that
    # depends on the observation. Rewards are scaled by a constant. The notebook's physics are
    # `--env-options backend=positional`.
    "learning_rate": 3e-4, "gae_lambda": 0.95, "clip_epsilon": 0.3, "value_coefficient": 0.5, "num_minibatches": 32,
    "max_gradient_norm": 1e9, "activation": "silu", "hidden_sizes": (256,) * 5, "normalize_observations": True,
    "scale_rewards": False, "initial_std": 1.0,
}
_BRAX_SAC = {
    # Brax's notebooks/training.ipynb, and the defaults of brax/training/agents/sac/train.py and
    # losses.py (target entropy). It scales rewards by a constant, and the temperature's step size
    # is 3e-4. The notebook's physics are `--env-options backend=positional`.
    "num_envs": 128, "rollout_length": 1, "discount": 0.997, "learning_rate": 6e-4, "actor_learning_rate": 6e-4,
    "replay_capacity": 1_048_576, "learning_starts": 8_192, "target_rate": 0.005, "hidden_sizes": (256, 256),
    "normalize_observations": True,
}
TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "dqn": {
        "atari": {
            # Mnih et al. (2015), extended data table 1. Its RMSProp with momentum has no
            # counterpart: the step size is that of Adam in Hessel et al. (2018). The memory takes 7
            # GB.
            "batch_size": 32, "replay_capacity": 1_000_000, "frame_stack": 4, "target_period": 10_000,
            "discount": 0.99, "replay_ratio": 0.25, "learning_rate": 6.25e-5, "epsilon_start": 1.0,
            "epsilon_end": 0.1, "epsilon_steps": 1_000_000, "learning_starts": 50_000, "n_step": 1, "double": False,
            "td_loss": "huber", "max_gradient_norm": 1e9, "atari_preset": "baselines",
        },
    },
    "rainbow": {
        "atari": {
            # Hessel et al. (2018), table 1 and the appendix's tables. The importance exponent is
            # constant; the paper raises it to 1. The paper's streams of value and advantages have
            # noisy hidden layers each; here both share a plain one. The memory takes 7 GB.
            "learning_starts": 20_000, "learning_rate": 6.25e-5, "epsilon_start": 0.0, "epsilon_end": 0.0,
            "target_period": 2_000, "priority_exponent": 0.5, "importance_exponent": 0.4, "n_step": 3,
            "num_atoms": 51, "value_min": -10.0, "value_max": 10.0, "discount": 0.99, "batch_size": 32,
            "replay_ratio": 0.25, "replay_capacity": 1_000_000, "frame_stack": 4, "max_gradient_norm": 1e9,
            "atari_preset": "baselines",
        },
    },
    "impala": {
        "atari": {
            # Espeholt et al. (2018), table G.1, with its deep network. Adam replaces RMSProp. The
            # limit of the gradient norm is divided by the 32 x 20 steps of a batch, because the
            # paper sums over them.
            "num_envs": 32, "rollout_length": 20, "discount": 0.99, "value_coefficient": 0.5,
            "entropy_coefficient": 0.01, "learning_rate": 6e-4, "learning_rate_schedule": "linear",
            "learning_rate_steps": 50_000_000, "max_gradient_norm": 40 / (32 * 20), "frame_stack": 4,
            "torso": "impala", "scale_rewards": False, "atari_preset": "baselines",
        },
    },
    "ppo": {
        "atari": {
            # Schulman et al. (2017), table 5. Its value loss has no factor of 1/2. The clip range
            # stays constant; the paper anneals it with the step size. Normalised advantages, the
            # limit of the gradient norm and the Nature network are those of the authors' code,
            # OpenAI baselines' ppo2.
            "rollout_length": 128, "learning_rate": 2.5e-4, "learning_rate_schedule": "linear",
            "learning_rate_steps": 10_000_000, "num_epochs": 3, "num_minibatches": 4, "discount": 0.99,
            "gae_lambda": 0.95, "num_envs": 8, "clip_epsilon": 0.1, "value_coefficient": 2.0,
            "entropy_coefficient": 0.01, "value_clip_epsilon": None, "atari_preset": "baselines",
        },
        "craftax:Craftax-Symbolic-v1": {
            # Matthews et al. (2024), appendix,
            # as in the defaults of the authors' Craftax_Baselines/ppo.py.
            "num_envs": 1024, "rollout_length": 64, "learning_rate": 2e-4, "learning_rate_schedule": "linear",
            "learning_rate_steps": 1_000_000_000, "num_epochs": 4, "num_minibatches": 8, "discount": 0.99,
            "gae_lambda": 0.8, "clip_epsilon": 0.2, "value_clip_epsilon": 0.2, "entropy_coefficient": 0.01,
            "value_coefficient": 0.5, "max_gradient_norm": 1.0, "activation": "tanh", "hidden_sizes": (512, 512, 512),
            "scale_rewards": False,
        },
        "brax:ant": {
            **_BRAX_PPO, "num_envs": 4096, "rollout_length": 80, "num_epochs": 4, "discount": 0.97,
            "entropy_coefficient": 1e-2,
        },
        "brax:halfcheetah": {
            **_BRAX_PPO, "num_envs": 2048, "rollout_length": 160, "num_epochs": 8, "discount": 0.95,
            "entropy_coefficient": 1e-3,
        },
        "brax:humanoid": {
            **_BRAX_PPO, "num_envs": 2048, "rollout_length": 160, "num_epochs": 8, "discount": 0.97,
            "entropy_coefficient": 1e-3,
        },
    },
    "sac": {
        "brax:hopper": {**_BRAX_SAC, "batch_size": 512, "replay_ratio": 0.5, "target_entropy": -1.5},
        "brax:walker2d": {**_BRAX_SAC, "batch_size": 128, "replay_ratio": 0.25, "target_entropy": -3.0},
    },
}
# fmt: on
