"""The learner of algorithms that replay experience."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh, packing, rng
from jaxrl_dist.checks import check_divides, whole_updates_below
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.memory import records, ring
from jaxrl_dist.types import Algorithm, PyTree, Replay, Rollout, TrainState


def off_policy(
    algorithm: Algorithm,
    like: Rollout,
    frame_stack: int = 1,
    num_agents: int = 1,
    *,
    data_windows: int = 0,
    packed: bool = False,
) -> sgd.Learner:
    """Adds each rollout to the memory, then makes
    ``ratio`` updates per agent step from sampled windows.

    If all windows of a batch are ``data_windows``, there is no memory,
    and an update follows each rollout, which is blank.

    Args:
      like: shapes and dtypes of a rollout of all environments, which determine the memory's.
      frame_stack: frames in an observation, as in ``EnvSpec``; the memory stores each frame once.
      num_agents: rows of a rollout that belong to one environment.
      data_windows: windows of each batch that come from a data set, over all devices (Ball et al.
        2023, section 4.1).
      packed: as in ``packing.scan``.
    """
    replay, window = algorithm.replay, algorithm.window
    assert replay is not None and window is not None, "replay needs windows of a fixed length"
    rollout_length, num_envs = like.reward.shape
    offline = data_windows == replay.batch_size
    prioritized = replay.priority_exponent is not None
    if offline:
        updates = 1
    else:
        updates = updates_per_iteration(replay, num_envs * rollout_length)
    envs = num_envs // num_agents

    def init(key: jax.Array) -> TrainState:
        memory: PyTree = ()
        if not offline:
            memory = ring.init(
                like, replay.capacity // num_envs, prioritized=prioritized, frame_stack=frame_stack
            )
        return sgd.init(algorithm, key)._replace(memory=memory)

    def draw(memory: ring.Memory, data: PyTree, key: jax.Array) -> tuple[Any, ...]:
        """Returns an update's random numbers: of windows in the memory, or the key that draws them,
        and of windows of the data set, or () for none; and two keys for each window.
        """
        devices = jax.lax.axis_size(mesh.DATA)
        new = (replay.batch_size - data_windows) // devices
        old = data_windows // devices
        draw_key, *keys = (jax.random.fold_in(key, stage) for stage in range(3))
        drawn: ring.Index | jax.Array | tuple[()] = draw_key if prioritized else ()
        examples = mesh.global_index(new)
        if new and not prioritized:
            drawn = ring.draw_uniform(memory, draw_key, new, window, frame_stack)
        of_data: ring.Index | tuple[()] = ()
        if old:
            of_data = records.draw(data, jax.random.fold_in(key, 3), old)
            examples = jnp.concatenate([examples, new * devices + mesh.global_index(old)])
        return drawn, of_data, *(rng.per_index(key, examples) for key in keys)

    def windows_of_data(data: PyTree, index: ring.Index) -> Rollout:
        windows = ring.gather(data.steps, index, window, frame_stack)
        if algorithm.add_extras is None:
            return windows
        return mesh.vary(algorithm.add_extras(windows))

    def one_update(
        data: PyTree, state: TrainState, drawn: tuple[Any, ...]
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        index, of_data, postprocess_keys, loss_keys = drawn
        weight = None
        if prioritized:
            index, probability = ring.draw_prioritized(state.memory, index, len(loss_keys))
            weight = importance_weights(probability, replay.importance_exponent)
        parts = []
        if index:
            parts.append(ring.gather(state.memory.steps, index, window, frame_stack))
        if of_data:
            parts.append(windows_of_data(data, of_data))
        windows = parts[0]
        if len(parts) > 1:
            windows = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
        batch = algorithm.postprocess(state.variables, windows, state.context(postprocess_keys))
        grads, metrics, priority = sgd.gradient(algorithm, state, batch, loss_keys, weight)
        state = sgd.apply(algorithm, state, grads)
        if prioritized:
            assert priority is not None
            powered = powered_priority(replay, priority)
            state = state._replace(memory=ring.set_priority(state.memory, index, powered))
        if offline and priority is not None:  # no episode tells how well it learns
            metrics = {
                **metrics,
                "loss/td_error": mesh.global_mean(priority, jnp.ones(priority.shape, bool)),
            }
        return state, metrics

    @partial(jax.jit, inline=True)  # traced once, though ``update`` needs it three times
    def learn(
        state: TrainState, key: jax.Array, data: PyTree
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        keys = rng.per_index(key, jnp.arange(updates))
        # All updates at once, because updates change nothing that uniform draws depend on.
        drawn = jax.vmap(partial(draw, state.memory, data))(keys)
        with jax.named_scope("update"):
            state, metrics = packing.scan(partial(one_update, data), state, drawn, packed=packed)
        return state, jax.tree.map(jnp.mean, metrics)

    def update(
        state: TrainState,
        rollout: Rollout,
        key: jax.Array,
        priority: jax.Array | None = None,
        data: PyTree = (),
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        key = jax.random.fold_in(key, state.iteration)
        if isinstance(data, records.Windows):
            data = data._replace(number=state.iteration - data.number)
        if offline:
            rollout = records.blank(like)
        state = state._replace(
            variables=state.variables._replace(
                stats=algorithm.updated_stats(state.variables, rollout, state.context())
            ),
            memory=()
            if offline
            else ring.add(state.memory, rollout, window, frame_stack, priority),
            iteration=state.iteration + 1,
            env_step=sgd.nominal_env_step(state, 1 if offline else envs * rollout_length),
        )
        if offline:
            return learn(state, key, data)
        shapes = jax.eval_shape(learn, state, key, data)[1]

        def wait(
            state: TrainState, key: jax.Array, data: PyTree
        ) -> tuple[TrainState, Mapping[str, jax.Array]]:
            del key, data
            blank = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
            return state, mesh.vary_as(blank, state.updates)

        # Counts stored steps, because a run resumed without its
        # memory waits until the memory has filled again.
        stored = envs * jax.lax.pmax(state.memory.added[0], mesh.DATA).astype(jnp.float32)
        ready = (stored >= replay.learning_starts) & (stored >= envs * window)
        # Members of a population fill their memories together.
        return jax.lax.cond(mesh.any_member(ready), learn, wait, state, key, data)

    def observe(state: TrainState, data: records.Records) -> TrainState:
        stats = algorithm.updated_stats(state.variables, records.once(data, like), state.context())
        return state._replace(variables=state.variables._replace(stats=stats))

    def relearn(
        state: TrainState, key: jax.Array, data: PyTree = ()
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        return learn(state, jax.random.fold_in(key, state.updates), data)

    def index(iteration: jax.Array, key: jax.Array, data: records.Records) -> ring.Index:
        (key,) = rng.per_index(jax.random.fold_in(key, iteration), jnp.arange(updates))
        return records.draw(
            data, jax.random.fold_in(key, 3), data_windows // jax.lax.axis_size(mesh.DATA)
        )

    cut = partial(ring.cut, window=window, frame_stack=frame_stack)
    if offline:
        return sgd.Learner(init, update, observe=observe, indices=index)
    start_mid_episode = partial(ring.start_mid_episode, frame_stack=frame_stack)
    return sgd.Learner(init, update, relearn, cut, start_mid_episode, observe)


PRIORITY_EPSILON = 1e-6
"""Added to each priority, so that a window without error
can be drawn again (Schaul et al. 2016, section 3.3)."""


def powered_priority(replay: Replay, priority: jax.Array) -> jax.Array:
    """Returns ``p^alpha`` (Schaul et al. 2016, equation 1).

    A window without a finite priority, as when the loss overflows, gets the smallest: it can still
    be drawn. A negative priority counts as its absolute value, as of an error with a sign.
    """
    assert replay.priority_exponent is not None
    return (
        jnp.where(jnp.isfinite(priority), jnp.abs(priority), 0.0) + PRIORITY_EPSILON
    ) ** replay.priority_exponent


def initial_priority(
    algorithm: Algorithm, state: TrainState, rollout: Rollout, key: jax.Array, number: jax.Array
) -> jax.Array:
    """Computes ``p^alpha`` ``[T, B]`` of the window that ends with each step,
    from the loss of the acting parameters.

    The learner then need not draw every new window once (Horgan et al. 2018, section 3). NaN where
    a window begins before the rollout.
    """
    replay, window = algorithm.replay, algorithm.window
    assert replay is not None and window is not None
    num_steps, num_envs = rollout.reward.shape
    unknown = jnp.full((min(window - 1, num_steps), num_envs), jnp.nan)
    if window > num_steps:
        return unknown
    pieces = ring.windows(rollout, window)
    key = jax.random.fold_in(key, number)
    examples = mesh.global_index(pieces.reward.shape[1])
    postprocess_keys, loss_keys = (
        rng.per_index(jax.random.fold_in(key, use), examples) for use in range(2)
    )
    batch = algorithm.postprocess(state.variables, pieces, state.context(postprocess_keys))
    _, _, aux = sgd.losses_of(algorithm, state.variables, batch, state.context(loss_keys))
    assert aux.priority is not None
    return jnp.concatenate([unknown, powered_priority(replay, aux.priority).reshape(-1, num_envs)])


def importance_weights(probability: jax.Array, exponent: float | jax.Array) -> jax.Array:
    """Returns ``(1 / (n P(i)))^beta`` divided by the largest in the batch on all devices,
    ``[N]`` float32.

    The division cancels ``n``. Source: Schaul et al. (2016), section 3.4.
    """
    least = jax.lax.pmin(jnp.min(probability), mesh.DATA)
    return (least / probability) ** exponent


def updates_per_iteration(replay: Replay, steps: int) -> int:
    """Returns the number of updates after each rollout of
    ``steps`` agent steps over all environments.

    Raises:
      ConfigError: it is not a whole number above 0.
    """
    updates = replay.ratio * steps
    if whole_updates_below(replay.ratio, steps) != replay.ratio:
        near = sorted({max(1, int(updates)), int(updates) + 1})
        raise ConfigError(
            f"--replay-ratio {replay.ratio} makes {updates:.8g} updates after a rollout of {steps} "
            "steps, not a whole number; nearest that work: "
            f"{' or '.join(str(count / steps) for count in near)}"
        )
    return round(updates)


def check_sizes(
    algorithm: Algorithm,
    rows: int,
    rollout_length: int,
    num_devices: int,
    frame_stack: int = 1,
    num_agents: int = 1,
) -> None:
    """Checks that environments, capacity and batch divide, and that the memory is large enough.

    Args:
      rows: environments, times the agents of each.

    Raises:
      ConfigError: they do not; names both numbers and the nearest that work.
    """
    replay, window = algorithm.replay, algorithm.window
    assert replay is not None and window is not None
    noun = "environments" if num_agents == 1 else f"rows (environments x {num_agents} agents)"
    check_divides("num_envs", rows, (num_devices, "devices"))
    check_divides("batch_size", replay.batch_size, (num_devices, "devices"))
    check_divides("replay_capacity", replay.capacity, (rows, noun))
    updates_per_iteration(replay, rows * rollout_length)
    least = rows * (rollout_length + window + frame_stack)
    if replay.capacity < least:
        raise ConfigError(
            f"--replay-capacity {replay.capacity} is too small for {rows} {noun}: rollouts of "
            f"{rollout_length} steps and windows of {window + frame_stack - 1} need {least} or more"
        )
    if replay.batch_size > replay.capacity:
        raise ConfigError(
            f"--batch-size {replay.batch_size} is larger than --replay-capacity {replay.capacity}"
        )
