"""Checks of what goes into environments on the host, and of what comes out."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_dist.envs.base import label_of
from jaxrl_dist.errors import EnvError
from jaxrl_dist.spaces import Box, Part, leaves, num_choices
from jaxrl_dist.types import EnvSpec, PyTree


def checked_action(spec: EnvSpec, action: PyTree, step: int) -> PyTree:
    """Clips continuous actions ``[B, ...]`` to their bounds: an environment may not check them,
    or may crash.

    Raises:
      ValueError: an action is not finite, or outside a discrete space.
    """
    if spec.policies:
        return {
            name: checked_action(part, action[name], step) for name, part in spec.policies.items()
        }
    return jax.tree.map(
        lambda space, part: _checked_part(spec, space, part, step), spec.action, action
    )


def _checked_part(spec: EnvSpec, space: Part, action: np.ndarray, step: int) -> np.ndarray:
    action = np.asarray(action)
    if isinstance(space, Box):
        bad = ~np.isfinite(action)
        action = np.clip(action, space.low, space.high)
    else:
        bad = (action < 0) | (action >= np.asarray(num_choices(space)))
    if bad.any():
        index = int(np.argwhere(bad)[0, 0])
        raise ValueError(
            f"{label_of(spec)}: action {action[index]} of environment {index // spec.num_agents} at step "
            f"{step} lies outside {space}"
        )
    return action


def check_finite(spec: EnvSpec, step: int, field: str, values: PyTree) -> None:
    """Checks that observations or rewards of host environments are finite; integers always are.

    Args:
      step: counted since the environments were made; the first reset counts as step 0.
      field: ``observation`` or ``reward``.
      values: ``[B, ...]``, or a dict of such parts.

    Raises:
      EnvError: a value is NaN or infinity; the message names the first such environment.
    """
    for path, part in leaves(values).items():
        if part.dtype.kind not in "biu" and not np.isfinite(part).all():
            index = int(np.argwhere(~np.isfinite(part))[0, 0])
            shown = f"{path} {part[index]}" if path else part[index]
            owner = spec.policies.get(path.split("/")[0], spec)  # whose rows these are
            raise not_finite(spec, index // owner.num_agents, step, field, shown)


def not_finite(spec: EnvSpec, index: int, step: int, field: str, value: object = None) -> EnvError:
    """Returns the error for environment ``index`` that gave NaN or infinity;
    ``value`` is that value, if known.
    """
    kind = "an observation" if field == "observation" else f"a {field}"
    message = f"{label_of(spec)}: environment {index} at step {step} gave {kind} that is not finite"
    if value is None:
        return EnvError(message)
    return EnvError(f"{message}: {' '.join(str(value).split())[:80]}")
