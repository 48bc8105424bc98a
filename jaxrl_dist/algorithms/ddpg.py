"""Deep deterministic policy gradient: Lillicrap et al. (2016), https://arxiv.org/abs/1509.02971."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.td3 import TD3


@dataclasses.dataclass(frozen=True)
class DDPG(
    TD3, num_critics=1, actor_period=1, target_noise=0.0, noise="ornstein_uhlenbeck", noise_std=0.2
):
    """Deep deterministic policy gradient (Lillicrap et al. 2016):
    TD3 with one critic and without TD3's additions.

    The exploration noise is the paper's (section 7).
    """
