"""Policy and value networks as records of pure functions.

A network is a *torso* that reads observations, perhaps a recurrent *core*, and linear *heads*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_dist.mesh import vary_as
from jaxrl_dist.nn.config import NetworkConfig, TorsoConfig
from jaxrl_dist.nn.torsos import choose_torso, dense, flatten, make_mlp, make_torso, preprocess
from jaxrl_dist.spaces import Box, Space
from jaxrl_dist.types import PyTree

# --- Recurrent core -----------------------------------------------------------------------------------


def reset_core(core: PyTree, initial: PyTree, valid: jax.Array) -> PyTree:
    """``core`` ``[B, ...]`` where ``valid`` ``[B]``, elsewhere ``initial``.

    Environments reset on the step after an episode's end, which has ``valid`` False and reads the old episode's last
    observation: the core that comes out of that step has to be forgotten.
    """
    return jax.tree.map(
        lambda x, start: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, start), core, initial
    )


def _unroll_gru(
    gru: nn.GRUCell, params: PyTree, features: jax.Array, core: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs a GRU over ``features [T, B, D]`` from ``core [B, H]``, with ``reset_core`` after each step.

    Returns:
      Its outputs ``[T, B, H]`` and the core ``[B, H]`` after step ``T - 1``.
    """
    # Marked before the scan, its gradients are summed over the devices once, not at every step.
    cell, core = vary_as((params, core), features)

    def advance(core: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, _ = gru.apply(cell, core, step[0])
        return reset_core(out, jnp.zeros_like(out), step[1]), out

    core, out = jax.lax.scan(advance, core, (features, valid))
    return out, core


# --- Value of actions ---------------------------------------------------------------------------------


class NoisyDense(nn.Module):
    """A dense layer whose weights carry learned, factorised Gaussian noise: ``[N, D]`` to ``[N, features]``.

    Fortunato et al. 2018 (arXiv:1706.10295), section 3: ``W = mu + sigma * (f(eps_out) f(eps_in)^T)`` with
    ``f(x) = sign(x) sqrt(|x|)``. Each example has noise of its own; because the noise is a product, that costs one
    more matmul and not a matrix an example.
    """

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """``keys`` ``[N]`` draw the noise; None: none."""
        fan_in = x.shape[-1]
        bound = 1 / math.sqrt(fan_in)

        def uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        sigma_init = nn.initializers.constant(0.5 * bound)
        kernel = self.param("kernel", uniform, (fan_in, self.features), jnp.float32)
        bias = self.param("bias", uniform, (self.features,), jnp.float32)
        kernel_sigma = self.param("kernel_sigma", sigma_init, (fan_in, self.features), jnp.float32)
        bias_sigma = self.param("bias_sigma", sigma_init, (self.features,), jnp.float32)
        y = x @ kernel.astype(self.dtype) + jnp.broadcast_to(bias, (*x.shape[:-1], self.features)).astype(self.dtype)
        if keys is None:
            return y
        noise = jax.vmap(lambda key: jax.random.normal(key, (fan_in + self.features,)))(keys)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        into, out = noise[:, :fan_in].astype(self.dtype), noise[:, fan_in:].astype(self.dtype)
        return y + out * ((x * into) @ kernel_sigma.astype(self.dtype) + bias_sigma.astype(self.dtype).reshape(1, -1))


class _QHeads(NamedTuple):
    """What turns features into the values of actions; ``keys`` draw the noise of noisy heads."""

    init: Callable[[Sequence[jax.Array], jax.Array], PyTree]
    """``(keys, features) -> params``, of one key for each head: two if dueling, else one."""
    apply: Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]
    """``(params, features [..., D], keys [N] or None) -> [..., num_actions, num_atoms] float32``; with noise [N, D]."""


def _q_heads(num_actions: int, *, num_atoms: int, dueling: bool, noisy: bool) -> _QHeads:
    sizes = [num_actions * num_atoms, num_atoms] if dueling else [num_actions * num_atoms]
    heads: list[Any] = [NoisyDense(size) if noisy else dense(size, scale=1.0) for size in sizes]

    def init(keys: Sequence[jax.Array], features: jax.Array) -> PyTree:
        return [head.init(key, features) for head, key in zip(heads, keys, strict=True)]

    def apply(params: PyTree, features: jax.Array, keys: jax.Array | None) -> jax.Array:
        features = features.astype(jnp.float32)
        outputs = []
        for index, (head, weights) in enumerate(zip(heads, params, strict=True)):
            head_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            y = head.apply(weights, features, head_keys) if noisy else head.apply(weights, features)
            outputs.append(y.reshape(*features.shape[:-1], -1, num_atoms))
        if not dueling:
            return outputs[0]
        advantage, value = outputs
        return jnp.broadcast_to(value, advantage.shape) + advantage - advantage.mean(axis=-2, keepdims=True)

    return _QHeads(init, apply)


class QNetwork(NamedTuple):
    """The values of all actions, or the logits of their distributions over ``num_atoms`` atoms."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    apply: Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]
    """``(params, obs [N, ...], keys [N] or None) -> [N, num_actions, num_atoms] float32``; keys draw the noise."""


def q_network(
    config: TorsoConfig, observation: Space, num_actions: int, *, num_atoms: int, dueling: bool, noisy: bool
) -> QNetwork:
    """Builds the network of a value-based method.

    Args:
      num_atoms: 1 for plain values.
      dueling: separate heads for the state's value and the actions' advantages (Wang et al. 2016, equation 9).
      noisy: ``NoisyDense`` heads, which explore by themselves.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = make_torso(config, observation, dtype)
    heads = _q_heads(num_actions, num_atoms=num_atoms, dueling=dueling, noisy=noisy)

    def init(key: jax.Array) -> PyTree:
        torso_key, *head_keys = jax.random.split(key, 2 + dueling)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        return {"torso": params, "heads": heads.init(head_keys, features)}

    def apply(params: PyTree, obs: jax.Array, keys: jax.Array | None) -> jax.Array:
        features = torso.apply(params["torso"], preprocess(obs, observation, dtype))
        return heads.apply(params["heads"], features, keys)

    return QNetwork(init, apply)


class RecurrentQNetwork(NamedTuple):
    """The values of all actions, which depend on what was observed before in the episode."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    step: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, obs [B, ...], core [B, H]) -> (q [B, num_actions], core [B, H])``, all float32; who steps the
    environment applies ``reset_core`` once it knows ``valid``."""
    unroll: Callable[[PyTree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, obs [T, B, ...], core [B, H], valid [T, B]) -> (q [T, B, num_actions], core [B, H])``: ``T`` steps,
    with ``reset_core`` after each; the core returned is the one after step ``T - 1``."""
    initial_core: Callable[[int], jax.Array]
    """``(num_envs) -> core [num_envs, H]`` at the start of an episode."""


def recurrent_q_network(
    config: TorsoConfig, observation: Space, num_actions: int, *, core_size: int, dueling: bool
) -> RecurrentQNetwork:
    """Builds a torso, a GRU of ``core_size`` and the heads that ``q_network`` has.

    ``config.precision`` is that of torso and GRU; parameters, the core's state and the heads stay float32.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = make_torso(config, observation, dtype)
    gru: Any = nn.GRUCell(core_size, dtype=dtype)
    heads = _q_heads(num_actions, num_atoms=1, dueling=dueling, noisy=False)

    def initial_core(num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, core_size), jnp.float32)

    def init(key: jax.Array) -> PyTree:
        torso_key, gru_key, *head_keys = jax.random.split(key, 3 + dueling)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        (out, _), cell = gru.init_with_output(gru_key, initial_core(1), features)
        return {"torso": params, "gru": cell, "heads": heads.init(head_keys, out)}

    def encode(params: PyTree, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], preprocess(obs, observation, dtype))

    def decode(params: PyTree, out: jax.Array) -> jax.Array:
        return heads.apply(params["heads"], out, None)[..., 0]

    def step(params: PyTree, obs: jax.Array, core: jax.Array) -> tuple[jax.Array, jax.Array]:
        core, _ = gru.apply(params["gru"], core, encode(params, obs))
        return decode(params, core), core

    def unroll(params: PyTree, obs: jax.Array, core: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, core = _unroll_gru(gru, params["gru"], encode(params, obs), core, valid)
        return decode(params, out), core

    return RecurrentQNetwork(init, step, unroll, initial_core)


# --- Actor and critics apart, for off-policy learning -----------------------------------------------------


class Network(NamedTuple):
    """A function of observations and perhaps actions."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    apply: Callable[..., jax.Array]
    """``(params, obs [N, ...]) -> [N, outputs] float32``; a critic's as ``critic_network`` says."""


def policy_network(config: TorsoConfig, observation: Space, num_outputs: int) -> Network:
    """A torso and a head, whose weights start at scale 0.01.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = make_torso(config, observation, dtype)
    head: Any = dense(num_outputs, scale=0.01)

    def init(key: jax.Array) -> PyTree:
        torso_key, head_key = jax.random.split(key)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        return {"torso": params, "head": head.init(head_key, features.astype(jnp.float32))}

    def apply(params: PyTree, obs: jax.Array) -> jax.Array:
        features = torso.apply(params["torso"], preprocess(obs, observation, dtype))
        return head.apply(params["head"], features.astype(jnp.float32))

    return Network(init, apply)


def critic_network(
    config: TorsoConfig, observation: Space, num_critics: int, *, action_size: int = 0, num_actions: int = 1
) -> Network:
    """Several critics of one form, each with parameters of its own.

    ``apply`` is ``(params, obs [N, ...], action [N, action_size]) -> [num_critics, N] float32``, or with
    ``num_actions``, for discrete ones, ``(params, obs) -> [num_critics, N, num_actions]``.

    Vectors meet the action in the first layer; the features of an image meet it in an MLP behind the CNN.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    image = choose_torso(config.torso, observation) != "mlp"
    torso = make_torso(config, observation, dtype)
    mlp: Any = make_mlp(config, 1, dtype)
    head: Any = dense(num_actions, scale=1.0)
    axes = len(observation.shape) if isinstance(observation, Box) else 1

    def one(params: PyTree, obs: jax.Array, action: jax.Array | None) -> jax.Array:
        x = preprocess(obs, observation, dtype)
        x = torso.apply(params["torso"], x) if image or action is None else flatten(x, axes)
        if action is not None:
            x = mlp.apply(params["mlp"], jnp.concatenate([x, action.astype(dtype)], axis=-1))
        q = head.apply(params["head"], x.astype(jnp.float32))
        return q[..., 0] if action is not None else q

    def init_one(key: jax.Array) -> PyTree:
        torso_key, mlp_key, head_key = jax.random.split(key, 3)
        x, params = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype), {}
        if image or not action_size:
            x, params["torso"] = torso.init_with_output(torso_key, x)
        if action_size:
            x = jnp.concatenate([x if image else flatten(x, axes), jnp.zeros((1, action_size), dtype)], axis=-1)
            x, params["mlp"] = mlp.init_with_output(mlp_key, x)
        return params | {"head": head.init(head_key, x.astype(jnp.float32))}

    def init(key: jax.Array) -> PyTree:
        return [init_one(key) for key in jax.random.split(key, num_critics)]

    def apply(params: PyTree, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        return jnp.stack([one(each, obs, action) for each in params])

    return Network(init, apply)


# --- Actor and critic ---------------------------------------------------------------------------------


class ActorCritic(NamedTuple):
    """A policy and a value function; ``P`` numbers parametrise the distribution of an action."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    step: Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, jax.Array, PyTree]]
    """``(params, obs [B, ...], core [B, ...]) -> (outputs [B, P], value [B], core [B, ...])``, all float32; who steps
    the environment applies ``reset_core`` once it knows ``valid``."""
    unroll: Callable[[PyTree, jax.Array, PyTree, jax.Array], tuple[jax.Array, jax.Array, PyTree]]
    """``(params, obs [T, B, ...], core [B, ...], valid [T, B]) -> (outputs [T, B, P], values [T, B], core [B, ...])``:
    ``T`` steps, with ``reset_core`` after each; the core returned is the one after step ``T - 1``."""
    initial_core: Callable[[int], PyTree]
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode; ``()`` if there is no recurrent core."""


def actor_critic(
    config: NetworkConfig, observation: Space, num_outputs: int, shared_torso: bool, log_std: int = 0
) -> ActorCritic:
    """Builds the network of a policy gradient method.

    Args:
      config: ``hidden_sizes`` and ``activation`` are the MLP torso's; CNNs have their papers' widths and relu.
        ``precision`` is that of torso and core; parameters, the core's state and the heads stay float32.
      observation: the observation space; see ``preprocess`` and ``choose_torso``.
      num_outputs: size of the policy head, whose weights start at scale 0.01 (the value head's at 1).
      shared_torso: one torso for policy and value, else one for each; a recurrent core always has one.
      log_std: if ``A > 0``, ``P = num_outputs + A``: the outputs end with a trained vector ``[A]`` that starts at
        ``log(config.initial_std)`` and does not depend on the observation, the logarithm of a standard deviation.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = make_torso(config, observation, dtype)
    gru: Any = nn.GRUCell(config.core_size, dtype=dtype)
    policy: Any = dense(num_outputs, scale=0.01)
    value: Any = dense(1, scale=1.0)
    recurrent = config.core == "gru"
    torsos = ("torso",) if shared_torso or recurrent else ("policy_torso", "value_torso")

    def initial_core(num_envs: int) -> PyTree:
        return jnp.zeros((num_envs, config.core_size), jnp.float32) if recurrent else ()

    def init(key: jax.Array) -> PyTree:
        keys = iter(jax.random.split(key, 5))
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        params = {name: torso.init(next(keys), x) for name in torsos}
        features = torso.apply(params[torsos[0]], x)
        if recurrent:
            (features, _), params["gru"] = gru.init_with_output(next(keys), initial_core(1), features)
        if log_std:
            params["log_std"] = jnp.full((log_std,), math.log(config.initial_std), jnp.float32)
        return params | {"policy": policy.init(next(keys), features), "value": value.init(next(keys), features)}

    def encode(params: PyTree, obs: jax.Array) -> list[jax.Array]:
        """Features ``[..., width]`` for both heads, or for each."""
        x = preprocess(obs, observation, dtype)
        return [torso.apply(params[name], x) for name in torsos]

    def decode(params: PyTree, features: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs = policy.apply(params["policy"], features[0])
        if log_std:
            scale = jnp.broadcast_to(params["log_std"], (*outputs.shape[:-1], log_std))
            outputs = jnp.concatenate([outputs, scale], axis=-1)
        return outputs, value.apply(params["value"], features[-1])[..., 0]

    def step(params: PyTree, obs: jax.Array, core: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        features = encode(params, obs)
        if recurrent:
            core, _ = gru.apply(params["gru"], core, features[0])
            features = [core]
        return *decode(params, features), core

    def unroll(params: PyTree, obs: jax.Array, core: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        features = encode(params, obs)
        if recurrent:
            out, core = _unroll_gru(gru, params["gru"], features[0], core, valid)
            features = [out]
        return *decode(params, features), core

    return ActorCritic(init, step, unroll, initial_core)
