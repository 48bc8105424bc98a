"""Stacks of frames. A host environment sends each frame once, a replay memory stores it once,
and devices stack them.

Axes: ``k`` frames in a stack, ``N`` environments or examples, ``c`` channels in a frame (1, or 3
with colours). A stack joins its frames along the channels, the newest last: ``[N, k * c, ...]``, or
``[N, ..., k * c]`` for images with channels last. For other observations the first axis counts as
the channels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist.spaces import channels_first, zeros
from jaxrl_dist.types import Array, EnvSpec, PyTree


class Frame(NamedTuple):
    """The newest part of an observation that is a stack of frames."""

    pixels: PyTree
    """[B, c, ...], or a dict of such parts."""
    fresh: Array
    """[B] bool  a new stack starts here: the frame also stands for all frames before it."""


def channel_axis(shape: tuple[int, ...]) -> int:
    """The axis along which frames of this shape are joined; it is the same for a stack of them."""
    if len(shape) == 3 and not channels_first(shape):
        return 2
    return 0


def stack(frames: jax.Array, fresh: jax.Array) -> jax.Array:
    """Stacks ``k`` consecutive frames; those older than the last fresh one are replaced by it.

    Args:
      frames: ``[k, N, c, ...]``, the newest last.
      fresh: ``[k, N]`` bool.

    Returns:
      ``[N, k * c, ...]``.
    """
    place = jnp.arange(len(frames), dtype=jnp.int32)[:, None]
    start = jnp.max(jnp.where(fresh, place, 0), axis=0, keepdims=True)
    shown = frames[
        jnp.maximum(*jnp.broadcast_arrays(place, start)), jnp.arange(frames.shape[1])[None]
    ]
    return jnp.concatenate(shown, axis=1 + channel_axis(frames.shape[2:]))


def blank(spec: EnvSpec, num_envs: int) -> PyTree:
    """Blank stacks ``[num_envs, k * c, ...]`` for the first ``push``,
    whose frames are fresh and fill them.

    ``()`` for environments whose observations are not stacks.
    """
    if spec.frame_stack > 1:
        return jax.tree.map(jnp.asarray, zeros(spec.observation, num_envs))
    return ()


def push(stacks: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
    """Adds the environments' newest frames to their stacks.

    Args:
      stacks: from ``blank`` or the last call.
      obs: a ``Frame``; anything else is a complete observation already.

    Returns:
      The stacks for the next call, and the observation ``[B, ...]`` that a policy sees.
    """
    if not isinstance(obs, Frame):
        return stacks, obs

    def pushed(stacks: jax.Array, pixels: jax.Array) -> jax.Array:
        num_envs, *shape = pixels.shape
        axis = 1 + channel_axis(tuple(shape))
        older = _split(stacks, stacks.shape[axis] // pixels.shape[axis], axis)[1:]
        # Frames before the stack's start are already filled in, so no older frame counts as fresh.
        fresh = jnp.zeros_like(obs.fresh, shape=(len(older), num_envs))
        return stack(
            jnp.concatenate([older, pixels[None]]), jnp.concatenate([fresh, obs.fresh[None]])
        )

    stacks = jax.tree.map(pushed, stacks, obs.pixels)
    return stacks, stacks


def _split(stacks: jax.Array, frame_stack: int, axis: int) -> jax.Array:
    """Stacks as their frames along a new first axis."""
    return jnp.stack(jnp.split(stacks, frame_stack, axis))


def newest(stacks: PyTree, frame_stack: int) -> Frame:
    """The newest frame ``[T, B, c, ...]`` of each of the stacks ``[T, B, k * c, ...]``,
    and whether it is fresh.

    A stack whose frames are all equal counts as fresh. This is exact: a fresh frame makes such a
    stack, and any other stack of equal frames is what its newest frame would make if it were fresh.
    Each later stack depends only on the stack before it and on the new frame. If an observation has
    several parts, all must be such stacks.
    """

    def split(stacks: jax.Array) -> jax.Array:
        return _split(stacks, frame_stack, 2 + channel_axis(stacks.shape[2:]))

    frames = jax.tree.map(split, stacks)
    still = [jnp.all(x == x[-1:], axis=(0, *range(3, x.ndim))) for x in jax.tree.leaves(frames)]
    return Frame(jax.tree.map(lambda x: x[-1], frames), functools.reduce(jnp.logical_and, still))


class Stacks(NamedTuple):
    """Consecutive stacks of frames, each frame once."""

    first: PyTree
    """[B, k * c, ...]."""
    later: Frame
    """[T, B, c, ...], the newest frame of each later stack."""


def unstack(stacks: PyTree, frame_stack: int) -> Stacks:
    """Returns the stacks ``[T + 1, B, k * c, ...]`` with each frame once."""
    first = jax.tree.map(lambda x: x[0], stacks)
    return Stacks(first, newest(jax.tree.map(lambda x: x[1:], stacks), frame_stack))


def restack(stacks: Stacks) -> PyTree:
    """The inverse of ``unstack``."""
    _, later = jax.lax.scan(push, stacks.first, stacks.later)
    return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), stacks.first, later)
