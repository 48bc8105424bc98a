"""A trained policy, taken out of its run directory to be used anywhere."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.actors.evaluate import Evaluation, evaluate
from jaxrl_dist.config import Train, check_run_dir
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.run import checkpoint
from jaxrl_dist.spaces import Box
from jaxrl_dist.training.resolving import resolved
from jaxrl_dist.training.setup import make_algorithm
from jaxrl_dist.training.stored import stored_config
from jaxrl_dist.types import Context, PyTree, Variables


class Policy:
    """``(obs, core, key) -> (action, core)``; see ``__call__``."""

    def __init__(self, config: Train[Any], source: EnvSource, variables: Variables) -> None:
        self.config = config
        self.source = source
        self.algorithm = make_algorithm(config, source.spec)
        self.variables = variables
        self._act = jax.jit(self._choose)

    def initial_core(self, num_envs: int) -> PyTree:
        """The policy state with which an episode begins, for a batch of ``num_envs``; ``()`` if it has none."""
        return self.algorithm.initial_core(num_envs)

    def __call__(self, obs: PyTree, core: PyTree = None, key: jax.Array | None = None) -> tuple[jax.Array, PyTree]:
        """Chooses actions for a batch of observations.

        Args:
          obs: ``[B, ...]`` as the environment gives them.
          core: what the last call returned; None, the same as ``initial_core(B)``, where all episodes begin.
          key: a scalar key to sample actions with; None for greedy ones.

        Returns:
          Actions ``[B, ...]`` within the environment's bounds, and the policy state for the next call. Where an
          episode has ended, its row of the state is to be replaced by that of ``initial_core``.

        Raises:
          ValueError: ``obs`` is no batch of the environment's observations, or ``key`` is no key.
        """
        shape, wanted = np.shape(obs), self.source.spec.observation.shape
        if len(shape) != len(wanted) + 1 or shape[1:] != wanted:
            raise ValueError(f"observations have shape [{', '.join(map(str, ('B', *wanted)))}] here, not {list(shape)}")
        core = self.initial_core(shape[0]) if core is None else core
        keys = None if key is None else jax.random.split(_checked_key(key), shape[0])
        return self._act(self.variables, obs, core, keys)

    def evaluate(
        self,
        episodes: int = 100,
        seed: int = 0,
        *,
        max_steps: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Evaluation:
        """Plays greedy episodes, as the command ``evaluate`` does; arguments and errors as those of ``Evaluator``."""
        assert self.config.num_envs is not None, "the preset has it"
        what = self.algorithm, self.variables, self.source, episodes, seed
        return evaluate(*what, max_steps=max_steps, num_envs=self.config.num_envs, progress=progress)

    def _choose(
        self, variables: Variables, obs: PyTree, core: PyTree, keys: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        context = Context(keys, jnp.float32(self.config.total_env_steps))
        action, core, _ = self.algorithm.policy(variables, obs, core, context)
        space = self.source.spec.action
        if isinstance(space, Box):
            action = jnp.clip(action, *(jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high)))
        return action, core


def _checked_key(key: Any) -> jax.Array:
    """A key; one of the old style, such as ``jax.random.PRNGKey(0)``, becomes one of today's."""
    if isinstance(key, jax.Array) and key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.ndim == 1 and key.dtype == np.uint32:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(f"key must be a single key such as jax.random.key(0), not {key!r}")


def load_policy(
    run_dir: str | pathlib.Path,
    algorithm: type | None = None,
    *,
    env: Any = None,
    env_options: dict[str, str] | None = None,
    torso: Any = None,
) -> Policy:
    """Loads the policy that a run has trained, or that its newest checkpoint has.

    Args:
      algorithm: the config class that was trained, if it is not one of ours. No file can name code to run.
      env: the environment, if another than the run's is meant, or the run's is one that no file can hold: an object,
        or of the form ``my_module:make``.
      env_options: the environment's options, if others than the run's are meant.
      torso: the network of your own that was trained, if there was one.

    Raises:
      ConfigError: ``run_dir`` holds no trained variables, is damaged, or its environment cannot be found here.
    """
    check_run_dir(pathlib.Path(run_dir))
    config = stored_config(run_dir, algorithm, env, torso)
    config, source = resolved(config, {} if env_options is None else {"env_options": env_options})
    shapes = jax.eval_shape(make_algorithm(config, source.spec).init, jax.random.key(0))
    variables = jax.device_put(checkpoint.load_variables(run_dir, shapes), jax.local_devices()[0])
    return Policy(config, source, variables)
