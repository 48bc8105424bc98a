"""Networks of the user's own, of any library, in place of the torso."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import nnx
from probes import acted, box, random_rollout, spec

import jaxrl_dist
from jaxrl_dist import cli, mesh
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory.ring import windows
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.torsos import make_torso
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.types import Context, EnvSpec

WIDTH = 5


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.tanh(nn.Dense(WIDTH)(x.reshape(len(x), -1)))


def linen(size: int) -> Any:
    return Linen()


def nnx_pair(size: int) -> Any:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(size, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.tanh(self.dense(x.reshape(len(x), -1)))

    graph = nnx.graphdef(Net(nnx.Rngs(0)))
    return lambda key, x: nnx.state(Net(nnx.Rngs(key))), lambda params, x: nnx.merge(graph, params)(
        x
    )


def equinox_pair(size: int) -> Any:
    eqx = pytest.importorskip("equinox", reason="the extra 'test' brings it")

    def net(key: jax.Array) -> Any:
        return eqx.nn.Sequential(
            [eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(size, WIDTH, key=key), eqx.nn.Lambda(jnp.tanh)]
        )

    static = eqx.filter(net(jax.random.key(0)), eqx.is_array, inverse=True)
    return (
        lambda key, x: eqx.filter(net(key), eqx.is_array),
        lambda params, x: jax.vmap(eqx.combine(params, static))(x),
    )


def functions(size: int) -> Any:
    def init(key: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (size, WIDTH)) / size**0.5}

    return init, lambda params, x: jnp.tanh(x.reshape(len(x), -1) @ params["w"])


LIBRARIES: dict[str, Callable[[int], Any]] = {
    "flax linen": linen,
    "flax nnx": nnx_pair,
    "equinox": equinox_pair,
    "functions": functions,
}
IMAGE = Box(
    (4, 6, 6), np.dtype(np.uint8), np.zeros((4, 6, 6), np.uint8), np.full((4, 6, 6), 255, np.uint8)
)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "space", [box(3), IMAGE, Discrete(4)], ids=["vector", "image", "categories"]
)
def test_it_sees_what_torsos_see(library: str, space: Any) -> None:
    """A batch along one axis, whatever the axes of the observations,
    which come as the other torsos have them.
    """
    shape = {(): (4,), (4, 6, 6): (6, 6, 4)}.get(space.shape, space.shape)
    torso = make_torso(
        TorsoConfig(torso=LIBRARIES[library](int(np.prod(shape)))), space, jnp.dtype(jnp.float32)
    )
    x = np.random.default_rng(1).normal(size=(2, 3, *shape)).astype(np.float32)
    apply = jax.jit(torso.apply)
    params = jax.jit(torso.init)(jax.random.key(0), x[0, :1])
    features = apply(params, x[0, :1])
    assert features.shape == (1, WIDTH) and all(
        leaf.dtype == np.float32 for leaf in jax.tree.leaves(params)
    )
    together = apply(params, x)
    assert together.shape == (2, 3, WIDTH)
    apart = np.stack([[apply(params, each[None])[0] for each in row] for row in x])
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-6)


ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("flax linen", {"normalize_advantages": False}),  # which takes a mean over devices
    "a2c": ("flax nnx", {}),
    "impala": ("equinox", {"core": "gru", "core_size": 4}),
    "dqn": ("functions", {"dueling": True}),
    "sac": ("flax linen", {"hidden_sizes": (7,)}),
}


@pytest.mark.parametrize("name", runs.cases(ALGORITHMS, "ppo", "a2c"))
def test_every_algorithm_learns_by_it(name: str) -> None:
    """Its parameters are the torso's, and all of them have a gradient but the target's."""
    library, fields = ALGORITHMS[name]
    env: EnvSpec = spec(action=box(2, bound=1) if name == "sac" else Discrete(4))
    config = config_class(name)(torso=LIBRARIES[library](3), **fields)
    algorithm = config.make(env)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    torsos = [leaf for leaf in jax.tree.leaves(variables.params) if set(leaf.shape) == {3, WIDTH}]
    assert len(torsos) == (3 if name == "sac" else 1)
    rollout = acted(algorithm, variables, random_rollout(algorithm, env, 6, 4, end_chance=0.1))
    if algorithm.replay is not None:
        rollout = windows(rollout, algorithm.window)
    keys = jax.random.split(jax.random.key(0), rollout.reward.shape[1])
    target = algorithm.initial_target(variables.params)
    batch = mesh.by_hand(algorithm.postprocess)(variables, rollout, Context(keys, target=target))

    def total(params: Any) -> jax.Array:
        examples = jax.random.split(jax.random.key(1), len(jax.tree.leaves(batch)[0]))
        losses, mask, _ = jax.jit(algorithm.loss)(
            variables._replace(params=params), batch, Context(examples, target=target)
        )
        return jnp.sum(losses * mask)

    grads = jax.jit(jax.grad(total))(variables.params)
    moved = [
        bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(grads) if set(leaf.shape) == {3, WIDTH}
    ]
    assert len(moved) == len(torsos) and all(moved)


def test_a_run_and_its_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which needs the network once more: no file holds it."""
    sizes = {
        "num_envs": 8,
        "rollout_length": 16,
        "total_env_steps": 256,
        "report_interval": 128,
        "num_devices": 1,
    }
    net = nnx_pair(4)
    config = jaxrl_dist.preset("a2c", "CartPole-v1", torso=net, evaluation_episodes=2, **sizes)
    *_, last = jaxrl_dist.train(dataclasses.replace(config, run_dir=str(tmp_path / "run")))
    assert (
        runs.read_json(tmp_path / "run/config.json")["hyperparameters"]["torso"] == "object:tuple"
    )
    policy = jaxrl_dist.load_policy(tmp_path / "run", torso=net)
    jax.tree.map(np.testing.assert_array_equal, policy.variables, last.variables())
    assert policy(np.zeros((3, 4)))[0].shape == (3,)
    message = r"its torso, object:tuple, was a Python object.*load_policy\(run_dir, torso=...\)"
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.load_policy(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another network: params/policy/params/kernel is"):
        jaxrl_dist.load_policy(tmp_path / "run", torso="mlp")
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 2
    assert "was a Python object" in capsys.readouterr().err


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown name": (
        "lstm",
        "unknown torso 'lstm'; these work: auto, mlp, minatar, nature, impala",
    ),
    "one function": (jnp.tanh, "torso must be a name, or a pair of functions (init, apply), not"),
    "a class": (Linen, "torso must be an instance, such as Linen(), not the class Linen"),
    "no functions": (
        (1, 2),
        "torso must be a name, or a pair of functions (init, apply), not (1, 2)",
    ),
    "no batch": (
        (lambda key, x: {}, lambda params, x: x[0]),
        "returned (3,) for observations (1, 3); it must return (1, width)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_network(what: str) -> None:
    torso, message = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        config_class("ppo")(torso=torso).make(spec()).init(jax.random.key(0))
    assert message in str(error.value) and "\n" not in str(error.value)
