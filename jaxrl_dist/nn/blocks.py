"""Layers that read a sequence at once, and forget what lies before a reset.

Both are called with ``(features [T, B, D], core [B, ...], valid [T, B])`` and return ``(output [T, B, size], core)``,
both float32, as ``Core.unroll`` does; ``cores`` says what the core holds.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.nn.layers import LayerNorm
from jaxrl_dist.types import PyTree


class _Gate(nn.Module):
    """The GRU-type gate ``g(x, y)`` of Parisotto et al. (2020), section 3.2, in place of a residual sum ``x + y``.

    The bias ``b_g`` starts at 0. The paper's 2 keeps twelve blocks near the identity at first. A single block does not
    need that, and PPO remembers less with it: on MemoryChain, only one seed of three then reached 0.9.
    """

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(name: str, x: jax.Array) -> jax.Array:
            output: jax.Array = nn.Dense(y.shape[-1], use_bias=False, dtype=self.dtype, name=name)(x)
            return output.astype(jnp.float32)

        bias = self.param("bias", nn.initializers.zeros, y.shape[-1:], jnp.float32)
        reset = nn.sigmoid(layer("w_r", y) + layer("u_r", x))
        update = nn.sigmoid(layer("w_z", y) + layer("u_z", x) - jnp.broadcast_to(bias, y.shape))
        return (1 - update) * x + update * nn.tanh(layer("w_g", y) + layer("u_g", reset * x))


class GatedAttention(nn.Module):
    """One block of the gated transformer, Parisotto et al. (2020), https://arxiv.org/abs/1910.06764, figure 1.

    Positions are learned vectors, one for each distance in steps, which are added to keys (Shaw et al. 2018,
    https://arxiv.org/abs/1803.02155, equation 4). There are four heads, or the largest number that divides both 4 and
    ``size``.
    """

    size: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, features: jax.Array, core: PyTree, valid: jax.Array) -> tuple[jax.Array, PyTree]:
        steps, window = len(features), core["there"].shape[1]
        heads = math.gcd(self.size, 4)
        split = (heads, self.size // heads)

        def layer(name: str, x: jax.Array) -> jax.Array:
            output: jax.Array = nn.Dense(self.size, dtype=self.dtype, name=name)(x)
            return output

        def head(name: str, x: jax.Array) -> jax.Array:
            return layer(name, x).reshape(*x.shape[:-1], *split)

        x = layer("embed", features).astype(jnp.float32)
        inputs = jnp.concatenate([jnp.swapaxes(core["inputs"], 0, 1), x])  # [window + T, B, size]
        # The episode number of each step, then that of the step after them.
        ends = jnp.cumsum(~valid, axis=0)
        episode = jnp.concatenate([core["there"].T.astype(int) - 1, jnp.zeros_like(ends[:1]), ends])

        normal = LayerNorm(1, self.dtype, name="norm_attention")(inputs)
        query, key, value = head("query", normal[window:]), head("key", normal), head("value", normal)
        position = self.param("position", nn.initializers.normal(0.02), (window + 1, *split), jnp.float32)
        rows = jnp.arange(steps)[:, None] + jnp.arange(window + 1)[None]  # what each step sees: [T, window + 1]
        places = jnp.broadcast_to(position.astype(self.dtype)[None, :, None], key[rows].shape)
        scores = jnp.einsum("tbhd,twbhd->tbhw", query, key[rows] + places) / math.sqrt(split[1])
        visible = jnp.moveaxis(episode[rows] == episode[window : window + steps, None], 1, -1)[:, :, None]
        weights = nn.softmax(jnp.where(visible, scores.astype(jnp.float32), -jnp.inf), axis=-1)
        attended = jnp.einsum("tbhw,twbhd->tbhd", weights.astype(self.dtype), value[rows])

        x = _Gate(self.dtype, name="gate_attention")(x, nn.relu(layer("join", attended.reshape(x.shape))))
        hidden = nn.relu(layer("hidden", LayerNorm(1, self.dtype, name="norm_mlp")(x)))
        x = _Gate(self.dtype, name="gate_mlp")(x, nn.relu(layer("output", hidden)))

        exists = (episode[steps : steps + window] == episode[-1:]).T
        newest = jnp.where(exists[..., None], jnp.swapaxes(inputs[steps:], 0, 1), 0.0)
        return x, {"inputs": newest, "there": exists.astype(jnp.float32)}


class LinearRecurrence(nn.Module):
    """A linear recurrent unit, Orvieto et al. (2023), https://arxiv.org/abs/2303.06349, with a gated output.

    ``x' = lambda x + gamma B u`` (equation 7 and section 3.4) with complex, diagonal ``lambda``. The output is a gated
    linear unit of ``Re(C x) + D u``, as in the paper's blocks. At the start ``|lambda|`` is between 0.9 and 0.999, for
    memories of 10 to 1000 steps, and phases are below pi / 10, as for the paper's longest sequences (section 3.4).
    """

    size: int
    dtype: DTypeLike
    slowest: float = 0.999
    fastest: float = 0.9
    largest_phase: float = math.pi / 10

    @nn.compact
    def __call__(self, features: jax.Array, core: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        def decay_rate(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            """The magnitude is uniform in the ring's area (lemma 3.2)."""
            square = jax.random.uniform(key, shape, dtype, self.fastest**2, self.slowest**2)
            return jnp.log(-0.5 * jnp.log(square))

        def frequency(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.log(self.largest_phase * jax.random.uniform(key, shape, dtype, 1e-3, 1.0))

        rate = jnp.exp(self.param("decay_rate", decay_rate, (self.size,), jnp.float32))
        phase = jnp.exp(self.param("frequency", frequency, (self.size,), jnp.float32))
        decay = jax.lax.complex(jnp.exp(-rate) * jnp.cos(phase), jnp.exp(-rate) * jnp.sin(phase))
        gamma = jnp.sqrt(-jnp.expm1(-2 * rate))  # so that inputs of variance 1 give a state of variance 1

        def layer(name: str, x: jax.Array, size: int = self.size) -> jax.Array:
            output: jax.Array = nn.Dense(size, dtype=self.dtype, name=name)(x)
            return output.astype(jnp.float32)

        real, imaginary = jnp.split(layer("drive", features, 2 * self.size), 2, axis=-1)
        shape = (*valid.shape, self.size)
        driven = jax.lax.complex(real, imaginary) * jnp.broadcast_to(gamma, shape)
        # A step after a reset forgets: its factor is 0.
        goes_on = jnp.concatenate([jnp.ones_like(valid[:1]), valid[:-1]])[..., None]
        factor = jnp.where(goes_on, jnp.broadcast_to(decay, shape), 0)
        driven = driven.at[0].add(factor[0] * jax.lax.complex(core[:, 0], core[:, 1]))

        def compose(first: Any, second: Any) -> Any:
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, states = jax.lax.associative_scan(compose, (factor, driven))
        parts = jnp.stack([states.real, states.imag], axis=2)  # [T, B, 2, size]
        read = layer("read", parts.reshape(*valid.shape, 2 * self.size))
        output = nn.gelu(read + layer("skip", features))
        output = output * nn.sigmoid(layer("gate", output))
        return output, jnp.where(valid[-1][:, None, None], parts[-1], 0.0)
