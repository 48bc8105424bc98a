"""An update in two parts: an actor computes the gradient where it acts, and the learner applies
it.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh, rng
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.memory import ring
from jaxrl_dist.types import Algorithm, PyTree, Rollout, TrainState


def gradient(
    algorithm: Algorithm, state: TrainState, rollout: Rollout, key: jax.Array, number: jax.Array
) -> tuple[PyTree, Mapping[str, jax.Array]]:
    """Computes one gradient of the loss on one rollout.

    An algorithm that replays windows learns from one window per step of the rollout; windows at the
    end of the rollout are shorter (Mnih et al. 2016, algorithm S2).

    Args:
      number: the rollout's number, which makes its random keys unique.

    Returns:
      The gradient with respect to ``params``, and metrics.
    """
    key = jax.random.fold_in(key, number)
    if algorithm.replay is not None:
        assert algorithm.window is not None, "replay needs windows of a fixed length"
        # The last windows also need what the policy's core reads beside the last observation,
        # which ``extras`` hold.
        keys = rng.per_index(jax.random.fold_in(key, 2), mesh.global_index(rollout.reward.shape[1]))
        acted = algorithm.policy(
            state.variables, rollout.last_obs, rollout.final_core, state.context(keys)
        )
        rollout = ring.windows(_extended(rollout, acted[2], algorithm.window - 1), algorithm.window)
    keys = rng.per_index(jax.random.fold_in(key, 0), mesh.global_index(rollout.reward.shape[1]))
    batch = algorithm.postprocess(state.variables, rollout, state.context(keys))
    num_examples = len(jax.tree.leaves(batch)[0])
    keys = rng.per_index(jax.random.fold_in(key, 1), mesh.global_index(num_examples))
    grads, metrics, _ = sgd.gradient(algorithm, state, batch, keys)
    return grads, metrics


def apply(algorithm: Algorithm, state: TrainState, grads: PyTree, steps: int) -> TrainState:
    """Makes one update with the gradient of a rollout of ``steps`` env steps."""
    state = sgd.apply(algorithm, state, grads)
    return state._replace(
        iteration=state.iteration + 1, env_step=sgd.nominal_env_step(state, steps)
    )


def _extended(rollout: Rollout, extras: PyTree, steps: int) -> Rollout:
    """Appends ``steps`` invalid steps to a rollout; ``returns`` ends episodes before them.

    Args:
      extras: the policy's other outputs ``[B, ...]`` for the last observation.
    """

    def extend(x: jax.Array, last: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.repeat(last[None], steps, axis=0)])

    rest = rollout._replace(obs=(), extras=(), core=(), final_core=())
    rest = jax.tree.map(lambda x: extend(x, jnp.zeros_like(x[0])), rest)
    later = jax.tree.map(extend, (rollout.obs, rollout.extras), (rollout.last_obs, extras))
    return rest._replace(obs=later[0], extras=later[1])


def check_sizes(algorithm: Algorithm, rollout_length: int) -> None:
    """Checks that the algorithm computes exactly one gradient per rollout.

    Raises:
      ConfigError: it computes several, keeps running statistics, or needs longer windows.
    """
    made = algorithm.num_epochs * algorithm.num_minibatches
    if made > 1:
        raise ConfigError(
            "--plan gradients makes one update of each rollout, but --num-epochs times "
            f"--num-minibatches is {made}; set both to 1, or use an algorithm without them, such "
            "as a2c"
        )
    if algorithm.update_stats is not None:
        raise ConfigError(
            "running statistics are not kept under --plan gradients; use --plan asynchronous"
        )
    if (
        algorithm.replay is not None
        and algorithm.window is not None
        and algorithm.window > rollout_length
    ):
        raise ConfigError(
            f"windows of {algorithm.window} steps (--n-step) do not fit into --rollout-length "
            f"{rollout_length}; use --rollout-length {algorithm.window} or more"
        )
