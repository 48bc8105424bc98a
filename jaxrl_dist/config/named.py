"""Names of algorithms, and presets with names of their own: an algorithm as a paper combines it,
or under a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_dist.checks import did_you_mean, shown
from jaxrl_dist.config.synonyms import OF_AGENTS
from jaxrl_dist.config.values import Fields
from jaxrl_dist.errors import ConfigError

_CLASSES = "PPO A2C PG IMPALA APPO DQN Rainbow PQN R2D2 AlphaZero MuZero QMIX DDPG TD3 SAC IQL MARWIL BC ES ARS"
ALGORITHMS = {name.lower(): name for name in _CLASSES.split()}
"""The module and the config class of each algorithm."""

# fmt: off
PRESETS: dict[str, tuple[str, Fields]] = {
    "apex": ("dqn", {
        # Horgan et al. (2018), sections 4.1 and appendix C, at the size of one host
        "plan": "asynchronous", "num_envs": 16, "rollout_length": 8, "replay_ratio": 0.25, "target_period": 250,
        "learning_rate": 5e-4, "normalize_observations": False, "epsilon_ladder": True, "priority_exponent": 0.6,
        "importance_exponent": 0.4,
    }),
    "apex-ddpg": ("ddpg", {  # section 4.2
        "plan": "asynchronous", "num_envs": 8, "rollout_length": 16, "n_step": 5, "priority_exponent": 0.6,
    }),
    "qrdqn": ("dqn", {
        # Dabney et al. (2018), section 5, with 50 quantiles in place of 200. Their Adam has an
        # epsilon of 0.01 / 32 for the sum over quantiles, and here the loss is the mean.
        "num_atoms": 50, "quantiles": "fixed", "adam_epsilon": 0.01 / 32 / 50,
    }),
    "iqn": ("dqn", {
        # Dabney et al. (2018), https://arxiv.org/abs/1806.06923, sections 3 and 4
        "num_atoms": 8, "quantiles": "implicit", "adam_epsilon": 0.01 / 32 / 8,
    }),
    "tqc": ("sac", {
        # Kuznetsov et al. (2020), appendix B, with two critics as in RL Zoo in place of five. Their
        # Hopper drops 5.
        "num_atoms": 25, "quantiles": "fixed", "drop_quantiles": 2,
    }),
    "vdn": ("qmix", {
        # Sunehag et al. (2017), who do not normalise layers. Without it, values on
        # MPE_simple_spread rose above 0, where no reward is, in one of three seeds.
        "plan": "on_device", "mixer": "vdn", "layer_norm": True,
    }),
    "d4pg": ("ddpg", {
        # Barth-Maron et al. (2018), section 4 and appendix, without priorities and actor threads.
        # Returns of the control suite lie between these bounds.
        "num_atoms": 51, "value_min": -150.0, "value_max": 150.0, "n_step": 5, "noise": "gaussian", "noise_std": 0.3,
    }),
    "td3+bc": ("td3", {
        # Fujimoto and Gu (2021), section 5 and appendix. Its alpha of 2.5 multiplies the value,
        # not the distance.
        "plan": "offline", "normalize_observations": True, "learning_rate": 3e-4, "actor_learning_rate": 3e-4,
        "batch_size": 256, "hidden_sizes": (256, 256), "behaviour_weight": 1 / 2.5, "normalize_q": True,
    }),
    "rebrac": ("td3", {
        # Tarasov et al. (2023), appendix B. Both weights are those of Hopper's medium data: the
        # paper has others for each data set, which are on the algorithm's page.
        "plan": "offline", "learning_rate": 1e-3, "actor_learning_rate": 1e-3, "batch_size": 1024,
        "hidden_sizes": (256, 256, 256), "behaviour_weight": 0.01, "behaviour_penalty": "rebrac",
        "critic_behaviour_weight": 0.01, "normalize_q": True, "critic_layer_norm": True,
    }),
    "a3c": ("a2c", {"plan": "gradients", "num_actors": 4, "scale_rewards": False}),
    "async-dqn": ("dqn", {
        # Mnih et al. (2016), section 4. The plan does not normalise observations. Without replay,
        # experience is correlated. Layer normalisation stabilises learning more than a target
        # network, which would only slow it down (Gallici et al. 2024, section 3).
        "plan": "gradients", "num_actors": 4, "num_envs": 16, "rollout_length": 8, "n_step": 4, "target_period": 1,
        "learning_rate": 3e-4, "epsilon_end": 0.05, "epsilon_steps": 50_000, "ez_greedy": False,
        "normalize_observations": False, "layer_norm": True,
    }),
}
"""Named presets: the algorithm, and the flags that differ from the algorithm's own preset."""
# fmt: on


def data_of(name: str) -> str | None:
    """Returns a placeholder for the data set that an algorithm of this name needs; None: none."""
    _, fields = PRESETS.get(name, ("", {}))
    if fields.get("plan") == "offline":
        return "data/NAME"
    return None


def check_name(name: str) -> None:
    """Raises ``ConfigError`` if no algorithm and no preset has this name."""
    known = [*ALGORITHMS, *PRESETS]
    if name not in known:
        near = did_you_mean(name, known)
        if name.lower() in OF_AGENTS:
            near = f"; {OF_AGENTS[name.lower()]}"
        raise ConfigError(
            f"unknown algorithm {name!r}{near}. To train your own: `jaxrl-dist train FILE.py`; "
            "to load its runs: `load_policy(run_dir, MyPPO)` in Python, "
            "`jaxrl-dist evaluate RUN_DIR --algorithm FILE.py` on the command line. "
            f"Built in: {', '.join(known)}"
        )


def check_algorithm(algorithm: object) -> None:
    """Checks that ``Train.algorithm`` is a name, a config class, a config,
    or a dict of the policies'.

    Raises:
      ConfigError: it is something else.
    """
    if isinstance(algorithm, str):
        check_name(algorithm)
    elif not isinstance(algorithm, Mapping) and not dataclasses.is_dataclass(algorithm):
        raise ConfigError(
            f"algorithm must be a name or a config such as PPO(), not {shown(algorithm)}"
        )
