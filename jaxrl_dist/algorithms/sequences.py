"""Learning from replayed sequences instead of single transitions,
for policies with a recurrent core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from jaxrl_dist.nn.networks import Network


def recurrence(config: ReplayConfig, spec: EnvSpec) -> cores.Recurrence | None:
    """Returns the recurrence of a config's networks; None if it has no core."""
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
    networks: Mapping[str, Network],
    params_of: Callable[[PyTree], Mapping[str, PyTree]],
) -> Algorithm:
    """Lets an algorithm that is written for transitions learn from sequences,
    if the config has a core.

    Each network has a core; acting stores their states, and a window's burn-in brings them up to
    date (Kapturowski et al. 2019, section 3). Actor and critics have separate cores (Ni et al.
    2022, section 4).

    Args:
      networks: made with ``recurrence``; in place of observations they read
        ``nn.observations.View``s.
      params_of: ``(params) -> {name: params}`` of the networks.
    """
    if config.core == "none":
        return algorithm
    inputs = core_inputs.CoreInputs.of(config, spec)
    recurrent = _Sequences(config, algorithm, networks, params_of, inputs)
    return dataclasses.replace(
        algorithm,
        policy=recurrent.policy,
        log_prob=None if algorithm.log_prob is None else recurrent.log_prob,
        action_values=None,  # they depend on the memory, too
        postprocess=recurrent.postprocess,
        loss=recurrent.loss,
        initial_core=recurrent.initial_core,
        feedback=recurrent.feedback,
        add_extras=recurrent.add_extras,
        whole_windows=True,
        window=recurrent.window,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Sequences:
    """The functions of an algorithm that learns from sequences.

    Its core is the inputs and states of the networks' cores, and the algorithm's own core.
    """

    config: ReplayConfig
    algorithm: Algorithm
    networks: Mapping[str, Network]
    params_of: Callable[[PyTree], Mapping[str, PyTree]]
    inputs: core_inputs.CoreInputs

    @property
    def window(self) -> int:
        """Burn-in, training steps, the steps that the last return's bootstrap needs,
        and one that only supplies inputs."""
        config = self.config
        supplied = config.core_inputs != "none"
        return config.burn_in + config.sequence_length + config.n_step - 1 + supplied

    def initial_core(self, num_envs: int) -> PyTree:
        memory = self._initial_memory(num_envs)
        return self.inputs.initial(memory, num_envs), self.algorithm.initial_core(num_envs)

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        core, rest = core
        memory = self.inputs.memory(core)
        read = self.inputs.read(core)
        view = _view_of_step(obs, memory, read)
        action, rest, extras = self.algorithm.policy(variables, view, rest, context)
        params = self.params_of(variables.params)
        after = {
            name: network.advance(params[name], obs, memory[name], read)
            for name, network in self.networks.items()
        }
        extras = {**extras, "core": memory}
        if read is not None:
            extras["core_inputs"] = read
        return action, (self.inputs.acted(core, after, action), rest), extras

    def log_prob(
        self, variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert self.algorithm.log_prob is not None
        core, rest = core
        view = _view_of_step(obs, self.inputs.memory(core), self.inputs.read(core))
        return self.algorithm.log_prob(variables, view, rest, action, context)

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        core, rest = core
        rest = self.algorithm.feedback(rest, action, step)
        return self.inputs.feedback(core, action, step), rest

    def add_extras(self, windows: Rollout) -> Rollout:
        """Lets each window begin with the core of an episode's start:
        the burn-in brings it up to date.
        """
        num_steps, size = windows.reward.shape
        memory = self._initial_memory(size)
        extras = {
            "core": jax.tree.map(lambda x: jnp.broadcast_to(x, (num_steps, *x.shape)), memory)
        }
        read = self.inputs.read(self.inputs.of_steps(windows))
        if read is not None:
            extras["core_inputs"] = read[:-1]
        return windows._replace(extras=extras)

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        config = self.config
        length = config.sequence_length
        steps, core, read = stored(rollout)
        late: Rollout = jax.tree.map(lambda x: x[config.burn_in :], steps)

        def slide(x: jax.Array) -> jax.Array:
            """Returns all windows of ``n_step`` steps, ``[n_step, length * N]``."""
            windows = jnp.stack([x[k : k + length] for k in range(config.n_step)])
            return windows.reshape(config.n_step, -1)

        starts: Rollout = jax.tree.map(slide, late._replace(obs=(), action=()))
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
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        length = self.config.sequence_length
        obs, valid, read = swap_axes((batch["obs"], batch["going"], batch["core_inputs"]))

        def view(rows: jax.Array) -> observations.View:
            now = jax.tree.map(lambda x: observations.take_rows(x, rows), obs)
            return observations.View(now, obs, valid, read, batch["core"], rows)

        def in_sequences(x: jax.Array) -> jax.Array:
            return x.reshape(-1, length)

        examples = {
            name: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch[name])
            for name in ("action", "reward", "discount", "valid")
        }
        examples |= {"obs": view(batch["start"]), "next_obs": view(batch["following"])}
        keys = jax.vmap(lambda key: jax.random.split(key, length))(context.keys).reshape(-1)
        context = context._replace(keys=keys)
        losses, mask, aux = self.algorithm.loss(variables, examples, context)
        losses = in_sequences(losses)
        mask = in_sequences(mask)
        metrics = {name: in_sequences(x) for name, x in aux.metrics.items()}
        if aux.priority is None:
            return losses, mask, Aux(metrics)
        return losses, mask, Aux(metrics, priority(self.config, in_sequences(aux.priority), mask))

    def _initial_memory(self, size: int) -> dict[str, PyTree]:
        return {name: network.initial_core(size) for name, network in self.networks.items()}


def _view_of_step(obs: PyTree, memory: PyTree, read: jax.Array | None) -> observations.View:
    """Returns the view of one step, a sequence of length 1."""
    size = jax.tree.leaves(obs)[0].shape[0]
    sequence = jax.tree.map(lambda x: x[None], (obs, read))
    valid = jnp.ones((1, size), bool)
    rows = jnp.zeros_like(valid, jnp.int32).T
    return observations.View(obs, sequence[0], valid, sequence[1], memory, rows)
