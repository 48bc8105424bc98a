"""Recurrent cores: the part of a network that remembers earlier steps of an episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.mesh import vary_as
from jaxrl_dist.nn.config import NetworkConfig
from jaxrl_dist.types import Array, PyTree


class Core(NamedTuple):
    """A recurrent core as pure functions. Its parameters are entries of its network's dict of parameters."""

    init: Callable[[jax.Array, PyTree], tuple[dict[str, PyTree], PyTree]]
    """``(key, features [1, D]) -> (params, output [1, H])``; float32 parameters. Only the output's shape matters."""
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    """``(params, features [B, D], core [B, ...]) -> (output [B, H], core [B, ...])``. The caller applies ``reset_core``
    once it knows the step's ``valid``."""
    unroll: Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]
    """``(params, features [T, B, D], core [B, ...], valid [T, B]) -> (output [T, B, H], core [B, ...])``: ``T`` steps
    with ``reset_core`` after each; the returned core follows step ``T - 1``."""
    initial: Callable[[int], PyTree]
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode."""


NO_CORE = Core(
    init=lambda key, features: ({}, features),
    step=lambda params, features, core: (features, core),
    unroll=lambda params, features, core, valid: (features, core),
    initial=lambda num_envs: (),
)
"""Passes features on and remembers nothing; its state is ``()``."""


def reset_core(core: PyTree, initial: PyTree, valid: Array) -> PyTree:
    """Returns ``core [B, ...]`` where ``valid [B]`` is True, elsewhere ``initial [B, ...]``.

    An environment resets on the step after its episode's end. That step has ``valid`` False, and its policy still reads
    the old episode's last observation, so the core that it returns must not reach the new episode.
    """
    return jax.tree.map(
        lambda x, start: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, start), core, initial
    )


def gru(size: int, dtype: DTypeLike) -> Core:
    """A gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), with its parameters under ``gru``.

    Its layers compute in ``dtype``; its state and its output ``[..., size]`` are float32.
    """
    cell: Any = nn.GRUCell(size, dtype=dtype)

    def initial(num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, size), jnp.float32)

    def init(key: jax.Array, features: jax.Array) -> tuple[dict[str, PyTree], jax.Array]:
        (_, output), params = cell.init_with_output(key, initial(1), features)
        return {"gru": params}, output

    def step(params: PyTree, features: jax.Array, core: jax.Array) -> tuple[jax.Array, jax.Array]:
        core, output = cell.apply(params["gru"], core, features)
        return output, core

    def unroll(params: PyTree, features: jax.Array, core: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Marking parameters before the scan sums their gradients over devices once, not at every step.
        weights, core = vary_as(({"gru": params["gru"]}, core), features)

        def advance(core: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            features, valid = inputs
            output, core = step(weights, features, core)
            return reset_core(core, jnp.zeros_like(core), valid), output

        core, output = jax.lax.scan(advance, core, (features, valid))
        return output, core

    return Core(init, step, unroll, initial)


def beside(core: Core) -> Core:
    """Gives a core two features: it reads the first and passes the second on, beside its output, for a critic."""

    def init(key: jax.Array, features: PyTree) -> tuple[dict[str, PyTree], PyTree]:
        params, output = core.init(key, features[0])
        return params, join(output, features[1])

    def join(output: PyTree, further: PyTree) -> PyTree:
        return output, jnp.concatenate([output, further.astype(output.dtype)], axis=-1)

    def step(params: PyTree, features: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        output, state = core.step(params, features[0], state)
        return join(output, features[1]), state

    def unroll(params: PyTree, features: PyTree, state: PyTree, valid: jax.Array) -> tuple[PyTree, PyTree]:
        output, state = core.unroll(params, features[0], state, valid)
        return join(output, features[1]), state

    return Core(init, step, unroll, core.initial)


def make_core(config: NetworkConfig, dtype: DTypeLike) -> Core:
    """Returns the core that ``config.core`` names."""
    return gru(config.core_size, dtype) if config.core == "gru" else NO_CORE
