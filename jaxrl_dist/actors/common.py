"""What acting does alike on device and host."""

from __future__ import annotations

from jaxrl_dist.networks import reset_core
from jaxrl_dist.types import Algorithm, PyTree, Timestep


def after_step(algorithm: Algorithm, core: PyTree, initial_core: PyTree, action: PyTree, step: Timestep) -> PyTree:
    """The policy state with which the next observation is met: back to the start where a new episode begins."""
    return reset_core(algorithm.feedback(core, action, step), initial_core, step.valid)
