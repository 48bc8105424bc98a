"""Presets: the flags that each algorithm gets for a kind of task, as a table.

A row lists the flags that differ from the defaults of ``Train`` and of the algorithm. A comment
names the source of its values; "measured" means the runs of ``docs/learning.md``, which also says
on which tasks values were tuned.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxrl_dist.algorithms import planned
from jaxrl_dist.lazy import observations, spaces
from jaxrl_dist.types import EnvSpec

KINDS = {
    "classic_control": "classic control, discrete actions",
    "classic_control/continuous": "classic control, continuous actions",
    "box2d": "Box2D, discrete actions",
    "box2d/continuous": "Box2D, continuous actions",
    "mujoco/continuous": "MuJoCo",
    "minatar": "MinAtar",
    "atari": "Atari",
    "bsuite": "bsuite",
    "craftax": "Craftax",
    "game": "games of several players",
    "table": "categories as observations",
    "image": "other images",
    "unknown": "other vectors, discrete actions",
    "unknown/continuous": "other vectors, continuous actions",
}
"""The kinds of tasks that the table's rows distinguish, with their names in the documentation."""


def kind_of(spec: EnvSpec) -> str:
    """Returns the kind of a task, one of ``KINDS``."""
    family = spec.family
    # without EnvPool's wrappers: colours, and rewards of any size
    if family == "atari" and spec.backend != "envpool":
        family = "unknown"
    if family in ("atari", "minatar", "bsuite", "craftax", "game"):
        return family
    parts = spaces.leaves(observations.input_space(spec)).values()
    if not any(isinstance(part, spaces.Box) for part in parts):
        return "table"
    if any(map(spaces.is_image, parts)):
        return "image"
    suffix = "/continuous" if continuous(spec) else ""
    kind = family + suffix
    if kind in KINDS:
        return kind
    return "unknown" + suffix


REPORT_INTERVALS = {
    "classic_control": 3_200,
    "mujoco/continuous": 5_000,
    "minatar": 20_000,
    "atari": 100_000,
}
"""Env steps between two reports, by kind of task: some 50 reports in a usual run.
Rows of ``TABLE`` have others."""
REPLAYING = {"report_interval": 2_000, "return_window": 2_000}
"""Where actions are continuous, for algorithms that replay, which need fewer steps."""


def continuous(spec: EnvSpec) -> bool:
    """Returns whether all parts of an action are vectors of numbers."""
    return all(isinstance(part, spaces.Box) for part in spaces.leaves(spec.action).values())


def row(algorithm: str, spec: EnvSpec) -> dict[str, Any]:
    """Returns an algorithm's flags for a task: its rows ``any``,
    ``continuous`` or ``discrete``, and the task's kind.

    Each row overrides the ones before it.
    """
    names = "any", "continuous" if continuous(spec) else "discrete", kind_of(spec)
    return {flag: value for name in names for flag, value in TABLE[algorithm].get(name, {}).items()}


def report_interval(spec: EnvSpec, *, replays: bool) -> dict[str, int]:
    """Returns the fields for the reports of any algorithm on a
    kind of task that are not the defaults of ``Train``.

    Args:
      replays: whether it has a replay memory.
    """
    kind = kind_of(spec)
    if kind in REPORT_INTERVALS:
        return {"report_interval": REPORT_INTERVALS[kind]}
    if not replays or not continuous(spec):
        return {}
    if kind == "classic_control/continuous":
        return {**REPLAYING, "report_interval": 500}
    return REPLAYING


class TablePresets:
    """The presets of an algorithm of this package."""

    presets: ClassVar[str] = ""
    """The name of its rows in ``TABLE``, which its subclasses have too; empty: none."""

    @classmethod
    def preset(cls, spec: EnvSpec) -> dict[str, Any]:
        """Returns the flags that differ from the defaults for this kind of environment."""
        if cls.presets:
            return row(cls.presets, spec)
        return {}


# fmt: off
TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "classic_control": {
            # RL Zoo's environments and normalisation for Acrobot and MountainCar. CartPole's values
            # of 100 are out of reach of the first updates, so unscaled rewards make errors of
            # values into advantages: 2 of 64 seeds ended below 200, and of 128 with these none
            # below 500. MountainCar, 1M steps: eight of eight seeds reach the goal (-97 to -106),
            # six without these, four with scaled rewards alone. CartPole with 8 environments
            # drifted off the track in 1 of 64.
            "num_envs": 16, "normalize_observations": True, "scale_rewards": True,
        },
        "continuous": {
            # Schulman et al. (2017), table 3, with minibatches of 256 in place of 64. Unscaled,
            # large returns would drown the policy gradient.
            "num_envs": 8, "rollout_length": 128, "learning_rate": 3e-4, "num_epochs": 10, "entropy_coefficient": 0.0,
            "scale_rewards": True,
        },
        "classic_control/continuous": {
            # With 8 environments and a discount of 0.99, the greedy policy may hold Pendulum
            # sideways forever. With independent noise it learns to stand still in
            # MountainCarContinuous. Correlations of 0.6 and 0.7 solve that in eight of eight seeds
            # (0.5: four of five), and from 0.8 on Pendulum gets worse.
            "num_envs": 16, "num_minibatches": 8, "discount": 0.95, "noise_correlation": 0.6,
        },
        "box2d": {
            # RL Zoo's for LunarLander-v2, with rollouts of half the length. Measured there: batches
            # of 256 instead of 64 get half the return.
            "num_envs": 16, "rollout_length": 512, "num_minibatches": 128, "learning_rate": 3e-4, "discount": 0.999,
            "gae_lambda": 0.98,
        },
        "box2d/continuous": {
            # RL Zoo's for LunarLanderContinuous-v2, with rollouts of half the length and 10 epochs.
            # With its 4, two of five seeds end below 240 there, although training episodes return
            # 265. With a standard deviation of 0.5 at the start, two of three seeds do not learn to
            # walk in BipedalWalker.
            "num_envs": 16, "rollout_length": 512, "num_minibatches": 128, "discount": 0.999, "gae_lambda": 0.98,
            "scale_rewards": False,
        },
        "mujoco/continuous": {
            # Andrychowicz et al. (2021), section 3.3: normalised observations. They begin with a
            # standard deviation of 0.5 (section 3.2), with which Walker2d returned 2170 in the mean
            # of three seeds; 0.7 returned 3630 and 1 returned 3750. HalfCheetah returned 6090, 5240
            # and 2120 with these. Of averages over 10k, 30k and 100k steps, the last did best:
            # 3557, 915 and 3208 on Hopper; the newest parameters 2090, 836 and 3069.
            "num_envs": 64, "rollout_length": 32, "num_minibatches": 32,
            "normalize_observations": True, "initial_std": 0.7, "ema_steps": 100_000,
        },
        "minatar": {
            # PureJaxRL's step size, batches and activation, without its annealing and its clipping
            # of values. These games need a large step size, which large batches allow.
            "num_envs": 64, "rollout_length": 128, "learning_rate": 5e-3, "num_minibatches": 8, "activation": "relu",
        },
        "atari": {
            # Schulman et al. (2017), table 5,
            # with the later changes of CleanRL's ppo_atari_envpool.
            "num_envs": 8, "rollout_length": 128, "learning_rate": 2.5e-4, "clip_epsilon": 0.1,
            "value_clip_epsilon": 0.1, "evaluation_episodes": 10, "scale_rewards": False,
        },
        "image": {
            # Atari's, with rewards of any size.
            "num_envs": 8, "rollout_length": 128, "learning_rate": 2.5e-4, "scale_rewards": True,
        },
        "bsuite": {
            # With few episodes at a time the policy converges too early. A recurrent core also
            # needs this many sequences to fill its minibatches on eight devices. Rewards are small
            # already.
            "num_envs": 32, "scale_rewards": False,
        },
        "craftax": {
            # Craftax_Baselines' ppo.py, the code of Matthews et al. (2024), without its annealing
            # of the step size and its clipping of values.
            "num_envs": 1024, "rollout_length": 64, "num_minibatches": 8, "learning_rate": 2e-4, "gae_lambda": 0.8,
            "max_gradient_norm": 1.0, "hidden_sizes": (512, 512, 512), "report_interval": 65_536,
        },
        "game": {
            # Measured, in self-play. A policy that knows only a few lines of play fails where an
            # opponent leaves them, so entropy gets a large weight. Advantages keep their size,
            # which falls as the players become equals.
            "num_envs": 64, "rollout_length": 64, "num_minibatches": 8, "torso": "mlp", "entropy_coefficient": 0.1,
            "normalize_advantages": False,
        },
        "table": {
            # Rewards are rare: without large batches and more entropy the policy only learns to
            # avoid penalties and never reaches the goal.
            "num_envs": 32, "rollout_length": 128, "num_minibatches": 8, "entropy_coefficient": 0.03,
            "scale_rewards": True,
        },
    },
    "a2c": {
        "any": {"rollout_length": 16},
        # Unscaled, Pendulum's returns of -1000 drown the policy gradient.
        "continuous": {
            "learning_rate": 2e-3, "scale_rewards": True, "gae_lambda": 0.95, "entropy_coefficient": 0.0,
        },
        "classic_control/continuous": {"discount": 0.95},  # PPO's
        "box2d": {
            # Discount and entropy are RL Zoo's for LunarLander-v2. Its 5 steps of 8 environments
            # climb to 120 and fall again, unless the step size falls with them; 16 steps of 32 hold
            # 150 (training episodes, one seed).
            "num_envs": 32, "learning_rate": 1e-3, "discount": 0.995, "gae_lambda": 0.95, "entropy_coefficient": 1e-5,
        },
        "atari": {
            # Mnih et al. (2016), section 8 of the supplement,
            # with the environments of OpenAI baselines' A2C.
            "num_envs": 16, "rollout_length": 5, "evaluation_episodes": 10, "scale_rewards": False,
        },
        "minatar": {
            # PPO's step size and activation; measured, one seed each. With RMSProp, Breakout stayed
            # at 6 for 1M steps and Asterix below 1; with Adam they returned 24 and 35. With 64
            # environments, updates are too few.
            "num_envs": 32, "learning_rate": 5e-3, "optimizer": "adam", "activation": "relu",
        },
        "table": {"learning_rate": 2e-3, "scale_rewards": True},  # rare rewards
    },
    "pg": {
        "any": {"num_envs": 8, "rollout_length": 128},
        # Unscaled, Pendulum's gradients are a thousand times
        # longer than the norm they are clipped to.
        "continuous": {"scale_rewards": True},
        "classic_control/continuous": {"discount": 0.95},  # PPO's
    },
    "impala": {
        # The gradients of policy and value are clipped together,
        # and that of large values would drown the policy's.
        "any": {"plan": "asynchronous", "num_envs": 16, "rollout_length": 16, "scale_rewards": True},
        "atari": {
            # Espeholt et al. (2018), table G.1, with the Nature network and the gradient norms of
            # the other tasks; rewards are clipped.
            "num_envs": 32, "rollout_length": 20, "learning_rate": 6e-4, "scale_rewards": False,
        },
        "minatar": {"num_envs": 32, "learning_rate": 5e-3, "activation": "relu"},  # A2C's
        "continuous": {"entropy_coefficient": 0.0, "trace_lambda": 0.95},  # A2C's
        "classic_control/continuous": {
            # Discount and correlation are PPO's. The policy acts two updates late. With rollouts of
            # 16 and a step size of 1e-3 it sticks at Pendulum's bounds in two of five seeds; with
            # these and independent noise, in 1 of 14.
            "rollout_length": 8, "learning_rate": 7e-4, "discount": 0.95, "noise_correlation": 0.6,
        },
    },
    "dqn": {
        "any": {"num_envs": 8, "rollout_length": 4},
        "classic_control": {
            # Five seeds each. MountainCar, 200k steps: without repeated random actions three never
            # reach the goal; with them and a target of every 500 updates, one does not. CartPole,
            # 500k steps: with a final epsilon of 0.02, with random actions that last long in all
            # environments, or with a memory of only the latest steps, the policy may come to fail
            # again.
            "replay_capacity": 1_000_000, "replay_ratio": 0.25, "target_period": 150, "epsilon_end": 0.05,
            "ez_greedy": True,
        },
        "minatar": {
            # Young and Tian (2019), table 1, with double Q-learning and an update each fourth step.
            # Their 2.5e-4 is of RMSProp: with Adam, Asterix returned 0.85 after 2M steps. 1e-4 is
            # the step size of CleanRL's dqn_atari; after 400k steps Asterix returned 10.6 in
            # training, and with returns of 3 steps 3 (one seed each).
            "batch_size": 32, "replay_ratio": 0.25, "learning_starts": 5_000, "learning_rate": 1e-4, "n_step": 1,
            "epsilon_end": 0.1, "epsilon_steps": 100_000, "td_loss": "huber",
        },
        "atari": {
            # Mnih et al. (2015), extended data table 1, with Adam's step size, the target's period
            # (1,000 steps) and the final epsilon of CleanRL's dqn_atari, and double Q-learning with
            # returns of 3 steps as in Hessel et al. (2018). The memory is a tenth of the paper's 1M
            # steps, which take 7 GB.
            "batch_size": 32, "replay_ratio": 0.25, "learning_starts": 50_000, "learning_rate": 1e-4,
            "epsilon_steps": 1_000_000, "td_loss": "huber", "evaluation_episodes": 10,
        },
    },
    "rainbow": {
        "any": {"num_envs": 8, "rollout_length": 4},
        "atari": {
            # Hessel et al. (2018), table 1, where 4 frames are a step: 80K frames before the first
            # update, and a new target every 32K frames. The memory is a tenth of the paper's 1M
            # steps, which take 7 GB.
            "batch_size": 32, "replay_ratio": 0.25, "learning_starts": 20_000, "learning_rate": 6.25e-5,
            "target_period": 2_000, "evaluation_episodes": 10,
        },
        "minatar": {
            # Obando-Ceron and Castro (2021), without their values up to 100, and with noisy layers
            # and returns of one step. After 400k steps Asterix returned 4.1 in training; with
            # returns of 3 steps 1.5, and then with values up to 50 1.3 (one seed each).
            "batch_size": 32, "replay_ratio": 0.25, "learning_starts": 5_000, "learning_rate": 1e-4, "n_step": 1,
            "value_min": 0.0, "value_max": 20.0,
        },
        # Rewards are at most 1, so returns at most 1 / (1 - discount).
        "classic_control": {"value_min": -100.0, "value_max": 100.0, "replay_ratio": 0.25},
    },
    "pqn": {
        "any": {"num_envs": 32, "rollout_length": 32},
        # Both are from the authors' purejaxql, without annealing the step size.
        "minatar": {
            "num_envs": 128, "num_epochs": 2, "num_minibatches": 32, "q_lambda": 0.65, "epsilon_steps": 1_000_000,
        },
        "atari": {
            "num_envs": 128, "num_epochs": 2, "num_minibatches": 32, "q_lambda": 0.65, "epsilon_steps": 1_000_000,
            "learning_rate": 2.5e-4, "epsilon_end": 0.001, "evaluation_episodes": 10,
        },
    },
    "r2d2": {
        "any": {"num_envs": 16, "rollout_length": 8},
        "atari": {
            # Kapturowski et al. (2019), section 2.3 and appendix, with fewer environments and less
            # capacity for one host. An update uses 5,120 steps, so each step is used about five
            # times. Values are rescaled, so rewards are not clipped; losing a life does not end the
            # episode (protocol of Machado et al. 2018).
            "atari_preset": "machado", "num_envs": 64, "core_size": 512, "rollout_length": 16, "burn_in": 40,
            "sequence_length": 80, "batch_size": 64, "replay_ratio": 1 / 1024, "replay_capacity": 1_000_000,
            "learning_starts": 50_000, "learning_rate": 1e-4, "discount": 0.997, "target_period": 2500,
            "evaluation_episodes": 10,
        },
    },
    **planned.TABLE,
    "td3": {
        "any": {"num_envs": 8, "rollout_length": 1},
        # Here small networks do as well in a tenth of the time.
        "classic_control/continuous": {"hidden_sizes": (64, 64), "batch_size": 128},
        # These tasks need many steps, and a long random phase covers more states.
        "mujoco/continuous": {"learning_starts": 10_000, "evaluation_episodes": 10},
    },
    "sac": {
        "any": {"num_envs": 8, "rollout_length": 1},
        "discrete": {
            "rollout_length": 4, "replay_ratio": 0.25, "replay_capacity": 100_000, "hidden_sizes": (128, 128),
            "n_step": 3, "target_rate": 0.02, **REPLAYING,
        },
        "atari": {
            # CleanRL's sac_atari, after Christodoulou (2019). It copies the critics to their
            # targets every 8,000 steps, its target entropy is 0.89 log n, and Adam's epsilon 1e-4.
            # The memory is a tenth of its 1M steps, which take 7 GB.
            "batch_size": 64, "learning_starts": 20_000, "learning_rate": 3e-4, "n_step": 1, "target_rate": 0.005,
            "report_interval": 100_000, "evaluation_episodes": 10,
        },
        "minatar": {
            # Atari's. Asterix returned 47 after 400k steps. With returns of 3 steps it rose to 2.7
            # and fell again, and with batches of 32 and a third of the step sizes it returned 8.7
            # (one seed each).
            "batch_size": 64, "learning_starts": 20_000, "learning_rate": 3e-4, "n_step": 1, "target_rate": 0.005,
            "report_interval": 20_000,
        },
        "classic_control/continuous": {
            # As TD3's. With this correlation MountainCarContinuous is solved in three of three
            # seeds; with 0.5, and with independent noise, it is not (one seed each).
            "hidden_sizes": (64, 64), "batch_size": 128, "actor_learning_rate": 1e-3, "noise_correlation": 0.9,
        },
        "mujoco/continuous": {
            # Haarnoja et al. (2018), table 1. On Hopper a seed returned
            # 956 after 200k steps with 1e-3, 3156 with 3e-4.
            "learning_rate": 3e-4, "learning_starts": 5_000, "evaluation_episodes": 10,
        },
    },
    "iql": {
        "any": {"num_envs": 8, "rollout_length": 1},
        "discrete": {"rollout_length": 4, "replay_ratio": 0.25, "replay_capacity": 100_000, **REPLAYING},
        "mujoco/continuous": {"learning_starts": 5_000, "evaluation_episodes": 10},  # SAC's
    },
    "marwil": {
        # each step is used 64 times, as BC's are
        "any": {"num_envs": 8, "rollout_length": 32, "replay_ratio": 1 / 16},
        "continuous": {"scale_rewards": True},  # as A2C's
    },
    "bc": {"any": {"num_envs": 8, "rollout_length": 8, "replay_ratio": 0.25}},
    "es": {
        "any": {"num_envs": 64, "report_interval": 100_000, "return_window": 100_000},
    },
    "ars": {
        # Version V2 of the paper; images and categories are scaled by the networks themselves.
        "any": {
            "num_envs": 32, "report_interval": 20_000, "return_window": 100_000, "normalize_observations": True,
        },
        "classic_control/continuous": {
            # A linear policy cannot swing a pendulum up: measured.
            "num_envs": 16, "hidden_sizes": (32, 32), "activation": "relu", "noise_std": 0.3, "learning_rate": 0.3,
            "top_fraction": 1.0,
        },
        **{kind: {"normalize_observations": False} for kind in ("table", "image", "minatar", "atari")},
    },
}
# fmt: on
