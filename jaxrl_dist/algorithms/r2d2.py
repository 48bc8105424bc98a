"""Recurrent replay distributed DQN (R2D2): Kapturowski et al. (2019),
https://openreview.net/forum?id=r1lyTjAqYX.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class R2D2(
    DQN,
    core="gru",
    hidden_sizes=(64,),
    learning_rate=1e-3,
    batch_size=32,
    replay_ratio=1 / 16,
    n_step=5,
    priority_exponent=0.9,
    importance_exponent=0.6,
    target_period=100,
    epsilon_ladder=True,
    dueling=True,
    rescale_values=True,
    adam_epsilon=1e-3,
):
    """Recurrent deep Q-learning from replayed sequences (Kapturowski et al. 2019).

    It is DQN with a recurrent core, an epsilon for each environment, and rescaled values. A window
    has ``burn_in`` steps, ``sequence_length`` training steps, and ``n_step - 1`` more steps for the
    last n-step return.

    Unlike in the paper, windows may start at any step, not at every 40th, and may cross the end of
    an episode, where the core is reset. New windows get the largest priority so far. By default the
    core is a GRU instead of an LSTM, and reads neither the last action nor the last reward.
    """

    presets = "r2d2"

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns the preset as it is: the values of this algorithm are those with a core."""
        return preset

    def validate(self) -> None:
        super().validate()
        if self.core == "none":
            raise ConfigError("r2d2 needs a recurrent core, but --core is none; use dqn")
