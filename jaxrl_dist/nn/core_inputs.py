"""What a recurrent core reads beside the features of an observation: the last action,
and the reward it brought.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import spaces
from jaxrl_dist.nn.config import CoreConfig
from jaxrl_dist.nn.observations import preprocess, side_by_side
from jaxrl_dist.types import EnvSpec, PyTree, Rollout, Timestep


class CoreInputs(NamedTuple):
    """The inputs that ``CoreConfig.core_inputs`` names, as numbers;
    they are 0 at the start of an episode.

    The policy's state is then a dict: the core's state as ``memory``, and each input as float32
    ``[B, size]``. Without inputs it is only the core's state. Sources: Kapturowski et al. (2019),
    section 2.3; Ni et al. (2022), https://arxiv.org/abs/2110.05038, section 4.
    """

    sizes: dict[str, int]
    """Size of each input; empty: the core reads none."""
    actions: Any
    """The space of actions."""

    @classmethod
    def of(cls, config: CoreConfig, spec: EnvSpec) -> CoreInputs:
        """Returns the inputs of a config; actions are encoded like
        observations of the same space, without scaling.
        """
        sizes = {}
        if "action" in config.core_inputs:
            zeros = spaces.zeros(spec.action, 1)
            sizes["action"] = jax.eval_shape(lambda: _encoded(spec.action, zeros)).shape[1]
        if "reward" in config.core_inputs:
            sizes["reward"] = 1
        return cls(sizes, spec.action)

    @property
    def size(self) -> int:
        """Number of values that the core reads beside the features."""
        return sum(self.sizes.values())

    def initial(self, memory: PyTree, num_envs: int) -> PyTree:
        """Returns the policy's state ``[num_envs, ...]`` at the start of an episode."""
        if not self.sizes:
            return memory
        zeros = {name: jnp.zeros((num_envs, size)) for name, size in self.sizes.items()}
        return {"memory": memory, **zeros}

    def memory(self, core: PyTree) -> PyTree:
        """Returns the core's part of the policy's state."""
        return core["memory"] if self.sizes else core

    def read(self, core: PyTree) -> jax.Array | None:
        """Returns the core's inputs beside the features, float32 ``[B, size]``; None: it has none.

        ``core`` may also be what ``of_steps`` returns.
        """
        if self.sizes:
            return jnp.concatenate([core[name] for name in self.sizes], axis=-1)
        return None

    def acted(self, core: PyTree, memory: PyTree, action: PyTree) -> PyTree:
        """Returns the policy's state after an action, which the next step reads."""
        if not self.sizes:
            return memory
        core = {**core, "memory": memory}
        if "action" in self.sizes:
            core["action"] = _encoded(self.actions, action)
        return core

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        """As ``Algorithm.feedback``: the next step reads the reward,
        in the environment's units or clipped.

        It reads the action that was taken, which need not be the policy's; ``()``:
        the one that the policy chose.
        """
        if "action" in self.sizes and not isinstance(action, tuple):
            core = {**core, "action": _encoded(self.actions, action)}
        if "reward" in self.sizes:
            return {**core, "reward": step.reward[:, None]}
        return core

    def of_steps(self, rollout: Rollout) -> dict[str, jax.Array]:
        """Returns each input ``[T + 1, B, size]`` before each of a rollout's steps, and after them.

        They come from the rollout's own steps, so the first ones are 0,
        as at the start of an episode.
        """
        outcomes = {"reward": rollout.reward[..., None]}
        if "action" in self.sizes:
            outcomes["action"] = jax.vmap(partial(_encoded, self.actions))(rollout.action)

        def shifted(outcome: jax.Array) -> jax.Array:
            # After an invalid step, which holds an episode's last observation,
            # another episode begins.
            valid = jnp.where(rollout.valid[..., None], outcome, 0)
            return jnp.concatenate([jnp.zeros_like(outcome[:1]), valid])

        return {name: shifted(outcomes[name]) for name in self.sizes}


def _encoded(space: Any, action: PyTree) -> jax.Array:
    action = spaces.clipped(space, action)
    return side_by_side(preprocess(action, space, jnp.float32), space)
