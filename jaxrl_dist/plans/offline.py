"""Learning from a data set alone, in one compiled program: no environment is stepped,
except by evaluations.

Source: offline reinforcement learning as surveyed by Levine et al. (2020),
https://arxiv.org/abs/2005.01643.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_dist.plans.on_device import DevicePopulation
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Report

__all__ = ["DevicePopulation", "offline"]


def offline(session: Session) -> Iterator[Report]:
    """Runs ``session`` on its data set, many updates per dispatch: the compiled plan,
    whose acting adds nothing.
    """
    return DevicePopulation([session]).reports(0, session)
