"""Behavioural cloning: Pomerleau (1988), "ALVINN: An Autonomous Land Vehicle in a Neural Network"."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.marwil import MARWIL


@dataclasses.dataclass(frozen=True)
class BC(MARWIL, beta=0.0, value_coefficient=0.0, n_step=1, batch_size=256):
    """Behavioural cloning: MARWIL that imitates all actions of its data alike, and learns no values."""

    presets = "bc"
