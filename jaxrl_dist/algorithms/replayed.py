"""Shared by the algorithms that learn action values, mostly from replayed transitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_dist.algorithms import name_of
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, np, optax, packing, returns, spaces
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import Context, EnvSpec, PyTree, Replay, Rollout, Variables


def n_step_replay(config: ReplayConfig) -> dict[str, Any]:
    """Returns the fields of an ``Algorithm`` whose loss gets replayed ``transitions``."""

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> dict[str, PyTree]:
        return transitions(rollout, config.discount)

    replay = Replay(
        capacity=config.replay_capacity,
        batch_size=config.batch_size,
        ratio=config.replay_ratio,
        learning_starts=config.learning_starts,
        priority_exponent=config.priority_exponent,
        importance_exponent=config.importance_exponent,
    )
    return {"postprocess": postprocess, "window": config.n_step, "replay": replay}


def value_learner(config: Any, network: Any) -> dict[str, Any]:
    """Returns the fields that an ``Algorithm`` with one
    value network needs besides its policy and its loss.

    The target network copies the parameters every
    ``config.target_period`` updates (Mnih et al. 2015, algorithm 1).
    """

    def branch(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
        return optax.periodic_update(params, target, updates, config.target_period)

    def choose(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
        due = updates % config.target_period == 0
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), params, target)

    def target(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
        # A GPU would wait for the host at each condition.
        return jax.lax.platform_dependent(params, target, updates, cuda=choose, default=branch)

    return {
        "init": lambda key: Variables(network.init(key), ()),
        "optimizer": optax.chain(
            packing.clip_by_global_norm(config.max_gradient_norm),
            config.make_optimizer("adam", config.learning_rate, eps=config.adam_epsilon),
        ),
        "target": target,
        "initial_target": copied,
        **n_step_replay(config),
    }


def copied(tree: PyTree) -> PyTree:
    """Copies every array, to start a target network."""
    return jax.tree.map(jnp.copy, tree)


def transitions(
    rollout: Rollout, discount: float | jax.Array, *, next_action: bool = False
) -> dict[str, PyTree]:
    """Converts windows ``[n, N, ...]`` to n-step transitions ``[N, ...]``,
    cut at the end of the episode.

    Args:
      next_action: windows have one more step,
        which only supplies the action after the last of ``n`` steps.

    Returns:
      ``obs``, ``action``, ``reward`` (discounted and summed),
      ``discount`` (of the bootstrap; 0 after a termination),
      ``next_obs`` and ``valid``. With ``next_action``, also that of ``next_obs``,
      and ``acts``: whether there is one,
      which there is not where a termination or a time limit has ended the episode.
    """
    following: dict[str, PyTree] = {}
    if next_action:
        whole = rollout
        rollout = jax.tree.map(
            lambda x: x[:-1], rollout._replace(extras=(), core=(), final_core=())
        )
    reward, discount, last = returns.window_return(*rollout.outcomes, discount)

    def successor(obs: jax.Array) -> jax.Array:
        rows = (last + 1).reshape(1, -1, *(1,) * (obs.ndim - 2))
        return jnp.take_along_axis(obs, rows, axis=0)[0]

    if next_action:
        following = {
            "next_action": jax.tree.map(successor, whole.action),
            "acts": successor(whole.valid),
        }
    return {
        "obs": jax.tree.map(lambda x: x[0], rollout.obs),
        "action": rollout.action[0],
        "reward": reward,
        "discount": discount,
        "next_obs": jax.tree.map(successor, rollout.obs),
        "valid": rollout.valid[0],
        **following,
    }


def num_actions(config: object, spec: EnvSpec) -> int:
    """Returns the number of discrete actions.

    Raises:
      ConfigError: the environment's actions are not discrete.
    """
    if not isinstance(spec.action, spaces.Discrete):
        raise ConfigError(
            f"{name_of(config)} needs discrete actions, which {spec.id} lacks; {_handled(spec.action)}"
        )
    return spec.action.n


def _handled(actions: Any) -> str:
    """Says which algorithms handle a kind of actions."""
    return {
        spaces.Discrete: "dqn, rainbow, pqn, sac and ppo handle discrete ones",
        spaces.Box: "sac, td3, ddpg and ppo handle vectors of numbers",
        spaces.MultiDiscrete: "ppo, marwil and bc handle vectors of integers",
        dict: "ppo, marwil and bc handle Dict actions",
    }[type(actions)]


class ActionScale(NamedTuple):
    """Converts between a continuous environment's actions and the networks' range -1 .. 1."""

    low: np.ndarray
    """[A] float32."""
    high: np.ndarray
    """[A] float32."""

    @classmethod
    def of(cls, config: object, spec: EnvSpec, needed: str = "vectors of numbers") -> ActionScale:
        """Returns the scale of an environment; ``needed`` names the supported actions in the error.

        Raises:
          ConfigError: the actions are not vectors of numbers, or are unbounded.
        """
        space = spec.action
        name = name_of(config)
        if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(
                f"{name} needs actions that are {needed}, which {spec.id} lacks; {_handled(space)}"
            )
        if len(space.shape) != 1:
            raise ConfigError(
                f"{name} needs actions that are {needed}, but those of {spec.id} have the shape "
                f"{space.shape}; flatten them with gymnasium.wrappers.TransformAction"
            )
        if not np.isfinite([space.low, space.high]).all():
            raise ConfigError(
                f"{name} needs bounded actions, which {spec.id} lacks; ppo handles unbounded ones"
            )
        low = np.asarray(space.low, np.float32)
        high = np.asarray(space.high, np.float32)
        with np.errstate(over="ignore"):
            spans = np.isfinite(high - low) & (high > low)
        if not spans.all():
            raise ConfigError(
                f"{name} needs actions between two bounds, but those of {spec.id} are {low} and {high}"
            )
        return cls(low, high)

    @property
    def size(self) -> int:
        """Number of components of an action."""
        return len(self.low)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Converts actions ``[N, A]`` from -1 .. 1 to the environment's units, within its
        bounds.
        """
        low, high = (jnp.broadcast_to(bound, action.shape) for bound in self)
        # rounding may exceed a bound
        return jnp.clip(low + 0.5 * (action + 1.0) * (high - low), low, high)

    def from_env(self, action: jax.Array) -> jax.Array:
        """The inverse of ``to_env``."""
        low, high = (jnp.broadcast_to(bound, action.shape) for bound in self)
        return 2.0 * (action - low) / (high - low) - 1.0

    def log_slope(self) -> float:
        """Returns the log-density of an action in the environment's units,
        minus that in the units of -1 .. 1.
        """
        return -float(np.log(0.5 * (self.high.astype(np.float64) - self.low)).sum())

    def uniform(self, keys: jax.Array) -> jax.Array:
        """Draws uniform actions ``[N, A]`` in the environment's units."""
        draw = jax.vmap(lambda key: jax.random.uniform(key, (self.size,), minval=-1.0))
        return self.to_env(draw(keys))
