"""Learned models of environments, with which a policy plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import spaces
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.layers import dense
from jaxrl_dist.nn.observations import preprocess
from jaxrl_dist.nn.torsos import make_mlp, make_torso
from jaxrl_dist.spaces import Space
from jaxrl_dist.types import PyTree


class Model(NamedTuple):
    """The functions of MuZero's network (Schrittwieser et al. 2020); all outputs are float32."""

    init: Callable[[jax.Array], dict[str, PyTree]]
    """``(key) -> params``, float32."""
    represent: Callable[[PyTree, PyTree], jax.Array]
    """``(params, obs [N, ...]) -> state [N, S]``, whose numbers are between 0 and 1."""
    advance: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, state [N, S], action [N]) -> (state [N, S], reward [N, L])``:
    what an action leads to."""
    predict: Callable[[PyTree, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, state [N, S]) -> (policy [N, num_actions], value [N, L])``."""


def make_model(
    config: TorsoConfig, observation: Space, num_actions: int, state_size: int, num_atoms: int
) -> Model:
    """A model whose states are vectors: a torso reads observations, MLPs read states.

    The policy, the value and the reward are logits, of the actions and of ``num_atoms`` atoms.
    Their layers start at 0, so a policy that plans with a new model acts uniformly.
    """
    dtype = jnp.dtype(config.precision)
    torso: Any = make_torso(config, observation, dtype)
    encode = dense(state_size, scale=1.0)
    change = dense(state_size, scale=1.0)
    mlp: Any = make_mlp(config, 1, dtype)
    heads: dict[str, Any] = {
        "policy": dense(num_actions, scale=0.0),
        "value": dense(num_atoms, scale=0.0),
        "reward": dense(num_atoms, scale=0.0),
    }

    def init(key: jax.Array) -> dict[str, PyTree]:
        keys = iter(jax.random.split(key, 5 + len(heads)))
        obs = preprocess(spaces.zeros(observation, 1), observation, dtype)
        torso_params = torso.init(next(keys), obs)
        features = torso.apply(torso_params, obs)
        state = jnp.zeros((1, state_size))
        action = jnp.zeros((1, num_actions))
        both, dynamics = mlp.init_with_output(next(keys), jnp.concatenate([state, action], axis=-1))
        read, prediction = mlp.init_with_output(next(keys), state)
        # keys go to the layers in this order
        return {
            "torso": torso_params,
            "encode": encode.init(next(keys), features.astype(jnp.float32)),
            "dynamics": dynamics,
            "change": change.init(next(keys), both),
            "prediction": prediction,
            "policy": heads["policy"].init(next(keys), read),
            "value": heads["value"].init(next(keys), read),
            "reward": heads["reward"].init(next(keys), both),
        }

    def apply(layer: Any, params: PyTree, features: jax.Array) -> jax.Array:
        output: jax.Array = layer.apply(params, features.astype(jnp.float32))
        return output

    def represent(params: PyTree, obs: PyTree) -> jax.Array:
        features = torso.apply(params["torso"], preprocess(obs, observation, dtype))
        return scaled(apply(encode, params["encode"], features))

    def advance(params: PyTree, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = jnp.concatenate([state, jax.nn.one_hot(action, num_actions)], axis=-1)
        features = mlp.apply(params["dynamics"], both)
        following = scaled(state + apply(change, params["change"], features))
        return following, apply(heads["reward"], params["reward"], features)

    def predict(params: PyTree, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        features = mlp.apply(params["prediction"], state)
        policy = apply(heads["policy"], params["policy"], features)
        return policy, apply(heads["value"], params["value"], features)

    return Model(init, represent, advance, predict)


def scaled(state: jax.Array) -> jax.Array:
    """Scales each state ``[N, S]`` to the range 0 .. 1 (Schrittwieser et al. 2020, appendix G)."""
    low = jnp.broadcast_to(jnp.min(state, axis=-1, keepdims=True), state.shape)
    high = jnp.broadcast_to(jnp.max(state, axis=-1, keepdims=True), state.shape)
    return (state - low) / jnp.maximum(high - low, 1e-5)
