"""Compiling a learner for a mesh: one program, whatever the number of devices."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxrl_dist.mesh import REPLICATED, ROLLOUT, STATE, Program
from jaxrl_dist.types import Learner


def compile_update(learner: Learner, mesh: Mesh) -> Program:
    """``(state, rollout, key) -> (state, metrics)``: experience divided over the mesh, all else equal on every device.

    The state is donated. The gradients' sums over devices are inside; ``check_vma`` proves that no replica departs.
    """
    return Program(learner.update, mesh, (STATE, ROLLOUT, REPLICATED), (STATE, REPLICATED), donate=(0,))
