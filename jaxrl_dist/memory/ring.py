"""Device-resident replay: a ring of the newest steps of each environment, sharded over the mesh,
as pure functions.

Each device stores and samples the steps of the environments that it holds; nothing moves between
devices. A *window* is a run of ``window`` steps of one environment and the observation after the
last. Sampling returns windows as a ``Rollout`` with ``T = window``, so an algorithm treats replayed
experience as fresh experience. An observation is stored once, in its dtype; for a stack, only the
newest frame.

A window never crosses the write head and never starts on a reset step. It may run over an episode's
end, where ``returns`` cuts. With stacks of ``frame_stack`` frames, sampling also reads the frames
before the window, so a window is not drawn once one of them is overwritten. The first observation
that is added must begin a stack; otherwise call ``start_mid_episode`` first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh, rng
from jaxrl_dist.memory import frames
from jaxrl_dist.types import PyTree, Rollout

BLOCK = 1024
"""Slots whose priorities share a sum: sampling reads one row of sums and one block, not all
slots."""
REDRAWS = 8
"""Times that uniform sampling draws again to avoid windows that start on a reset step;
the rest are masked."""


class Priorities(NamedTuple):
    """``p^alpha`` of the window that starts in each slot, with sums that make sampling fast."""

    table: jax.Array
    """[B, P] float32, P the slots rounded up to whole blocks; 0 where no window may start."""
    block_sum: jax.Array
    """[B, P / BLOCK] float32."""
    largest: jax.Array
    """[B] float32, the largest so far, which new windows get."""


class Memory(NamedTuple):
    """The ring. Every leaf is ``[B, ...]``, divided over the devices by environment;
    ``C`` slots per environment.

    Step ``k`` of an environment, counted from its first, lies in slot ``k % C``; the successor of
    slot ``s`` is the observation of slot ``s + 1``.
    """

    steps: Rollout
    """[B, C, ...]; its core fields are (), its observations ``frames.Frame`` if they are stacks."""
    added: jax.Array
    """[B] int32, the number of the next step; equal in all rows."""
    # None for uniform replay, not empty arrays:
    # XLA's CPU compiler crashes on those when they are sharded.
    priorities: Priorities | None


class Index(NamedTuple):
    """The first step of each drawn window; ``[N]`` int32, local to the device."""

    env: jax.Array
    slot: jax.Array


def init(like: Rollout, slots: int, *, prioritized: bool, frame_stack: int = 1) -> Memory:
    """An empty memory.

    Args:
      like: shapes and dtypes of a rollout of all environments, ``[T, B, ...]``.
      slots: steps kept for each environment.
      frame_stack: frames in an observation, as in ``EnvSpec``.
    """

    def blank(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((x.shape[1], slots, *x.shape[2:]), x.dtype)

    num_envs = like.reward.shape[1]
    priorities = None
    if prioritized:
        blocks = -(-slots // BLOCK)
        table, sums = (
            jnp.zeros((num_envs, size), jnp.float32) for size in (blocks * BLOCK, blocks)
        )
        priorities = Priorities(table, sums, jnp.ones((num_envs,), jnp.float32))
    return Memory(
        steps=jax.tree.map(
            blank, jax.eval_shape(partial(_stored_fields, frame_stack=frame_stack), like)
        ),
        added=jnp.zeros((num_envs,), jnp.int32),
        priorities=priorities,
    )


def nbytes(like: Rollout, slots: int, *, prioritized: bool, frame_stack: int = 1) -> int:
    """The bytes that ``init`` will allocate over all devices."""
    shapes = jax.eval_shape(
        lambda: init(like, slots, prioritized=prioritized, frame_stack=frame_stack)
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def add(
    memory: Memory,
    rollout: Rollout,
    window: int,
    frame_stack: int = 1,
    priority: jax.Array | None = None,
) -> Memory:
    """Writes a rollout ``[T, B, ...]`` over the oldest steps.

    The last observation goes into the slot of the next step, so the newest window ends there.

    Args:
      priority: ``[T, B]``, ``p^alpha`` of the window that ends with each step. Where it is NaN or
        None, a window gets the largest so far.
    """
    num_steps = rollout.reward.shape[0]
    slots = memory.steps.reward.shape[1]
    added = memory.added[0]
    at = (added + jnp.arange(num_steps + 1, dtype=jnp.int32)) % slots

    def write(ring: jax.Array, x: jax.Array) -> jax.Array:
        where = at[: x.shape[0]]
        return ring.at[:, where].set(
            jnp.swapaxes(x, 0, 1), unique_indices=True, mode="promise_in_bounds"
        )

    steps = jax.tree.map(write, memory.steps, _stored_fields(rollout, frame_stack))
    memory = memory._replace(steps=steps, added=memory.added + num_steps)
    if memory.priorities is None:
        return memory
    # A window can be drawn once its last step is stored,
    # until any step or earlier frame that it needs is overwritten.
    first = added - window + 1
    touched = first + jnp.arange(num_steps + window + frame_stack - 1, dtype=jnp.int32)
    complete = (touched >= 0) & (touched <= added + num_steps - window)
    where = touched % slots
    starts = (
        jnp.broadcast_to(complete[None], (len(memory.added), len(where))) & steps.valid[:, where]
    )
    fresh = jnp.broadcast_to(memory.priorities.largest[:, None], starts.shape)
    if priority is not None:
        known = jnp.full(starts.shape, jnp.nan).at[:, :num_steps].set(priority.T)
        fresh = jnp.where(jnp.isnan(known), fresh, known)
        largest = jnp.maximum(memory.priorities.largest, jnp.max(jnp.where(starts, fresh, 0.0)))
        memory = memory._replace(priorities=memory.priorities._replace(largest=largest))
    fresh = jnp.where(starts, fresh, 0.0)
    envs, where = jnp.broadcast_arrays(jnp.arange(len(memory.added))[:, None], where[None])
    priorities = _prioritized(memory)
    priorities = priorities._replace(table=priorities.table.at[envs, where].set(fresh))
    return _sum_blocks(memory._replace(priorities=priorities), envs, where)


def start_mid_episode(memory: Memory, frame_stack: int) -> Memory:
    """Prepares an empty memory for environments that are in the middle of their episodes.

    Their first stacks hold frames from before, which the memory will never have. Counting from
    ``1 - frame_stack`` keeps windows from starting there: none starts before step 0.
    """
    return memory._replace(added=memory.added - (frame_stack - 1))


def cut(memory: Memory, window: int, frame_stack: int = 1) -> Memory:
    """Prepares for environments that are reset: adds an invalid step, at which ``returns`` cuts.

    The step leads from the last observation, from which the step before bootstraps, to the first of
    a new episode. Nobody has acted on this observation; its extras, such as a value to bootstrap
    with, are those of the step before.
    """
    slot = memory.added[0] % memory.steps.reward.shape[1]
    last = jax.tree.map(lambda ring: ring[:, slot], memory.steps)
    obs = jax.tree.map(lambda x: jnp.stack([x, x]), last.obs)
    blank = jax.tree.map(lambda x: jnp.zeros_like(x)[None], last)
    extras = jax.tree.map(lambda ring: ring[:, slot - 1][None], memory.steps.extras)
    return add(memory, blank._replace(obs=obs, extras=extras), window, frame_stack)


def draw_uniform(
    memory: Memory, key: jax.Array, batch_size: int, window: int, frame_stack: int = 1
) -> Index:
    """Draws this device's ``batch_size`` windows: each environment equally often,
    and in it each window equally likely.

    So an environment with many reset steps, where fewer windows can start, has the same share as
    others. The global index of an example determines its share of the environments and its key, so
    the windows are the same on any number of devices.

    Returns:
      Where the windows start. One may start on a reset step, if every redraw did.
    """
    num_envs, slots = memory.steps.reward.shape
    newest = memory.added[0] - window
    oldest = jnp.maximum(memory.added[0] - slots + frame_stack, 0)
    live = newest - oldest + 1

    def draw(attempt: jax.Array) -> Index:
        key_of_attempt = jax.random.fold_in(key, attempt)
        env, number = stratified(key_of_attempt, batch_size, num_envs, lambda env: live, slots)
        return Index(env, (oldest + number) % slots)

    def on_reset(index: Index) -> jax.Array:
        return ~memory.steps.valid[index.env, index.slot]

    def until_none_is_on_a_reset() -> Index:
        def redraw(carry: tuple[jax.Array, Index]) -> tuple[jax.Array, Index]:
            attempt, index = carry
            again = on_reset(index)
            index = jax.tree.map(lambda new, old: jnp.where(again, new, old), draw(attempt), index)
            return attempt + 1, index

        def missed(carry: tuple[jax.Array, Index]) -> jax.Array:
            attempt, index = carry
            return (attempt <= REDRAWS) & jnp.any(on_reset(index))

        start = jnp.zeros((), jnp.int32)
        return jax.lax.while_loop(missed, redraw, (start + 1, draw(start)))[1]

    def all_at_once() -> Index:
        draws = jax.vmap(draw)(jnp.arange(REDRAWS + 1, dtype=jnp.int32))
        rejected = on_reset(draws)
        first = jnp.where(rejected.all(axis=0), REDRAWS, jnp.argmin(rejected, axis=0))
        return jax.tree.map(lambda x: jnp.take_along_axis(x, first[None], axis=0)[0], draws)

    # Both find the same windows. A GPU would wait for the host in each round of the loop.
    return jax.lax.platform_dependent(cpu=until_none_is_on_a_reset, default=all_at_once)


FLOAT_DRAWS = 2**22
"""Rows of fewer entries draw theirs by a float32, which has 2^23 values between 0 and 1;
longer ones by integers."""


def stratified(
    key: jax.Array,
    batch_size: int,
    num_rows: int,
    counts: Callable[[jax.Array], jax.Array],
    most: int,
) -> tuple[jax.Array, jax.Array]:
    """Draws a row of this device's ``num_rows``, and one of its entries,
    for each of its ``batch_size`` examples.

    Rows are drawn equally often, and so are the entries of a row. The global index of an example
    determines its row and its key, so that the draws are the same on any number of devices.

    Args:
      counts: ``(rows [N]) -> count``, int32 ``[N]`` or ``[]``: entries of these rows.
      most: at least as large as each count.

    Returns:
      The rows and the numbers of their entries, both int32 ``[N]``.
    """
    # On the host: the products may exceed int32, the widest integer on the devices.
    wholes, rests = np.divmod(np.arange(batch_size, dtype=np.int64) * num_rows, batch_size)
    keys = rng.per_index(key, mesh.global_index(batch_size))
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    # floor((example + draw) * num_rows / batch_size),
    # rounded the same for any number of examples before.
    rest = rests.astype(np.float32) / batch_size + draws[:, 0] * (num_rows / batch_size)
    row = jnp.minimum(wholes.astype(np.int32) + rest.astype(jnp.int32), num_rows - 1)
    count = jnp.broadcast_to(counts(row), row.shape)
    if most < FLOAT_DRAWS:
        entry = (draws[:, 1] * count.astype(jnp.float32)).astype(jnp.int32)
        return row, jnp.minimum(entry, count - 1)
    return row, jax.vmap(lambda key, count: jax.random.randint(key, (), 0, count))(keys, count)


def draw_prioritized(memory: Memory, key: jax.Array, batch_size: int) -> tuple[Index, jax.Array]:
    """Draws this device's ``batch_size`` windows in proportion to their priority,
    one from each stratum.

    Source: Schaul et al. (2016), https://arxiv.org/abs/1511.05952, section 3.3 and appendix B.2.1.

    Returns:
      Where the windows start, and the probability ``[N]`` of
      each under the draw over all devices: ``p / (devices * sum
      of the device's p)``, because each device draws an equal share.
    """
    priorities = _prioritized(memory)
    sums = priorities.block_sum.reshape(-1)
    upper = jnp.cumsum(sums)
    keys = rng.per_index(key, mesh.global_index(batch_size))
    stratum = (jnp.arange(batch_size) + jax.vmap(jax.random.uniform)(keys)) / batch_size
    mass = stratum * upper[-1]
    # Rounding may point past the last block or slot with mass: take the nearest one that has some.
    block = jnp.minimum(
        jnp.searchsorted(upper, mass, side="right"),
        jnp.max(jnp.where(sums > 0, jnp.arange(len(sums)), 0)),
    )
    rows = priorities.table.reshape(-1, BLOCK)[block]
    inside = (mass - (upper - sums)[block])[:, None]
    beyond = (jnp.cumsum(rows, axis=1) > jnp.broadcast_to(inside, rows.shape)) & (rows > 0)
    last = BLOCK - 1 - jnp.argmax(rows[:, ::-1] > 0, axis=1)
    offset = jnp.where(jnp.any(beyond, axis=1), jnp.argmax(beyond, axis=1), last)
    env, slot = jnp.divmod(block * BLOCK + offset, priorities.table.shape[1])
    index = Index(env, slot)
    drawn = jnp.take_along_axis(rows, offset[:, None], axis=1)[:, 0]
    probability = drawn / (upper[-1] * jax.lax.axis_size(mesh.DATA))
    return index, probability


def set_priority(memory: Memory, index: Index, priority: jax.Array) -> Memory:
    """Sets ``p^alpha`` ``[N]`` of drawn windows; a window that can no longer be drawn keeps its 0.

    A window that was drawn twice gets the larger value. An accelerator writes duplicates in no
    fixed order, so plain writes would not repeat from run to run.
    """
    priorities = _prioritized(memory)
    largest = jnp.maximum(priorities.largest, jnp.max(priority))
    may_start = priorities.table[index.env, index.slot] > 0
    # Both writes need what was read: if the first did not,
    # XLA would copy the table to read it later.
    new = jnp.where(may_start, priority, 0.0)
    table = priorities.table.at[index.env, index.slot].set(new).at[index.env, index.slot].max(new)
    memory = memory._replace(priorities=priorities._replace(table=table, largest=largest))
    return _sum_blocks(memory, index.env, index.slot)


def _prioritized(memory: Memory) -> Priorities:
    assert memory.priorities is not None, "this memory supports uniform replay only"
    return memory.priorities


def _sum_blocks(memory: Memory, env: jax.Array, slot: jax.Array) -> Memory:
    """Sums the blocks with changed priorities from all their slots,
    so that no rounding error builds up.
    """
    priorities = _prioritized(memory)
    sums = priorities.block_sum
    blocks = priorities.table.reshape(*sums.shape, BLOCK)
    if slot.size < sums.size:
        sums = sums.at[env, slot // BLOCK].set(jnp.sum(blocks[env, slot // BLOCK], axis=-1))
    else:
        sums = jnp.sum(blocks, axis=-1)
    return memory._replace(priorities=priorities._replace(block_sum=sums))


def _stored_fields(rollout: Rollout, frame_stack: int) -> Rollout:
    """The part of a rollout that the ring stores."""
    stacked = frame_stack > 1 and not isinstance(rollout.obs, frames.Frame)
    if stacked:
        obs = frames.newest(rollout.obs, frame_stack)
    else:
        obs = rollout.obs
    return rollout._replace(obs=obs, core=(), final_core=())


def gather(steps: Rollout, index: Index, window: int, frame_stack: int = 1) -> Rollout:
    """Returns the windows ``[window, N, ...]`` of the steps
    ``[B, C, ...]`` of a ring that start at ``index``.

    One that starts on a reset step has ``valid[0]`` False.
    """
    slots = steps.reward.shape[1]
    before = frame_stack - 1
    slot = (index.slot[None] + jnp.arange(-before, window + 1, dtype=jnp.int32)[:, None]) % slots
    env = jnp.broadcast_to(index.env[None], slot.shape)

    def read(ring: jax.Array, start: int, stop: int) -> jax.Array:
        return ring[env[start:stop], slot[start:stop]]

    obs = jax.tree.map(lambda x: read(x, 0, before + window + 1), steps.obs)
    if frame_stack > 1:
        parts = jnp.arange(window + 1)[:, None] + jnp.arange(frame_stack)[None]
        fresh = obs.fresh[parts]
        obs = jax.tree.map(lambda x: jax.vmap(frames.stack)(x[parts], fresh), obs.pixels)
    rest: PyTree = jax.tree.map(lambda x: read(x, before, before + window), steps._replace(obs=()))
    return rest._replace(obs=obs)


def windows(rollout: Rollout, length: int) -> Rollout:
    """Cuts a rollout ``[T, B, ...]`` into all its windows, as replay does:
    ``[length, (T - length + 1) * B, ...]``.
    """
    starts = rollout.reward.shape[0] - length + 1

    def cut(x: jax.Array, size: int) -> jax.Array:
        pieces = jnp.stack([x[t : t + starts] for t in range(size)])
        return pieces.reshape(size, -1, *x.shape[2:])

    obs = jax.tree.map(lambda x: cut(x, length + 1), rollout.obs)
    rest = jax.tree.map(lambda x: cut(x, length), rollout._replace(obs=(), core=(), final_core=()))
    return rest._replace(obs=obs)
