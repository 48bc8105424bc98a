"""Soft actor-critic in one file, for you to change (Haarnoja et al. 2018, arXiv:1812.05905).

``Agent`` is the algorithm. The package steps the environments and calls the methods of ``Agent``:

    policy         T times: observations [B, ...] -> actions [B, A], all stored in the memory
    postprocess    for each update: N random steps [1, N, ...] of the memory -> N transitions
    loss           for each update: the transitions -> one loss for each;
                   then the optimizer changes the parameters by the gradient of the mean loss
    update_target  for each update: new parameters -> parameters of the target critics

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

from jaxrl_dist import returns, spaces, types
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.layers import Conv, dense
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class SAC:
    """Soft actor-critic: each field is a flag, as --learning-rate, with its help."""

    hidden_sizes: tuple[int, ...] = setting((64, 64), low=1)
    """Widths of the hidden layers; those that read images have the widths of papers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "relu"
    """Activation function of the hidden layers."""
    noise_correlation: float = setting(0.9, low=0, below=1)
    """Correlation between the noise of consecutive actions; 0: independent noise."""
    learning_rate: float = setting(1e-3, above=0)
    """Step size of Adam for the critics and the temperature."""
    actor_learning_rate: float = setting(1e-3, above=0)
    """Step size of Adam for the actor."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards, gamma."""
    target_rate: float = setting(0.005, above=0, high=1)
    """Fraction by which each update moves the target critics towards the critics."""
    batch_size: int = setting(128, low=1)
    """Transitions of an update, over all devices."""
    replay_capacity: int = setting(1_000_000, low=1)
    """Steps that the memory holds, over all environments."""
    replay_ratio: float = setting(1.0, above=0)
    """Updates per env step."""
    learning_starts: int = setting(1_000, low=0)
    """Env steps of random actions before the first update."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Returns defaults of flags of the run: B and T, and others that --help lists."""
        return {"num_envs": 8, "rollout_length": 1}

    def make(self, spec: EnvSpec) -> Algorithm:
        """Returns the functions of the algorithm, for the spaces of an environment."""
        agent = Agent(self, spec)
        return Algorithm(
            init=agent.init,
            initial_core=agent.initial_core,
            policy=agent.policy,
            postprocess=agent.postprocess,
            loss=agent.loss,
            optimizer=optax.partition(
                {  # eps_root changes no step; sqrt gets a derivative at 0
                    "actor": optax.adam(self.actor_learning_rate, eps_root=1e-37),
                    "critic": optax.adam(self.learning_rate, eps_root=1e-37),
                },
                {"actor": "actor", "critic": "critic", "log_temperature": "critic"},
            ),
            target=agent.update_target,
            initial_target=lambda params: jax.tree.map(jnp.copy, params["critic"]),
            window=1,  # an example is made of one step
            replay=types.Replay(
                capacity=self.replay_capacity,
                batch_size=self.batch_size,
                ratio=self.replay_ratio,
                learning_starts=self.learning_starts,
            ),
        )


class MLP(nn.Module):
    """Vectors ``[N, D]`` to features; weights start orthogonal (gain sqrt(2)), biases at zero."""

    config: SAC

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.config.hidden_sizes:
            x = getattr(nn, self.config.activation)(dense(width)(x))
        return x


class CNN(nn.Module):
    """Images ``[N, H, W, C]`` to features, as Mnih et al. (2015) or Young and Tian (2019) do."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        large = min(x.shape[-3:-1]) >= 36
        convs = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if large else [(16, 3, 1)]
        for features, size, stride in convs:
            x = nn.relu(Conv(features, size, stride)(x))
        return nn.relu(dense(512 if large else 128)(x.reshape(*x.shape[:-3], -1)))


class TanhNormal(NamedTuple):
    """Actions ``[N, A]`` between -1 and 1: tanh of normal numbers of this mean and deviation."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns actions of standard normal noise ``[N, A]``, and their log density ``[N]``."""
        u = self.mean + jnp.exp(self.log_std) * noise
        action = jnp.tanh(u)
        # log N(u) - sum log(1 - tanh(u)^2), appendix C; here nothing cancels for large |u|.
        log_slope = 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))
        z = (u - self.mean) * jnp.exp(-self.log_std)
        normal = jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)
        return action, normal - jnp.sum(log_slope, axis=-1)


class Agent:
    """Acts and learns; ``variables.params`` holds an actor, two critics and the temperature."""

    def __init__(self, config: SAC, spec: EnvSpec) -> None:
        obs: Any = spec.observation
        action: Any = spec.action
        reads = isinstance(obs, spaces.Box) and len(obs.shape) in (1, 3)
        acts = isinstance(action, spaces.Box) and len(action.shape) == 1
        if not (reads and acts and np.isfinite(action.high - action.low).all()):
            raise ConfigError(
                "this file reads a vector or an image and acts by a vector within bounds, not "
                f"{spaces.describe(obs)} and {spaces.describe(action)}; use `jaxrl-dist train sac`"
            )
        self.config = config
        self.obs = obs
        self.action = action
        bounds = (np.asarray(bound, np.float32)[None] for bound in (action.low, action.high))
        self.low, self.high = bounds  # [1, A]
        self.image = len(obs.shape) == 3
        self.torso: Any = CNN() if self.image else MLP(config)
        self.actor_head: Any = dense(2 * action.shape[0], scale=0.01)
        self.critic_mlp: Any = MLP(config)
        self.critic_head: Any = dense(1, scale=1.0)

    def init(self, key: jax.Array) -> Variables:
        actor_key, critic_key = jax.random.split(key)
        torso_key, head_key = jax.random.split(actor_key)
        x = self.preprocess(spaces.zeros(self.obs, 1))
        features, torso = self.torso.init_with_output(torso_key, x)
        params = {
            "actor": {"torso": torso, "head": self.actor_head.init(head_key, features)},
            "critic": [self.init_critic(key, x) for key in jax.random.split(critic_key, 2)],
            "log_temperature": jnp.zeros(()),
        }
        return Variables(params, ())

    def init_critic(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        torso_key, mlp_key, head_key = jax.random.split(key, 3)
        params: dict[str, PyTree] = {}
        if self.image:
            x, params["torso"] = self.torso.init_with_output(torso_key, x)
        x = jnp.concatenate([x, jnp.zeros((1, *self.action.shape))], axis=-1)
        x, params["mlp"] = self.critic_mlp.init_with_output(mlp_key, x)
        return {**params, "head": self.critic_head.init(head_key, x)}

    def preprocess(self, obs: jax.Array) -> jax.Array:
        """Returns float32 observations; bytes become 0 .. 1, and channels the last axis."""
        x = jnp.asarray(obs, jnp.float32)
        if self.obs.dtype == np.uint8:
            x = x / max(int(self.obs.high.max()), 1)
        return jnp.moveaxis(x, -3, -1) if spaces.channels_first(self.obs.shape) else x

    def actor(self, params: PyTree, obs: jax.Array) -> TanhNormal:
        """Returns pi(.|s) for observations ``[N, ...]``."""
        features = self.torso.apply(params["torso"], self.preprocess(obs))
        mean, raw = jnp.split(self.actor_head.apply(params["head"], features), 2, axis=-1)
        return TanhNormal(mean, -5.0 + 3.5 * (jnp.tanh(raw) + 1.0))  # e^-5 .. e^2, as in CleanRL

    def critics(self, params: PyTree, obs: jax.Array, action: jax.Array) -> jax.Array:
        """Returns both Q(s, a), ``[2, N]``, for actions ``[N, A]`` between -1 and 1."""
        values = []
        for critic in params:
            x = self.preprocess(obs)
            if self.image:
                x = self.torso.apply(critic["torso"], x)
            x = self.critic_mlp.apply(critic["mlp"], jnp.concatenate([x, action], axis=-1))
            values.append(self.critic_head.apply(critic["head"], x)[..., 0])
        return jnp.stack(values)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Converts actions from -1 .. 1 to the environment's units."""
        in_units = self.low + 0.5 * (action + 1.0) * (self.high - self.low)
        return jnp.clip(in_units, self.low, self.high)

    def normal(self, keys: jax.Array) -> jax.Array:
        return jax.vmap(lambda key: jax.random.normal(key, self.action.shape))(keys)

    def initial_core(self, num_envs: int) -> PyTree:
        """Returns what the policy remembers when an episode starts: noise, of which it has none."""
        return jnp.zeros((num_envs, *self.action.shape))

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        """Returns actions ``[B, A]``, the next core, and what the rollout stores: nothing."""
        chosen = self.actor(variables.params["actor"], obs)
        if context.keys is None:  # as in evaluations
            return self.to_env(jnp.tanh(chosen.mean)), core, {}
        # x' = c x + sqrt(1 - c^2) N(0, 1), Hollenstein et al. (2024), arXiv:2312.11091
        fresh = self.normal(context.keys)
        correlation = self.config.noise_correlation
        noise = correlation * core + jnp.sqrt(1 - jnp.square(correlation)) * fresh
        core = jnp.where(jnp.any(core != 0, axis=-1, keepdims=True), noise, fresh)
        action, _ = chosen.sample(core)
        uniform = jax.vmap(lambda key: jax.random.uniform(key, self.action.shape, minval=-1.0))
        random = context.env_step < self.config.learning_starts  # before this rollout, with resets
        return jnp.where(random, self.to_env(uniform(context.keys)), self.to_env(action)), core, {}

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        """Makes a transition of each step ``[1, N, ...]``; observations are ``[2, N, ...]``."""
        return {
            "obs": rollout.obs[0],
            "action": rollout.action[0],
            "reward": rollout.reward[0],
            "discount": jnp.where(rollout.terminated[0], 0.0, self.config.discount),
            "next_obs": rollout.obs[1],
            "valid": rollout.valid[0],  # False for a step that only resets an environment
        }

    def loss(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """Returns the losses ``[N]`` of transitions, which of them count, and metrics ``[N]``.

        For schedules: ``context.env_step``, the env steps until now, resets included.
        """
        params = variables.params
        frozen = returns.constant(params)  # no gradient flows through it
        next_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(context.keys), 1, 0)
        temperature = jnp.exp(frozen["log_temperature"])
        # Critics: y = r + gamma (min Q_target(s', a') - alpha log pi(a'|s')), equations 2, 3 and 5.
        next_policy = self.actor(frozen["actor"], batch["next_obs"])
        next_action, next_log_prob = next_policy.sample(self.normal(next_keys))
        next_q = self.critics(context.target, batch["next_obs"], next_action).min(axis=0)
        next_value = next_q + temperature * -next_log_prob
        target = batch["reward"] + batch["discount"] * next_value
        action = 2.0 * (batch["action"] - self.low) / (self.high - self.low) - 1.0
        q = self.critics(params["critic"], batch["obs"], action)  # [2, N]
        critic_loss = 0.5 * jnp.sum(jnp.square(q - returns.constant(target)[None]), axis=0)
        # Actor: -(min Q(s, a) - alpha log pi(a|s)), equation 7.
        new_action, log_prob = self.actor(params["actor"], batch["obs"]).sample(self.normal(keys))
        new_q = self.critics(frozen["critic"], batch["obs"], new_action).min(axis=0)
        entropy = -log_prob
        actor_loss = -(new_q + temperature * entropy)
        # Temperature: the target of the entropy is minus the number of components, equation 18.
        excess = returns.constant(entropy) + float(self.action.shape[0])
        losses = critic_loss + actor_loss + params["log_temperature"] * excess
        metrics = {
            "q/mean": q.mean(axis=0),
            "loss/critic": critic_loss,
            "loss/actor": actor_loss,
            "policy/entropy": entropy,
            "policy/temperature": jnp.broadcast_to(temperature, entropy.shape),
        }
        return losses, batch["valid"], Aux(metrics)

    def update_target(self, params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
        """Returns the parameters of the target critics: an average over the last critics."""
        return optax.incremental_update(params["critic"], target, self.config.target_rate)
