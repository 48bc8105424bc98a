"""Policy and value networks as records of pure functions.

A network is a *torso* that reads observations, an optional recurrent *core*, and *heads*.
``make_network`` joins the three; the other builders choose them. Torso and core compute in
``config.precision``; parameters, the core's state and the outputs are float32. Every builder raises
``ConfigError`` if ``config.torso`` cannot read the observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import returns, spaces
from jaxrl_dist.nn.config import NetworkConfig, TorsoConfig
from jaxrl_dist.nn.cores import NO_CORE, Core, Recurrence, beside, make_core
from jaxrl_dist.nn.heads import Heads, action_value_head, actor_critic_heads, linear_head, q_heads
from jaxrl_dist.nn.layers import dense
from jaxrl_dist.nn.observations import View, preprocess, side_by_side, take_rows
from jaxrl_dist.nn.torsos import choose_torso, make_torso
from jaxrl_dist.spaces import Space
from jaxrl_dist.types import PyTree


class Network(NamedTuple):
    """A network that reads observations, or with a ``Recurrence`` a ``View`` of them."""

    init: Callable[[jax.Array], dict[str, PyTree] | list[PyTree]]
    """``(key) -> params``, float32."""
    apply: Callable[..., jax.Array]
    """``(params, obs [N, ...], *inputs) -> outputs``, float32;
    the builder documents inputs and shapes."""
    advance: Callable[..., PyTree] = lambda params, obs, core, core_inputs: core
    """``(params, obs [B, ...], core [B, ...], core_inputs) -> core``: the core after one more
    step."""
    initial_core: Callable[[int], PyTree] = lambda num_envs: ()
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode."""
    of_sequences: Callable[..., list[jax.Array]] | None = None
    """``apply_each``, for views of the same sequences."""

    def apply_each(self, params: PyTree, *inputs: tuple[Any, ...]) -> list[jax.Array]:
        """Returns the outputs of ``apply`` for each of several inputs;
        views show the same sequences, unrolled once.
        """
        if self.of_sequences is not None:
            return self.of_sequences(params, *inputs)
        return [self.apply(params, *arguments) for arguments in inputs]


class RecurrentNetwork(NamedTuple):
    """A network with a recurrent core; without memory, the core's state is ``()``.

    The builder documents the ``outputs``, each a float32 array.
    """

    init: Callable[[jax.Array], dict[str, PyTree]]
    """``(key) -> params``, float32."""
    step: Callable[..., tuple[Any, ...]]
    """``(params, obs [B, ...], core [B, ...], *inputs) -> (*outputs [B, ...], core [B, ...])``. The
    caller applies ``reset_core`` once it knows the step's ``valid``. If the network was made with
    ``core_inputs``, it takes ``core_inputs=[B, core_inputs]``, and ``unroll`` takes
    ``[T, B, core_inputs]``."""
    unroll: Callable[..., tuple[Any, ...]]
    """``(params, obs [T, B, ...], core [B, ...], valid [T, B], *inputs) -> (*outputs [T, B, ...],
    core [B, ...])``: ``T`` steps with ``reset_core`` after each; the returned core follows step
    ``T - 1``."""
    initial_core: Callable[[int], PyTree]
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode."""


def make_network(
    config: TorsoConfig,
    observation: Space,
    core: Core,
    heads: Heads,
    torsos: Sequence[str] = ("torso",),
    critic_sees: Space | None = None,
    core_inputs: int = 0,
) -> RecurrentNetwork:
    """Joins the torso that ``config`` selects for ``observation``, a core and heads.

    Args:
      observation: may lack parts of the observations passed to ``step`` and ``unroll``.
      torsos: names of the torsos' parameters. The heads get the features of one torso as an array
        ``[..., D]``, of several as a tuple of arrays, and without a torso the preprocessed
        observation, flattened.
      critic_sees: space that the last torso reads in place of ``observation``.
      core_inputs: number of values that the core reads beside the first torso's features.
    """
    dtype = jnp.dtype(config.precision)
    reads = [observation] * max(1, len(torsos))
    if critic_sees is not None:
        reads[-1] = critic_sees
    modules = [make_torso(config, space, dtype) for space in reads]
    # Keys in this order: torsos (one key even without any), core, heads.
    first_head = max(1, len(torsos)) + (core is not NO_CORE)

    def inputs(obs: PyTree) -> list[PyTree]:
        read = [preprocess(obs, observation, dtype)] * len(reads)
        if critic_sees is not None:
            read[-1] = preprocess(obs, critic_sees, dtype)
        return read

    def encode(params: PyTree, obs: PyTree, core_inputs: jax.Array | None) -> PyTree:
        if torsos:
            features = [
                module.apply(params[name], read)
                for module, name, read in zip(modules, torsos, inputs(obs), strict=True)
            ]
        else:
            features = [side_by_side(inputs(obs)[0], observation)]
        if core_inputs is not None:
            for_core = [features[0], core_inputs.astype(features[0].dtype)]
            features[0] = jnp.concatenate(for_core, axis=-1)
        return tuple(features) if len(features) > 1 else features[0]

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, first_head + heads.num_keys)
        obs = spaces.zeros(observation if critic_sees is None else critic_sees, 1)
        params = {
            name: module.init(key, read)
            for name, module, read, key in zip(torsos, modules, inputs(obs), keys, strict=False)
        }
        blank = jnp.zeros((1, core_inputs)) if core_inputs else None
        core_params, features = core.init(keys[first_head - 1], encode(params, obs, blank))
        return params | core_params | heads.init(keys[first_head:], features)

    def step(
        params: PyTree,
        obs: PyTree,
        state: PyTree,
        *further: Any,
        core_inputs: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        features, state = core.step(params, encode(params, obs, core_inputs), state)
        return *heads.apply(params, features, *further), state

    def unroll(
        params: PyTree,
        obs: PyTree,
        state: PyTree,
        valid: jax.Array,
        *further: Any,
        core_inputs: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        features, state = core.unroll(params, encode(params, obs, core_inputs), state, valid)
        return *heads.apply(params, features, *further), state

    return RecurrentNetwork(init, step, unroll, core.initial)


def torso_features(
    config: TorsoConfig, observation: Space, params: PyTree, obs: PyTree
) -> jax.Array:
    """Returns the features ``[..., D]`` of the torso that ``config`` selects for ``observation``.

    Args:
      params: the torso's own, such as ``params["torso"]`` of ``make_network``.
      obs: ``[..., *observation.shape]``.
    """
    dtype = jnp.dtype(config.precision)
    torso = make_torso(config, observation, dtype)
    features: jax.Array = torso.apply(params, preprocess(obs, observation, dtype))
    return features


_FEATURES = Heads(0, lambda keys, features: {}, lambda params, features: (features,))


def _built(
    config: TorsoConfig,
    observation: Space,
    heads: Heads,
    name: str,
    recurrence: Recurrence | None,
    torsos: Sequence[str] = ("torso",),
) -> Network:
    """A network whose heads have one output; with a core, ``View.core[name]`` holds its state."""
    if recurrence is None:
        plain = make_network(config, observation, NO_CORE, heads, torsos)

        def apply_plain(params: PyTree, obs: PyTree, *inputs: Any) -> jax.Array:
            return plain.step(params, obs, (), *inputs)[0]

        return Network(plain.init, apply_plain)
    body = make_network(
        config, observation, recurrence.core, _FEATURES, torsos, core_inputs=recurrence.core_inputs
    )

    def init(key: jax.Array) -> PyTree:
        body_key, *keys = jax.random.split(key, 1 + heads.num_keys)
        params = body.init(body_key)
        core_inputs = None
        if recurrence.core_inputs:
            core_inputs = jnp.zeros((1, recurrence.core_inputs))
        obs = spaces.zeros(observation, 1)
        features, _ = body.step(params, obs, body.initial_core(1), core_inputs=core_inputs)
        return params | heads.init(jnp.stack(keys), features)

    def of_sequences(params: PyTree, *inputs: tuple[Any, ...]) -> list[jax.Array]:
        view: View = inputs[0][0]
        core = view.core[name]
        core_inputs = view.core_inputs
        # a policy acts: ``advance`` takes the same step, and the compiler only one of the two
        if len(view.valid) == 1:
            newest = None if core_inputs is None else core_inputs[0]
            features, _ = body.step(params, view.now, core, core_inputs=newest)
            return [heads.apply(params, features, *others)[0] for _, *others in inputs]
        burn_in = recurrence.burn_in
        features, _ = unroll_late(body, params, view.obs, core, view.valid, core_inputs, burn_in)
        return [
            heads.apply(params, take_rows(features, view.rows - burn_in), *others)[0]
            for view, *others in inputs
        ]

    def apply(params: PyTree, *inputs: Any) -> jax.Array:
        return of_sequences(params, inputs)[0]

    def advance(params: PyTree, obs: PyTree, core: PyTree, core_inputs: jax.Array | None) -> PyTree:
        return body.step(params, obs, core, core_inputs=core_inputs)[1]

    return Network(init, apply, advance, body.initial_core, of_sequences)


# --- Value-based methods --------------------------------------------------------------------------


def q_network(
    config: TorsoConfig,
    observation: Space,
    num_actions: int,
    *,
    num_atoms: int,
    dueling: bool,
    noisy: bool,
    implicit: bool = False,
    recurrence: Recurrence | None = None,
) -> Network:
    """The values of all actions, or what ``values`` reads as the distributions of their returns.

    ``apply`` is ``(params, obs [N, ...], keys [N] or None) -> [N, num_actions, num_atoms]``;
    keys draw the noise.

    Args:
      num_atoms: 1 for plain values.
      dueling: separate heads for the state's value and the
        actions' advantages (Wang et al. 2016, equation 9).
      noisy: ``NoisyDense`` heads, whose noise explores.
      implicit: quantiles at fractions that ``apply`` takes after the keys; see ``q_heads``.
    """
    heads = q_heads(
        num_actions, num_atoms=num_atoms, dueling=dueling, noisy=noisy, implicit=implicit
    )
    return _built(config, observation, heads, "q", recurrence)


def mixing_network(size: int, num_agents: int, state_size: int) -> Network:
    """Mixes the values of agents monotonically to the
    value of their team (Rashid et al. 2018, figure 2).

    ``apply`` is ``(params, state [N, S], values [N, num_agents]) -> [N]``. A hidden layer reads the
    state, and linear layers make of it the weights and biases of a mixing network; both networks
    have ``size`` hidden units. The absolute value makes the weights positive, so the output never
    falls where an agent's value rises.

    If episodes end only by a time limit, the paper's layers let values grow without bound: agents
    learn to go to states far from those seen, whose value nothing corrects. So the hidden layer has
    tanh, which bounds the weights in all states. The mixing network has leaky ReLUs of slope 0.5,
    because values below zero fit to the floor of ELU only with large weights; slope 0.1 still
    diverged. Weights and biases start at 0.01 of the usual gain; with the usual gain they also
    grow.
    """
    sizes = {"weights": num_agents * size, "bias": size, "last_weights": size, "last_bias": 1}
    layers: dict[str, Any] = {name: dense(width, scale=0.01) for name, width in sizes.items()}
    hidden: Any = dense(size, scale=1.0)

    def init(key: jax.Array) -> dict[str, PyTree]:
        keys = jax.random.split(key, 1 + len(layers))
        features, hidden_params = hidden.init_with_output(keys[0], jnp.zeros((1, state_size)))
        params = {"hidden": hidden_params}
        for (name, layer), layer_key in zip(layers.items(), keys[1:], strict=True):
            params[name] = layer.init(layer_key, features)
        return params

    def apply(params: PyTree, state: jax.Array, values: jax.Array) -> jax.Array:
        features = jnp.tanh(hidden.apply(params["hidden"], state))
        mixer = {name: layer.apply(params[name], features) for name, layer in layers.items()}
        weights = jnp.abs(mixer["weights"]).reshape(*values.shape, size)
        mixed = jnp.einsum("...k,...kh->...h", values, weights) + mixer["bias"]
        mixed = jax.nn.leaky_relu(mixed, 0.5)
        mixed = jnp.sum(mixed * jnp.abs(mixer["last_weights"]), axis=-1)
        return mixed + mixer["last_bias"][..., 0]

    return Network(init, apply)


# --- Actors and critics ---------------------------------------------------------------------------


def policy_network(
    config: TorsoConfig, observation: Space, num_outputs: int, recurrence: Recurrence | None = None
) -> Network:
    """A policy: ``apply`` is ``(params, obs [N, ...]) -> [N, num_outputs]``;
    the head's weights start at scale 0.01.
    """
    return _built(config, observation, linear_head(num_outputs, scale=0.01), "actor", recurrence)


def critic_network(
    config: TorsoConfig,
    observation: Space,
    num_critics: int,
    *,
    action_size: int = 0,
    num_actions: int = 1,
    num_atoms: int | None = None,
    recurrence: Recurrence | None = None,
    name: str = "critic",
) -> Network:
    """Several critics of the same architecture; each has separate parameters,
    and ``params`` lists them.

    ``apply`` is ``(params, obs [N, ...], action [N, action_size]) -> [num_critics, N]``, or with
    ``num_actions`` discrete ones ``(params, obs [N, ...]) -> [num_critics, N, num_actions]``. With
    a core, ``View.core[name]`` lists their states.

    With ``num_atoms``, which ``values`` reads as the distributions of returns, they are the last
    axis of the outputs.

    If an MLP reads the observation, its first layer also reads the action. Features of any other
    torso go through a second MLP together with the action.
    """
    size = num_atoms or 1
    if action_size:
        heads = action_value_head(config, action_size, size)
    else:
        # two keys, as with an action; the MLP's stays unused
        heads = linear_head(num_actions * size, scale=1.0)._replace(num_keys=2)
    torsos: tuple[str, ...] = ("torso",)
    if action_size and choose_torso(config.torso, observation) == "mlp":
        torsos = ()
    critic = _built(config, observation, heads, name, recurrence, torsos)

    def obs_of(number: int, obs: PyTree) -> PyTree:
        if isinstance(obs, View):
            return obs._replace(core={name: obs.core[name][number]})
        return obs

    def init(key: jax.Array) -> PyTree:
        return [critic.init(key) for key in jax.random.split(key, num_critics)]

    def apply(params: PyTree, obs: PyTree, *action: jax.Array) -> jax.Array:
        values = [
            critic.apply(one, obs_of(number, obs), *action) for number, one in enumerate(params)
        ]
        if not action_size:
            values = [one.reshape(*one.shape[:-1], num_actions, size) for one in values]
        # one critic's value loses its axis first: XLA rounds the two orders differently
        if num_atoms is not None and (size > 1 or num_critics > 1):
            return jnp.stack(values)
        outputs = jnp.stack([one[..., 0] for one in values])
        return outputs if num_atoms is None else outputs[..., None]

    def advance(params: PyTree, obs: PyTree, core: PyTree, core_inputs: jax.Array | None) -> PyTree:
        return [
            critic.advance(one, obs, state, core_inputs)
            for one, state in zip(params, core, strict=True)
        ]

    def initial_core(num_envs: int) -> PyTree:
        return [critic.initial_core(num_envs) for _ in range(num_critics)]

    return Network(init, apply, advance, initial_core)


def actor_critic(
    config: NetworkConfig,
    observation: Space,
    num_outputs: int,
    shared_torso: bool,
    log_std: int = 0,
    critic_sees: Space | None = None,
    core_inputs: int = 0,
) -> RecurrentNetwork:
    """A policy and a value function for policy gradient methods.

    Outputs: ``P`` parameters of the action's distribution ``[..., P]``, and the value ``[...]``.

    Args:
      num_outputs: size of the policy head,
        whose weights start at scale 0.01 (the value head's at 1).
      shared_torso: one torso for policy and value, else one for each;
        with a recurrent core always one.
      log_std: if ``A > 0``, ``P = num_outputs + A``: the last ``A`` parameters are log standard
        deviations, a trained vector that starts at ``log(config.initial_std)`` and does not depend
        on the observation.
      critic_sees: space that the value function reads by its own torso, if that is more than
        ``observation`` (Pinto et al. 2018, arXiv:1710.06542, section 3); with a core, beside what
        the core remembers of ``observation``.
      core_inputs: as in ``make_network``.
    """
    core = make_core(config, jnp.dtype(config.precision))
    heads = actor_critic_heads(num_outputs, log_std, config.initial_std)
    shared = critic_sees is None and (shared_torso or core is not NO_CORE)
    if critic_sees is not None and core is not NO_CORE:
        core = beside(core)
    torsos = ("torso",) if shared else ("policy_torso", "value_torso")
    return make_network(config, observation, core, heads, torsos, critic_sees, core_inputs)


def unroll_late(
    network: RecurrentNetwork,
    params: PyTree,
    obs: PyTree,
    core: PyTree,
    valid: jax.Array,
    core_inputs: jax.Array | None,
    burn_in: int,
) -> tuple[PyTree, ...]:
    """Unrolls a network over ``T`` steps;
    the first ``burn_in`` only update the core, without a gradient.

    Returns what ``network.unroll`` does for the other ``T - burn_in``. Source:
    Kapturowski et al. (2019), section 3.
    """
    sequence = (obs, valid, core_inputs)
    if burn_in:
        early, is_valid, read = jax.tree.map(lambda steps: steps[:burn_in], sequence)
        *_, core = network.unroll(params, early, core, is_valid, core_inputs=read)
    late, is_valid, read = jax.tree.map(lambda steps: steps[burn_in:], sequence)
    return network.unroll(params, late, returns.constant(core), is_valid, core_inputs=read)
