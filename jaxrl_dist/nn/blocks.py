"""Layers that read a whole sequence, and forget what lies before a reset.

Both are called with ``(features [T, B, D], core [B, ...], valid [T, B])`` and return
``(output [T, B, size], core)``, both float32, as ``Core.unroll`` does; ``cores`` says what the core
holds.
"""

from __future__ import annotations

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.nn.layers import LayerNorm, multiply
from jaxrl_dist.types import PyTree


class _Gate(nn.Module):
    """The GRU-type gate ``g(x, y)`` of Parisotto et al. (2020), section 3.2,
    in place of a residual sum ``x + y``.

    The bias ``b_g`` starts at 0. The paper's 2 keeps twelve blocks near the identity at first. A
    single block does not need that, and PPO remembers less with it: on MemoryChain, only one seed
    of three then reached 0.9.
    """

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(name: str, x: jax.Array) -> jax.Array:
            dense = nn.Dense(y.shape[-1], use_bias=False, dtype=self.dtype, name=name)
            output: jax.Array = dense(x)
            return output.astype(jnp.float32)

        bias = self.param("bias", nn.initializers.zeros, y.shape[-1:], jnp.float32)
        reset = nn.sigmoid(layer("w_r", y) + layer("u_r", x))
        update = nn.sigmoid(layer("w_z", y) + layer("u_z", x) - jnp.broadcast_to(bias, y.shape))
        return (1 - update) * x + update * nn.tanh(layer("w_g", y) + layer("u_g", reset * x))


class GatedAttention(nn.Module):
    """One block of the gated transformer, Parisotto et al. (2020),
    https://arxiv.org/abs/1910.06764, figure 1.

    Positions are learned vectors, one for each distance in steps, which are added to keys (Shaw et
    al. 2018, https://arxiv.org/abs/1803.02155, equation 4). There are four heads, or the largest
    number that divides both 4 and ``size``.
    """

    size: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, features: jax.Array, core: PyTree, valid: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        steps = len(features)
        window = core["there"].shape[1]
        heads = math.gcd(self.size, 4)
        split = (heads, self.size // heads)

        def layer(name: str, x: jax.Array) -> jax.Array:
            output: jax.Array = nn.Dense(self.size, dtype=self.dtype, name=name)(x)
            return output

        def head(name: str, x: jax.Array) -> jax.Array:
            return layer(name, x).reshape(*x.shape[:-1], *split)

        x = layer("embed", features).astype(jnp.float32)
        inputs = jnp.concatenate([jnp.swapaxes(core["inputs"], 0, 1), x])  # [window + T, B, size]
        # The episode number of each step, and of the step after them.
        ends = jnp.cumsum(~valid, axis=0)
        episode = jnp.concatenate([core["there"].T.astype(int) - 1, jnp.zeros_like(ends[:1]), ends])

        normal = LayerNorm(1, self.dtype, name="norm_attention")(inputs)
        query = head("query", normal[window:])
        key = head("key", normal)
        value = head("value", normal)
        init = nn.initializers.normal(0.02)
        position = self.param("position", init, (window + 1, *split), jnp.float32)
        attended = _attended(query, key, value, position.astype(self.dtype), episode[:-1])

        joined = nn.relu(layer("join", attended.reshape(x.shape)))
        x = _Gate(self.dtype, name="gate_attention")(x, joined)
        hidden = nn.relu(layer("hidden", LayerNorm(1, self.dtype, name="norm_mlp")(x)))
        x = _Gate(self.dtype, name="gate_mlp")(x, nn.relu(layer("output", hidden)))

        exists = (episode[steps : steps + window] == episode[-1:]).T
        newest = jnp.where(exists[..., None], jnp.swapaxes(inputs[steps:], 0, 1), 0.0)
        return x, {"inputs": newest, "there": exists.astype(jnp.float32)}


def _attended(
    query: jax.Array, key: jax.Array, value: jax.Array, position: jax.Array, episode: jax.Array
) -> jax.Array:
    """Returns what each step reads of itself and of the ``W`` steps before it, if they belong to
    its episode.

    Steps are taken in blocks, so that a block's keys are one array:
    ``W`` earlier keys, and the keys of its own steps.

    Args:
      query: ``[T, B, heads, D]``.
      key, value: ``[W + T, B, heads, D]``.
      position: ``[W + 1, heads, D]``, added to the keys:
        of the oldest step that is seen to the step itself.
      episode: ``[W + T, B]``, the number of each step's episode.

    Returns:
      ``[T, B, heads, D]``.
    """
    steps = len(query)
    window = len(position) - 1
    size = min(steps, max(window, 1))
    more = -steps % size  # further steps, which see each other, fill the last block
    query, key, value = (jnp.pad(x, ((0, more), *[(0, 0)] * 3)) for x in (query, key, value))
    if more:  # ONNX has no padding by nothing
        episode = jnp.pad(episode, ((0, more), (0, 0)), mode="edge")
    first = jnp.arange(0, steps, size)[:, None]
    rows = first + window + jnp.arange(size)[None]
    seen = first + jnp.arange(window + size)[None]

    query = query[rows - window]
    places = jnp.einsum("nqbhd,whd->nbhqw", query, position)
    # The place of the key w of query q is column q + w: with so much padding,
    # each row begins one column further.
    places = jnp.pad(places, ((0, 0),) * 4 + ((0, size),))
    places = places.reshape(*places.shape[:3], -1)[..., : size * (window + size)]
    places = places.reshape(*places.shape[:3], size, window + size)
    scores = jnp.einsum("nqbhd,nkbhd->nbhqk", query, key[seen]) + places
    scores = scores / math.sqrt(query.shape[-1])
    ahead = jnp.arange(window + size)[None] - jnp.arange(size)[:, None]
    same = episode[rows][:, :, None] == episode[seen][:, None]  # [N, size, window + size, B]
    visible = jnp.moveaxis(same, -1, 1)
    visible &= jnp.broadcast_to((ahead >= 0) & (ahead <= window), visible.shape)
    scores = jnp.where(visible[:, :, None], scores.astype(jnp.float32), -jnp.inf)
    weights = nn.softmax(scores, axis=-1)
    attended = jnp.einsum("nbhqk,nkbhd->nqbhd", weights.astype(query.dtype), value[seen])
    return attended.reshape(-1, *attended.shape[2:])[:steps]


class LinearRecurrence(nn.Module):
    """A linear recurrent unit, Orvieto et al. (2023), https://arxiv.org/abs/2303.06349,
    with a gated output.

    ``x' = lambda x + gamma B u`` (equation 7 and section 3.4) with complex, diagonal ``lambda``.
    The output is a gated linear unit of ``Re(C x) + D u``, as in the paper's blocks. At the start
    ``|lambda|`` is between 0.9 and 0.999, for memories of 10 to 1000 steps, and phases are below pi
    / 10, as for the paper's longest sequences (section 3.4).
    """

    size: int
    dtype: DTypeLike
    slowest: float = 0.999
    fastest: float = 0.9
    largest_phase: float = math.pi / 10

    @nn.compact
    def __call__(
        self, features: jax.Array, core: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def decay_rate(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            """The magnitude is uniform in the ring's area (lemma 3.2)."""
            square = jax.random.uniform(key, shape, dtype, self.fastest**2, self.slowest**2)
            return jnp.log(-0.5 * jnp.log(square))

        def frequency(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.log(self.largest_phase * jax.random.uniform(key, shape, dtype, 1e-3, 1.0))

        rate = jnp.exp(self.param("decay_rate", decay_rate, (self.size,), jnp.float32))
        phase = jnp.exp(self.param("frequency", frequency, (self.size,), jnp.float32))
        decay = jax.lax.complex(jnp.exp(-rate) * jnp.cos(phase), jnp.exp(-rate) * jnp.sin(phase))
        # so that inputs of variance 1 give a state of variance 1
        gamma = jnp.sqrt(-jnp.expm1(-2 * rate))

        def layer(name: str, x: jax.Array, size: int = self.size) -> jax.Array:
            output: jax.Array = nn.Dense(size, dtype=self.dtype, name=name)(x)
            return output.astype(jnp.float32)

        real, imaginary = jnp.split(layer("drive", features, 2 * self.size), 2, axis=-1)
        shape = (*valid.shape, self.size)
        driven = jax.lax.complex(real, imaginary) * jnp.broadcast_to(gamma, shape)
        # A step after a reset forgets: its factor is 0.
        remembers = jnp.concatenate([jnp.ones_like(valid[:1]), valid[:-1]])[..., None]
        factor = jnp.where(remembers, jnp.broadcast_to(decay, shape), 0)
        driven = driven.at[0].add(factor[0] * jax.lax.complex(core[:, 0], core[:, 1]))

        states = jax.lax.platform_dependent(factor, driven, cpu=_step_by_step, default=_in_parallel)
        parts = jnp.stack([states.real, states.imag], axis=2)  # [T, B, 2, size]
        read = layer("read", parts.reshape(*valid.shape, 2 * self.size))
        output = nn.gelu(read + layer("skip", features))
        output = output * nn.sigmoid(layer("gate", output))
        return output, jnp.where(valid[-1][:, None, None], parts[-1], 0.0)


def _step_by_step(factor: jax.Array, driven: jax.Array) -> jax.Array:
    """Returns ``x[t] = factor[t] x[t - 1] + driven[t]``, ``[T, ...]``, from 0;
    on a CPU the fastest way.
    """

    def step(x: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = inputs[0] * x + inputs[1]
        return x, x

    return jax.lax.scan(step, jnp.zeros_like(factor[0] * driven[0]), (factor, driven))[1]


def _in_parallel(factor: jax.Array, driven: jax.Array) -> jax.Array:
    """Returns what ``_step_by_step`` does, in a number of steps that grows with ``log T``."""

    def compose(first: PyTree, second: PyTree) -> PyTree:
        return first[0] * second[0], first[1] * second[0] + second[1]

    states: jax.Array = jax.lax.associative_scan(compose, (factor, driven))[1]
    return states


@jax.custom_jvp
def gru(
    driven: jax.Array, core: jax.Array, kernel: jax.Array, bias: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Unrolls a gated recurrent unit (Cho et al. 2014, arXiv:1406.1078) on multiplied inputs.

    The derivative of a scan of ``flax.linen.GRUCell`` sums the kernel's gradient step by step. Here
    that is one product over all steps: only the part of the derivative that is linear in the
    state's tangent is a scan.

    Args:
      driven: ``[T, B, 3 H]``, the inputs' parts of reset gate, update gate and candidate,
        with their biases.
      core: ``[B, H]`` float32.
      kernel: ``[H, 3 H]``, the same three parts of the recurrent kernel.
      bias: ``[H]``, the recurrent bias of the candidate.
      valid: ``[T, B]``; the state is 0 after a step that is not.

    Returns:
      The output ``[T, B, H]`` and the state after the last step ``[B, H]``, both float32.
    """
    output, last, _ = _gates(driven, core, kernel, bias, valid)
    return output, last


def _gates(
    driven: jax.Array, core: jax.Array, kernel: jax.Array, bias: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Returns the output, the last state, and what the derivative needs of each step."""

    def step(core: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> PyTree:
        driven, valid = inputs
        of_inputs = jnp.split(driven, 3, axis=-1)
        of_core = jnp.split(core.astype(kernel.dtype) @ kernel, 3, axis=-1)
        reset = nn.sigmoid(of_inputs[0] + of_core[0])
        update = nn.sigmoid(of_inputs[1] + of_core[1])
        inner = of_core[2] + jnp.broadcast_to(bias, reset.shape)
        new = nn.tanh(of_inputs[2] + reset * inner)
        output = (1 - update) * new + update * core
        return jnp.where(valid[:, None], output, 0), (output, (core, reset, update, inner, new))

    last, (output, residuals) = jax.lax.scan(step, core, (driven, valid))
    return output, last, residuals


@gru.defjvp
def _gru_derivative(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> PyTree:
    _, _, kernel, _, valid = primals
    of_driven, of_core, of_kernel, of_bias, _ = tangents
    output, last, (core, reset, update, inner, new) = _gates(*primals)
    by_new = (1 - update) * (1 - new * new)
    by_reset = by_new * inner * reset * (1 - reset)
    by_update = (core - new) * update * (1 - update)
    by_gates = jnp.concatenate([by_reset, by_update], axis=-1)
    by_driven = jnp.concatenate([by_gates, by_new], axis=-1)
    by_product = jnp.concatenate([by_gates, by_new * reset], axis=-1)

    def total(parts: jax.Array) -> jax.Array:
        return parts.reshape(*parts.shape[:-1], 3, -1).sum(axis=-2)

    of_product = jax.jvp(partial(multiply, core.astype(kernel.dtype)), (kernel,), (of_kernel,))[1]
    added = total(by_driven * of_driven + by_product * of_product)
    added = (added + by_new * reset * jnp.broadcast_to(of_bias, reset.shape)).astype(core.dtype)

    # What does not depend on the tangent stays outside of the loop:
    # JAX would compute it in a loop of its own.
    remembers = jnp.concatenate([jnp.ones_like(valid[:1]), valid[:-1]])[..., None]
    update = jnp.where(remembers, update, 0)
    by_product = jnp.where(remembers, by_product, 0)
    # a gradient multiplies by the transpose at each step
    stored = jax.lax.optimization_barrier(kernel.T).T

    def step(core: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        update, by_product, added = inputs
        output = update * core + total(by_product * (core.astype(kernel.dtype) @ stored)) + added
        return output, output

    of_last, of_output = jax.lax.scan(step, of_core, (update, by_product, added))
    return (output, last), (of_output, jnp.where(valid[-1][:, None], of_last, 0))
