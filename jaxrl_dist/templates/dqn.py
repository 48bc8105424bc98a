"""Deep Q-learning in one file, for you to change (Mnih et al. 2015, Nature 518).

``Agent`` is the algorithm. The package steps the environments and calls the methods of ``Agent``:

    policy         T times: observations [B, ...] -> actions [B], all stored in the memory
    postprocess    for each update: N windows [n_step, N, ...] of the memory -> N transitions
    loss           for each update: the transitions -> one loss for each;
                   then the optimizer changes the parameters by the gradient of the mean loss
    update_target  for each update: new parameters -> parameters of the target network

A window is n_step consecutive steps of one environment; all windows are equally likely.
They are pure functions of their arguments, so they run compiled or in threads, on any devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist import packing, returns, spaces
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.layers import Conv, dense
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Replay,
    Rollout,
    Variables,
)


@dataclasses.dataclass(frozen=True)
class DQN:
    """Deep Q-learning: each field is a flag, as --learning-rate, with its help."""

    hidden_sizes: tuple[int, ...] = setting((128, 128), low=1)
    """Widths of the layers that read vectors; for images, layers have the widths of papers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "relu"
    """Activation function of the layers that read vectors."""
    learning_rate: float = setting(5e-4, above=0)
    """Step size of Adam."""
    max_gradient_norm: float = setting(10.0, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards, gamma."""
    n_step: int = setting(3, low=1)
    """Rewards summed before the bootstrap."""
    td_loss: Literal["huber", "squared"] = "squared"
    """Loss of the temporal-difference error: squared, or linear beyond 1."""
    target_period: int = setting(150, low=1)
    """Updates between copies of the parameters to the target network."""
    batch_size: int = setting(128, low=1)
    """Transitions of an update, over all devices."""
    replay_capacity: int = setting(1_000_000, low=1)
    """Steps that the memory holds, over all environments."""
    replay_ratio: float = setting(0.25, above=0)
    """Updates per env step."""
    learning_starts: int = setting(1_000, low=0)
    """Env steps before the first update."""
    epsilon_start: float = setting(1.0, low=0, high=1)
    """Probability of a random action at the start."""
    epsilon_end: float = setting(0.05, low=0, high=1)
    """Probability of a random action after ``epsilon_steps``."""
    epsilon_steps: int = setting(10_000, low=1)
    """Env steps over which epsilon falls linearly."""
    ez_greedy: bool = True
    """Repeat each random action, mostly for a step or two and seldom for hundreds."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Returns defaults of flags of the run: B and T, and others that --help lists."""
        return {"num_envs": 8, "rollout_length": 4}

    def make(self, spec: EnvSpec) -> Algorithm:
        """Returns the functions of the algorithm, for the spaces of an environment."""
        agent = Agent(self, spec)
        return Algorithm(
            init=agent.init,
            initial_core=agent.initial_core,
            policy=agent.policy,
            postprocess=agent.postprocess,
            loss=agent.loss,
            optimizer=optax.chain(  # eps_root changes no step; sqrt gets a derivative at 0
                packing.clip_by_global_norm(self.max_gradient_norm),
                optax.adam(self.learning_rate, eps=1.5e-4, eps_root=1e-37),
            ),
            target=agent.update_target,
            initial_target=lambda params: jax.tree.map(jnp.copy, params),
            window=self.n_step,  # an example is made of so many steps
            replay=Replay(
                capacity=self.replay_capacity,
                batch_size=self.batch_size,
                ratio=self.replay_ratio,
                learning_starts=self.learning_starts,
            ),
        )


class Torso(nn.Module):
    """Reads observations ``[N, ...]``; weights start orthogonal (gain sqrt(2)), biases at zero."""

    space: spaces.Box
    config: DQN

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = jnp.asarray(obs, jnp.float32)
        if self.space.dtype == np.uint8:
            x = x / max(int(self.space.high.max()), 1)
        if len(self.space.shape) == 1:
            for width in self.config.hidden_sizes:
                x = getattr(nn, self.config.activation)(dense(width)(x))
            return x
        if spaces.channels_first(self.space.shape):
            x = jnp.moveaxis(x, -3, -1)  # [N, H, W, C]
        # Mnih et al. (2015), Methods; small images: Young and Tian (2019), section 3.
        large = min(x.shape[-3:-1]) >= 36
        convs = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if large else [(16, 3, 1)]
        for features, size, stride in convs:
            x = nn.relu(Conv(features, size, stride)(x))
        return nn.relu(dense(512 if large else 128)(x.reshape(*x.shape[:-3], -1)))


class Repetition(NamedTuple):
    """What the policy remembers from step to step: a random action that it repeats; all ``[B]``."""

    action: jax.Array
    left: jax.Array
    """Steps for which it continues."""
    longest: jax.Array
    """Steps that a random action lasts at most."""


class Agent:
    """Acts and learns; ``variables.params`` holds the parameters of the network."""

    def __init__(self, config: DQN, spec: EnvSpec) -> None:
        obs: Any = spec.observation
        action: Any = spec.action
        reads = isinstance(obs, spaces.Box) and len(obs.shape) in (1, 3)
        if not (reads and isinstance(action, spaces.Discrete)):
            raise ConfigError(
                "this file reads a vector or an image and acts by a category, not "
                f"{spaces.describe(obs)} and {spaces.describe(action)}; use `jaxrl-dist train dqn`"
            )
        self.config = config
        self.num_actions = action.n
        self.torso: Any = Torso(obs, config)
        self.head: Any = dense(action.n, scale=1.0)

    def init(self, key: jax.Array) -> Variables:
        torso_key, head_key = jax.random.split(key)
        obs = spaces.zeros(self.torso.space, 1)
        features, torso = self.torso.init_with_output(torso_key, obs)
        return Variables({"torso": torso, "head": self.head.init(head_key, features)}, ())

    def values(self, params: PyTree, obs: jax.Array) -> jax.Array:
        """Returns Q(s, a) ``[N, A]`` of all ``A`` actions, for observations ``[N, ...]``."""
        return self.head.apply(params["head"], self.torso.apply(params["torso"], obs))

    def initial_core(self, num_envs: int) -> PyTree:
        """Returns what the policy remembers when an episode starts: nothing to repeat.

        A random action lasts 1 step at most in the last environment, 10,000 in the first.
        """
        if not self.config.ez_greedy:
            return ()
        none = jnp.zeros(num_envs, jnp.int32)
        return Repetition(none, none, longest=10_000 ** jnp.linspace(1.0, 0.0, num_envs))

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        """Returns actions ``[B]``, the next core, and what the rollout stores with them: nothing.

        The best action, or with probability epsilon a random one.
        """
        config = self.config
        q = self.values(variables.params, obs)
        best = jnp.argmax(q, axis=-1).astype(jnp.int32)
        if context.keys is None:  # as in evaluations
            return best, core, {}
        # A key for actions; the other one is free, for noise in the network.
        keys = jax.vmap(lambda key: jax.random.split(key)[1])(context.keys)
        schedule = optax.linear_schedule(
            config.epsilon_start, config.epsilon_end, config.epsilon_steps
        )
        epsilon = schedule(context.env_step)  # env steps before this rollout, resets included
        if config.ez_greedy:
            action, core = self.repeating(best, epsilon, keys, core)
            return action, core, {}
        greedy = jax.nn.one_hot(best, self.num_actions)
        probs = epsilon / self.num_actions + (1.0 - epsilon) * greedy
        action = jax.vmap(jax.random.categorical)(keys, jnp.log(probs))
        return action.astype(jnp.int32), core, {}

    def repeating(
        self, best: jax.Array, epsilon: jax.Array, keys: jax.Array, core: Repetition
    ) -> tuple[jax.Array, Repetition]:
        """Returns actions ``[B]``, the best ones or random ones that are then repeated.

        A random action lasts n steps with P(n >= k) = 1 / k, so it crosses regions that a random
        walk would take very long to leave: Dabney et al. (2021), arXiv:2006.01782, section 3.
        """
        equal = jnp.full((len(best), self.num_actions), -math.log(self.num_actions))
        random = jax.vmap(jax.random.categorical)(keys, equal).astype(jnp.int32)
        draws = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (2,)))(keys)
        duration = jnp.minimum(1.0 / (1.0 - draws[:, 1]), core.longest).astype(jnp.int32)
        repeats = core.left > 0
        starts = ~repeats & (draws[:, 0] < epsilon)
        action = jnp.where(repeats, core.action, jnp.where(starts, random, best))
        left = jnp.where(repeats, core.left, jnp.where(starts, duration, 1)) - 1
        return action, core._replace(action=action, left=left)

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        """Makes a transition of each window ``[n_step, N, ...]``, which ends with its episode."""
        # r_0 + gamma r_1 + ... and gamma^n, or 0 after a termination, to bootstrap from the
        # observation after the step ``last``: Sutton and Barto (2018), equation 7.1. ``[N]`` each.
        outcomes = rollout.outcomes  # reward, terminated, truncated and valid: [n_step, N] each
        reward, discount, last = returns.window_return(*outcomes, self.config.discount)
        rows = (last + 1).reshape(1, -1, *(1,) * (rollout.obs.ndim - 2))
        return {
            "obs": rollout.obs[0],  # of [n_step + 1, N, ...]
            "action": rollout.action[0],
            "reward": reward,
            "discount": discount,
            "next_obs": jnp.take_along_axis(rollout.obs, rows, axis=0)[0],
            "valid": rollout.valid[0],  # False for a step that only resets an environment
        }

    def loss(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """Returns the losses ``[N]`` of transitions, which of them count, and metrics ``[N]``.

        For schedules: ``context.env_step``, the env steps until now, resets included.
        """
        values = self.values(variables.params, batch["obs"])  # [N, A]
        next_values = self.values(variables.params, batch["next_obs"])
        target_values = self.values(context.target, batch["next_obs"])
        q = packing.take_along_last(values, batch["action"])  # Q(s, a)
        # y = r + gamma^n Q_target(s', argmax_a Q(s', a)): van Hasselt et al. (2016), equation 4.
        next_q = packing.take_along_last(target_values, jnp.argmax(next_values, axis=-1))
        target = returns.constant(batch["reward"] + batch["discount"] * next_q)
        if self.config.td_loss == "huber":
            losses = optax.losses.huber_loss(target - q)
        else:
            losses = optax.losses.l2_loss(target - q)
        return losses, batch["valid"], Aux({"loss/q": losses, "q/mean": q})

    def update_target(self, params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
        """Returns the parameters of the target network: a copy of the newest now and then."""
        return optax.periodic_update(params, target, updates, self.config.target_period)
