"""Networks that read observations with parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest
from probes import box

from jaxrl_dist.algorithms import config_class
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import networks, observations
from jaxrl_dist.nn.config import NetworkConfig
from jaxrl_dist.nn.torsos import choose_torso
from jaxrl_dist.spaces import Box, Discrete, Space, zeros
from jaxrl_dist.types import Context

IMAGE = Box(
    (12, 12, 3),
    np.dtype(np.uint8),
    np.zeros((12, 12, 3), np.uint8),
    np.full((12, 12, 3), 255, np.uint8),
)
SPACE: dict[str, Space] = {
    "speed": box(2),
    "arm": {"angle": box(3), "grip": Discrete(2)},
    "camera": IMAGE,
}
VECTORS: dict[str, Space] = {"speed": box(2), "arm": {"angle": box(3), "grip": Discrete(2)}}
NET = NetworkConfig(hidden_sizes=(6,), torso="auto")


def sample(space: Space, num: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.integers(0, 2, x.shape).astype(x.dtype), zeros(space, num))


def test_vectors_are_read_side_by_side_as_one() -> None:
    """A dict of vectors gives what their concatenation, in the order of their names,
    gives with the same parameters.
    """
    network = networks.actor_critic(NET, VECTORS, 2, shared_torso=False)
    flat = networks.actor_critic(NET, box(7), 2, shared_torso=False)
    obs = sample(VECTORS, 5)
    params, other = jax.jit(network.init)(jax.random.key(0)), jax.jit(flat.init)(jax.random.key(1))
    moved = jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(params))
    joined = np.concatenate(
        [obs["arm"]["angle"], np.eye(2)[obs["arm"]["grip"]], obs["speed"]], 1
    ).astype(np.float32)
    for ours, theirs in zip(
        network.step(params, obs, ()), flat.step(moved, joined, ()), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


@pytest.mark.parametrize("name", ["camera", "mlp", "join"])
def test_every_part_matters_together_with_the_others(name: str) -> None:
    """Linear heads over separate features could not represent a product of two parts;
    the joining layer can.

    An image may have the name of one of our layers."""
    space = {name if part == "camera" else part: inner for part, inner in SPACE.items()}
    network = networks.policy_network(NET, space, 1)
    params = jax.jit(network.init)(jax.random.key(0))
    obs, other = sample(space, 4), sample(space, 4, seed=1)

    apply = jax.jit(network.apply)

    def output(**changed: Any) -> np.ndarray:
        return np.asarray(apply(params, {**obs, **changed}))

    plain = output()
    for part in space:
        assert not np.allclose(output(**{part: other[part]}), plain)
    both = output(speed=other["speed"], **{name: other[name]})
    assert not np.allclose(
        both - plain, output(speed=other["speed"]) + output(**{name: other[name]}) - 2 * plain
    )


@pytest.mark.parametrize("space", [SPACE, VECTORS, {"only": IMAGE}])
def test_leading_axes_do_not_matter(space: Space) -> None:
    network = networks.actor_critic(NET, space, 2, shared_torso=True)
    params, obs = jax.jit(network.init)(jax.random.key(0)), sample(space, 6)
    step = jax.jit(network.step)
    rows = step(params, obs, ())[0]
    folded = step(params, jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), obs), ())[0]
    np.testing.assert_allclose(
        np.asarray(folded).reshape(rows.shape), np.asarray(rows), rtol=1e-5, atol=1e-6
    )


def test_a_torso_of_ones_own_gets_the_parts() -> None:
    def init(key: jax.Array, x: Any) -> Any:
        assert x["camera"].shape == (1, 12, 12, 3) and x["arm"]["grip"].shape == (1, 2)
        return jnp.ones(2)

    def apply(params: Any, x: Any) -> jax.Array:
        return x["speed"] * params[None] + jnp.mean(x["camera"])

    network = networks.policy_network(NetworkConfig(torso=(init, apply)), SPACE, 3)
    obs = sample(SPACE, 4)
    assert jax.jit(network.apply)(network.init(jax.random.key(0)), obs).shape == (4, 3)


def test_torsos_are_chosen_by_part() -> None:
    assert choose_torso("auto", SPACE) == "parts" and choose_torso("auto", VECTORS) == "mlp"
    assert choose_torso("impala", SPACE) == "parts" and choose_torso("mlp", SPACE) == "mlp"
    with pytest.raises(
        ConfigError, match=r"torso nature reads images of 36 .* no part .*; use torso auto or mlp"
    ):
        choose_torso("nature", SPACE)


# --- Critics that see more ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"core": "gru", "core_size": 5}, marks=pytest.mark.case)],
    ids=["plain", "gru"],
)
def test_the_policy_does_not_see_what_only_the_critic_sees(fields: dict[str, Any]) -> None:
    spec = find(parts.Secret()).spec
    algorithm = config_class("ppo")(hidden_sizes=(4,), critic_sees="state", **fields).make(spec)
    variables, core = jax.jit(algorithm.init)(jax.random.key(0)), algorithm.initial_core(3)
    variables = jax.tree.map(lambda x: x + 0.1, variables)
    obs = {"state": jnp.full((3, 1), 0.5), "hint": jnp.ones((3, 1))}
    context = Context(jax.random.split(jax.random.key(1), 3), jnp.float32(0))
    action, after, extras = jax.jit(algorithm.policy)(variables, obs, core, context)
    other, other_after, others = jax.jit(algorithm.policy)(
        variables, {**obs, "state": jnp.full((3, 1), -0.5)}, core, context
    )
    jax.tree.map(np.testing.assert_array_equal, (action, after), (other, other_after))
    assert np.all(extras["log_prob"] == others["log_prob"]) and not np.any(
        np.isclose(extras["value"], others["value"])
    )
    blind, _, _ = jax.jit(algorithm.policy)(variables, {**obs, "hint": -obs["hint"]}, core, context)
    assert not np.allclose(action["guess"], blind["guess"])


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_replayed_critics_see_more_too(name: str) -> None:
    spec = find("envpool:CartpoleBalance-v1").spec
    assert isinstance(spec.observation, dict)
    hidden = "velocity"
    algorithm = config_class(name)(hidden_sizes=(4,), critic_sees=hidden).make(spec)
    params = jax.jit(algorithm.init)(jax.random.key(0)).params
    sizes = {
        key: next(
            x.shape[0] for x in jax.tree.leaves(params[key]) if x.ndim == 2 and x.shape[1] == 4
        )
        for key in ("actor", "critic")
    }
    hidden_size = spec.observation[hidden].shape[0]
    assert sizes["critic"] == sizes["actor"] + hidden_size + spec.action.shape[0]


def test_what_only_the_critic_sees_must_be_there() -> None:
    secret, grid, plain = (
        find(parts.Secret()).spec,
        find(parts.Grid()).spec,
        find("CartPole-v1").spec,
    )
    for spec, hidden, message in (
        (secret, ("speed",), "has no such part to observe; its parts are hint, state"),
        (secret, ("state", "hint"), "leaves the policy of object:Secret nothing to observe"),
        (grid, ("mask",), "has no such part to observe; its parts are inner, numbers"),
        (plain, ("state",), "has no such part to observe; its observation has no parts"),
    ):
        with pytest.raises(ConfigError, match=message):
            observations.input_space(spec, hidden)
    for family in ("jaxmarl", "other"):
        with pytest.raises(ConfigError, match="its observation has no parts") as error:
            observations.input_space(dataclasses.replace(plain, family=family), ("state",))
        assert ("; add one with --env-options state=true" in error.value.with_flags) == (
            family == "jaxmarl"
        )


def grey(*shape: int, high: int = 255) -> Box:
    return Box(shape, np.dtype(np.uint8), np.zeros(shape, np.uint8), np.full(shape, high, np.uint8))


def test_a_grey_image_is_read_as_one_channel() -> None:
    """With the parameters of a CNN of one channel; a board of small numbers stays a vector."""
    obs = np.random.default_rng(0).integers(0, 256, (5, 84, 84)).astype(np.uint8)
    assert choose_torso("auto", grey(84, 84)) == choose_torso("nature", grey(84, 84)) == "nature"
    network = networks.policy_network(NET, grey(84, 84), 2)
    params = jax.jit(network.init)(jax.random.key(0))
    other = networks.policy_network(NET, grey(84, 84, 1), 2)
    wanted = jax.jit(other.apply)(params, obs[..., None])
    np.testing.assert_array_equal(jax.jit(network.apply)(params, obs), wanted)
    assert choose_torso("auto", grey(84, 84, high=12)) == "mlp"
    assert choose_torso("auto", grey(4, 128)) == "mlp"  # a stack of an Atari game's memory
    with pytest.raises(ConfigError, match="without an axis for the channels"):
        choose_torso("nature", grey(84, 84, high=12))


def test_a_grey_part_is_read_beside_others() -> None:
    space: dict[str, Space] = {"camera": grey(12, 12), "speed": box(2)}
    network = networks.actor_critic(NET, space, 2, shared_torso=True)
    assert {x.ndim for x in jax.tree.leaves(network.init(jax.random.key(0)))} >= {2, 4}
