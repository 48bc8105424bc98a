"""Learning from replayed sequences instead of single transitions,
for policies with a recurrent core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_dist.lazy import core_inputs, cores, jax, jnp, observations, returns
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
    swap_axes,
)


def recurrence(config: ReplayConfig, spec: EnvSpec) -> Any:
    """Returns the ``nn.cores.Recurrence`` of a config; None if it has no core."""
    if config.core == "none":
        return None
    core = cores.make_core(config, jnp.dtype(config.precision))
    return cores.Recurrence(core, config.burn_in, core_inputs.CoreInputs.of(config, spec).size)


def stored(rollout: Rollout) -> tuple[Rollout, PyTree, jax.Array | None]:
    """Returns a window's steps, the core before them,
    and the core's inputs beside each observation ``[T, N, I]``.
    """
    first = jax.tree.map(lambda x: x[0], rollout.extras["core"])
    steps = rollout._replace(extras=(), core=(), final_core=())
    read = rollout.extras.get("core_inputs")
    if read is not None:  # the last step only supplies the inputs of its observation
        steps = jax.tree.map(lambda x: x[:-1], steps)
    return steps, first, read


def priority(config: ReplayConfig, error: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the priority ``[N]`` of windows by their errors
    ``[N, L]`` (Kapturowski et al. 2019, section 2.3).
    """
    size = jnp.where(mask, jnp.abs(returns.constant(error)), 0.0)
    mean = jnp.sum(size, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
    eta = config.max_priority_share
    return eta * jnp.max(size, axis=1) + (1 - eta) * mean


def sequences(
    config: ReplayConfig,
    spec: EnvSpec,
    algorithm: Algorithm,
    networks: Mapping[str, Any],
    params_of: Callable[[PyTree], Mapping[str, PyTree]],
) -> Algorithm:
    """Lets an algorithm that is written for transitions learn from sequences,
    if the config has a core.

    Each network has a core; acting stores their states, and a window's burn-in brings them up to
    date (Kapturowski et al. 2019, section 3). Actor and critics have separate cores (Ni et al.
    2022, section 4).

    Args:
      networks: made with ``recurrence``; in place of
        observations they read ``nn.observations.View``s.
      params_of: ``(params) -> {name: params}`` of the networks.
    """
    if config.core == "none":
        return algorithm
    inputs = core_inputs.CoreInputs.of(config, spec)
    length = config.sequence_length
    # Burn-in, training steps, the steps that the last return's bootstrap needs,
    # and one that only supplies inputs.
    window = config.burn_in + length + config.n_step - 1 + (config.core_inputs != "none")

    def initial_core(num_envs: int) -> PyTree:
        memory = {name: network.initial_core(num_envs) for name, network in networks.items()}
        return inputs.initial(memory, num_envs), algorithm.initial_core(num_envs)

    def single(obs: PyTree, memory: PyTree, read: jax.Array | None) -> Any:
        """Returns the view of one step."""
        size = jax.tree.leaves(obs)[0].shape[0]
        sequence = jax.tree.map(lambda x: x[None], (obs, read))
        one = jnp.ones((1, size), bool)
        return observations.View(
            obs, sequence[0], one, sequence[1], memory, jnp.zeros_like(one, jnp.int32).T
        )

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        core, rest = core
        memory = inputs.memory(core)
        read = inputs.read(core)
        action, rest, extras = algorithm.policy(variables, single(obs, memory, read), rest, context)
        params = params_of(variables.params)
        after = {
            name: networks[name].advance(params[name], obs, memory[name], read) for name in networks
        }
        if read is None:
            extras = {**extras, "core": memory}
        else:
            extras = {**extras, "core": memory, "core_inputs": read}
        return action, (inputs.acted(core, after, action), rest), extras

    def log_prob(
        variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert algorithm.log_prob is not None
        view = single(obs, inputs.memory(core[0]), inputs.read(core[0]))
        return algorithm.log_prob(variables, view, core[1], action, context)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return inputs.feedback(core[0], action, step), algorithm.feedback(core[1], action, step)

    def recorded(windows: Rollout) -> Rollout:
        """Lets each window begin with the core of an episode's start:
        the burn-in brings it up to date.
        """
        length, size = windows.reward.shape
        memory = {name: network.initial_core(size) for name, network in networks.items()}
        extras = {"core": jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), memory)}
        read = inputs.read(inputs.of_steps(windows))
        return windows._replace(
            extras=extras if read is None else {**extras, "core_inputs": read[:-1]}
        )

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        steps, core, read = stored(rollout)
        late: Rollout = jax.tree.map(lambda x: x[config.burn_in :], steps)

        def pieces(x: jax.Array) -> jax.Array:
            """All windows of ``n_step`` steps, ``[n_step, length * N]``."""
            return jnp.stack([x[k : k + length] for k in range(config.n_step)]).reshape(
                config.n_step, -1
            )

        starts: Rollout = jax.tree.map(pieces, late._replace(obs=(), action=()))
        reward, discount, last = returns.window_return(*starts.outcomes, config.discount)
        shape = late.valid[:length].shape
        start = jnp.broadcast_to(
            config.burn_in + jnp.arange(length, dtype=jnp.int32)[:, None], shape
        )
        fields = {
            "action": jax.tree.map(lambda x: x[:length], late.action),
            "reward": reward.reshape(shape),
            "discount": discount.reshape(shape),
            "valid": late.valid[:length],
            "start": start,
            "following": start + last.reshape(shape) + 1,
            # The last observation has no step. Its flag does not matter,
            # because the core after it is unused.
            "going": jnp.concatenate([steps.valid, steps.valid[-1:]]),
            "obs": steps.obs,
            "core_inputs": read,
        }
        batch: dict[str, PyTree] = swap_axes(fields)
        return {**batch, "core": core}

    def loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        obs, valid, read = swap_axes((batch["obs"], batch["going"], batch["core_inputs"]))

        def view(rows: jax.Array) -> Any:
            now = jax.tree.map(lambda x: observations.take_rows(x, rows), obs)
            return observations.View(now, obs, valid, read, batch["core"], rows)

        plain = ("action", "reward", "discount", "valid")
        flat = {
            name: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch[name]) for name in plain
        }
        flat |= {"obs": view(batch["start"]), "next_obs": view(batch["following"])}
        keys = jax.vmap(lambda key: jax.random.split(key, length))(context.keys).reshape(-1)
        losses, mask, aux = algorithm.loss(variables, flat, context._replace(keys=keys))

        def unflat(x: jax.Array) -> jax.Array:
            return x.reshape(-1, length)

        metrics = {name: unflat(x) for name, x in aux.metrics.items()}
        if aux.priority is None:
            error = None
        else:
            error = priority(config, unflat(aux.priority), unflat(mask))
        return unflat(losses), unflat(mask), Aux(metrics, error)

    return dataclasses.replace(
        algorithm,
        policy=policy,
        log_prob=None if algorithm.log_prob is None else log_prob,
        action_values=None,  # they depend on the memory, too
        postprocess=postprocess,
        loss=loss,
        initial_core=initial_core,
        feedback=feedback,
        recorded=recorded,
        whole_windows=True,
        window=window,
    )
