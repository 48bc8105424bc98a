"""Proximal policy optimisation in one file, for you to change (Schulman et al. 2017).

``Agent`` is the algorithm. The package steps the environments and calls the methods of ``Agent``:

    policy       T times: observations [B, ...] of B environments -> actions [B, ...]
    postprocess  once: the rollout of these steps, [T, B, ...] -> a batch of N = B * T examples
    loss         num_epochs * num_minibatches times: a minibatch -> one loss per example;
                 then the optimizer changes the parameters by the gradient of the mean loss

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

from jaxrl_dist import mesh, packing, returns, spaces
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.layers import Conv, dense
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation: each field is a flag, as --learning-rate, with its help."""

    hidden_sizes: tuple[int, ...] = setting((64, 64), low=1)
    """Widths of the layers that read vectors; for images, layers have the widths of papers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation function of the layers that read vectors."""
    initial_std: float = setting(1.0, above=0)
    """Standard deviation of continuous actions at the start, in units where bounds are -1 and 1."""
    noise_correlation: float = setting(0.0, low=0, below=1)
    """Correlation between the noise of consecutive continuous actions; 0: independent noise."""
    learning_rate: float = setting(1e-3, above=0)
    """Step size of Adam."""
    max_gradient_norm: float = setting(0.5, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards, gamma."""
    gae_lambda: float = setting(0.95, low=0, high=1)
    """Decay of generalised advantage estimation: 0 is the one-step error, 1 the whole return."""
    num_epochs: int = setting(4, low=1)
    """Passes over each rollout."""
    num_minibatches: int = setting(4, low=1)
    """Minibatches into which each pass divides the shuffled batch; each makes one update."""
    clip_epsilon: float = setting(0.2, above=0)
    """Clip range of the probability ratio around 1."""
    value_clip_epsilon: float | None = setting(None, above=0)
    """Clip range of a value around its estimate while acting; None: no clipping."""
    value_coefficient: float = setting(0.5, low=0)
    """Weight of the value loss."""
    entropy_coefficient: float = setting(0.01, low=0)
    """Weight of the entropy bonus."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Returns defaults of flags of the run: B and T, and others that --help lists."""
        return {
            "num_envs": 16,
            "rollout_length": 32,
            "normalize_observations": True,
            "scale_rewards": True,
        }

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
                optax.adam(self.learning_rate, eps=1e-5, eps_root=1e-37),
            ),
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            window=1,  # an example is one step; None: a whole rollout of an environment
        )


class Torso(nn.Module):
    """Reads observations ``[N, ...]``; weights start orthogonal (gain sqrt(2)), biases at zero."""

    space: spaces.Box
    config: PPO

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


class Categorical(NamedTuple):
    """Discrete actions ``[N]`` with probabilities softmax(``logits [N, n]``)."""

    logits: jax.Array

    def sample(self, keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.categorical)(keys, self.logits).astype(jnp.int32)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return packing.take_along_last(jax.nn.log_softmax(self.logits), action)

    def entropy(self) -> jax.Array:
        log_probs = jax.nn.log_softmax(self.logits)
        probs = jnp.exp(log_probs)
        return -jnp.sum(probs * jnp.where(probs > 0.0, log_probs, 0.0), axis=-1)


class Normal(NamedTuple):
    """Actions ``[N, A]`` with independent normal components; both fields are also ``[N, A]``."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, noise: jax.Array) -> jax.Array:
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)


class Agent:
    """Acts and learns; ``variables.params`` holds the parameters of all networks."""

    def __init__(self, config: PPO, spec: EnvSpec) -> None:
        obs: Any = spec.observation
        action: Any = spec.action
        self.discrete = isinstance(action, spaces.Discrete)
        reads = isinstance(obs, spaces.Box) and len(obs.shape) in (1, 3)
        acts = self.discrete or (isinstance(action, spaces.Box) and len(action.shape) == 1)
        if not (reads and acts):
            raise ConfigError(
                "this file reads a vector or an image and acts by a category or a vector, not "
                f"{spaces.describe(obs)} and {spaces.describe(action)}; use `jaxrl-dist train ppo`"
            )
        if self.discrete and config.noise_correlation:
            raise ConfigError("--noise-correlation needs continuous actions; remove it")
        self.config = config
        self.action = action
        self.torso: Any = Torso(obs, config)
        # Policy and value have separate features of a vector, and the same features of an image.
        self.torsos = ("policy_torso", "value_torso") if len(obs.shape) == 1 else ("torso",)
        self.policy_head: Any = dense(action.n if self.discrete else action.shape[0], scale=0.01)
        self.value_head: Any = dense(1, scale=1.0)

    def init(self, key: jax.Array) -> Variables:
        obs = spaces.zeros(self.torso.space, 1)
        *torso_keys, policy_key, value_key = jax.random.split(key, len(self.torsos) + 2)
        params: dict[str, PyTree] = {}
        for name, torso_key in zip(self.torsos, torso_keys, strict=True):
            features, params[name] = self.torso.init_with_output(torso_key, obs)
        params["policy"] = self.policy_head.init(policy_key, features)
        params["value"] = self.value_head.init(value_key, features)
        if not self.discrete:  # the same for all observations
            log_std = jnp.log(self.config.initial_std)
            params["log_std"] = jnp.full(self.action.shape, log_std, jnp.float32)
        return Variables(params, ())

    def evaluate(self, params: PyTree, obs: jax.Array) -> tuple[Categorical | Normal, jax.Array]:
        """Returns pi(.|s) and V(s) ``[N]`` for observations ``[N, ...]``."""
        features = [self.torso.apply(params[name], obs) for name in self.torsos]
        output = self.policy_head.apply(params["policy"], features[0])  # [N, n] or [N, A]
        value = self.value_head.apply(params["value"], features[-1])[..., 0]
        if self.discrete:
            return Categorical(output), value
        # The network's outputs are in units in which finite bounds are -1 and 1.
        low = np.asarray(self.action.low, np.float32)[None]  # [1, A]
        half = 0.5 * (np.asarray(self.action.high, np.float32)[None] - low)
        centre = np.where(np.isfinite(half), low + half, 0.0)
        half = np.where(np.isfinite(half), half, 1.0)
        log_std = jnp.broadcast_to(params["log_std"], output.shape) + np.log(half)
        return Normal(centre + half * output, log_std), value

    def initial_core(self, num_envs: int) -> PyTree:
        """Returns what the policy remembers when an episode starts: noise, of which it has none."""
        return () if self.discrete else jnp.zeros((num_envs, *self.action.shape))

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        """Returns actions ``[B, ...]``, the next core, and what the rollout stores with them."""
        distribution, value = self.evaluate(variables.params, obs)
        if context.keys is None:  # as in evaluations
            action = distribution.mode()
        elif isinstance(distribution, Categorical):
            action = distribution.sample(context.keys)
        else:
            # x' = c x + sqrt(1 - c^2) N(0, 1), Hollenstein et al. (2024), arXiv:2312.11091
            fresh = jax.vmap(lambda key: jax.random.normal(key, self.action.shape))(context.keys)
            scale = jnp.sqrt(1 - jnp.square(self.config.noise_correlation))
            noise = self.config.noise_correlation * core + scale * fresh
            core = jnp.where(jnp.any(core != 0, axis=-1, keepdims=True), noise, fresh)
            action = distribution.sample(core)
        return action, core, {"log_prob": distribution.log_prob(action), "value": value}

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        """Makes ``B * T`` examples of a rollout, with advantages and value targets."""
        config = self.config
        # V(s_0) .. V(s_T), [T + 1, B]: the successor of step t is always obs[t + 1].
        _, last_value = self.evaluate(variables.params, rollout.last_obs)
        values = jnp.concatenate([rollout.extras["value"], last_value[None]])
        # Generalised advantage estimation, Schulman et al. (2016), arXiv:1506.02438, equation 16:
        #   delta_t = r_t + gamma V(s_t+1) - V(s_t),   A_t = delta_t + gamma lambda A_t+1
        # V(s_t+1) counts as 0 if the task ended in step t, and A_t+1 if the episode did.
        outcomes = rollout.outcomes  # reward, terminated, truncated and valid, each [T, B]
        advantage = returns.gae(*outcomes, values, config.discount, config.gae_lambda)
        # Normalised over all devices; 0.01 keeps the values' errors small until there is a reward.
        centred = advantage - mesh.global_mean(advantage, rollout.valid)
        std = jnp.sqrt(mesh.global_mean(jnp.square(centred), rollout.valid) + 1e-8)
        batch = {
            "obs": rollout.obs_before,  # all but the last of obs, which is [T + 1, B, ...]
            "action": rollout.action,
            "valid": rollout.valid,  # False for a step that only resets an environment
            **rollout.extras,  # log_prob and value, as policy returned them
            "advantage": centred / jnp.maximum(std, 0.01),
            "value_target": advantage + values[:-1],
        }
        # [T, B, ...] to [B * T, ...]: first all steps of environment 0, then those of 1 ...
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), batch)

    def loss(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """Returns the losses ``[n]`` of a minibatch, which of them count, and metrics ``[n]``.

        For schedules: ``context.env_step``, the env steps before this rollout, resets included.
        """
        config = self.config
        distribution, value = self.evaluate(variables.params, batch["obs"])
        # -min(r A, clip(r) A) with r = pi(a|s) / pi_old(a|s): equation 7.
        log_ratio = distribution.log_prob(batch["action"]) - batch["log_prob"]
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon)
        policy_loss = -jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
        # Half the squared error of V(s); with clipping, the larger one of the two.
        value_loss = 0.5 * jnp.square(value - batch["value_target"])
        if (bound := config.value_clip_epsilon) is not None:
            near = batch["value"] + jnp.clip(value - batch["value"], -bound, bound)
            value_loss = jnp.maximum(value_loss, 0.5 * jnp.square(near - batch["value_target"]))
        entropy = distribution.entropy()  # the sum is equation 9
        losses = policy_loss + config.value_coefficient * value_loss
        losses = losses - config.entropy_coefficient * entropy
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            "policy/approx_kl": ratio - 1 - log_ratio,  # http://joschu.net/blog/kl-approx.html, k3
            "policy/clip_fraction": (abs(ratio - 1) > config.clip_epsilon).astype(jnp.float32),
        }
        return losses, batch["valid"], Aux(metrics)
