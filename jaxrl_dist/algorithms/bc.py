"""Behavioural cloning: Pomerleau (1988), "ALVINN: An Autonomous Land Vehicle in a Neural
Network".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms.marwil import MARWIL


@dataclasses.dataclass(frozen=True)
class BC(MARWIL, beta=0.0, value_coefficient=0.0, n_step=1, batch_size=256):
    """Behavioural cloning: MARWIL that imitates all actions of its data alike,
    and learns no values.
    """

    presets = "bc"

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a core: a quarter of the windows,
        each of 16 examples.
        """
        flags = {"batch_size": cls.batch_size, **preset}
        return {"n_step": 16, **flags, "batch_size": max(1, flags["batch_size"] // 4)}
