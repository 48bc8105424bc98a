"""Recurrent cores: the part of a network that remembers earlier steps of an episode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import vary_as
from jaxrl_dist.nn import blocks
from jaxrl_dist.nn.blocks import GatedAttention, LinearRecurrence
from jaxrl_dist.nn.config import CoreConfig
from jaxrl_dist.nn.layers import multiply
from jaxrl_dist.types import Array, PyTree


class Core(NamedTuple):
    """A recurrent core as pure functions; its parameters are entries of its network's dict."""

    init: Callable[[jax.Array, PyTree], tuple[dict[str, PyTree], PyTree]]
    """``(key, features [1, D]) -> (params, output [1, H])``; float32 parameters.
    Only the output's shape matters."""
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    """``(params, features [B, D], core [B, ...]) -> (output [B, H], core [B, ...])``. The caller
    applies ``reset_core`` once it knows the step's ``valid``."""
    unroll: Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]
    """``(params, features [T, B, D], core [B, ...], valid [T, B]) -> (output [T, B, H], core [B,
    ...])``: ``T`` steps with ``reset_core`` after each; the returned core follows the last step."""
    initial: Callable[[int], PyTree]
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode."""


class Recurrence(NamedTuple):
    """Settings of a network with a core that reads sequences."""

    core: Core
    burn_in: int
    """Steps that only bring the stored core up to date."""
    core_inputs: int
    """Number of values that the core reads beside the features."""


NO_CORE = Core(
    init=lambda key, features: ({}, features),
    step=lambda params, features, core: (features, core),
    unroll=lambda params, features, core, valid: (features, core),
    initial=lambda num_envs: (),
)
"""Passes features on and remembers nothing; its state is ``()``."""


def reset_core(core: PyTree, initial: PyTree, valid: Array) -> PyTree:
    """Returns ``core [B, ...]`` where ``valid [B]`` is True, elsewhere ``initial [B, ...]``.

    An environment resets on the step after its episode's end. That step has ``valid`` False, and
    its policy still reads the old episode's last observation, so the core that it returns must not
    reach the new episode.
    """

    def reset(state: Array, start: Array) -> Array:
        axes = tuple(range(valid.ndim, state.ndim))
        return jnp.where(jnp.expand_dims(valid, axes), state, start)

    return jax.tree.map(reset, core, initial)


def recurrent(
    name: str,
    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    initial: Callable[[int], PyTree],
) -> Core:
    """Makes a core whose parameters are stored under ``name``; a scan of ``step`` unrolls it.

    ``init``, ``step`` and ``initial`` are as in ``Core``,
    but their parameters are not under the name.
    """

    def init_named(key: jax.Array, features: PyTree) -> tuple[dict[str, PyTree], PyTree]:
        params, output = init(key, features)
        return {name: params}, output

    def unroll(
        params: PyTree, features: PyTree, core: PyTree, valid: jax.Array
    ) -> tuple[PyTree, PyTree]:
        # Marking parameters before the scan sums their gradients over devices once,
        # not at every step.
        weights, core, start = vary_as((params[name], core, initial(valid.shape[1])), features)

        def advance(core: PyTree, inputs: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
            features, valid = inputs
            output, core = step(weights, features, core)
            return reset_core(core, start, valid), output

        core, output = jax.lax.scan(advance, core, (features, valid))
        return output, core

    return Core(
        init_named,
        lambda params, features, core: step(params[name], features, core),
        unroll,
        initial,
    )


def _cell(name: str, cell: Any, initial: Callable[[int], PyTree]) -> Core:
    """A core made of a flax cell, whose state starts at ``initial``."""

    def init(key: jax.Array, features: jax.Array) -> tuple[PyTree, jax.Array]:
        (_, output), params = cell.init_with_output(key, initial(1), features)
        return params, output

    def step(params: PyTree, features: jax.Array, core: PyTree) -> tuple[jax.Array, PyTree]:
        core, output = cell.apply(params, core, features)
        return output, core

    return recurrent(name, init, step, initial)


def gru(size: int, dtype: DTypeLike) -> Core:
    """A gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), with its parameters under ``gru``.

    Its layers compute in ``dtype``; its state and its output ``[..., size]`` are float32.
    """
    module = nn.GRUCell(size, dtype=dtype)
    cell = _cell("gru", module, lambda num_envs: jnp.zeros((num_envs, size), jnp.float32))

    @jax.named_scope("GRUCell")  # as flax names the layers of a step, for profiles
    def unroll(
        params: PyTree, features: jax.Array, core: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        weights, core = vary_as((params["gru"]["params"], core), features)

        def joined(name: str, *layers: str) -> jax.Array:
            parts = [weights[layer][name] for layer in layers]
            return jnp.concatenate(parts, axis=-1).astype(dtype)

        inputs = ("ir", "iz", "in")
        driven = multiply(features.astype(dtype), joined("kernel", *inputs))
        driven = driven + jnp.broadcast_to(joined("bias", *inputs), driven.shape)
        kernel = joined("kernel", "hr", "hz", "hn")
        return blocks.gru(driven, core, kernel, joined("bias", "hn"), valid)

    return cell._replace(unroll=unroll)


def lstm(size: int, dtype: DTypeLike) -> Core:
    """A long short-term memory (Hochreiter and Schmidhuber 1997),
    with its parameters under ``lstm``.

    Its layers compute in ``dtype``. Its state is the pair of cell and output,
    float32 ``[..., size]`` each.
    """

    def initial(num_envs: int) -> PyTree:
        return jnp.zeros((num_envs, size)), jnp.zeros((num_envs, size))

    return _cell("lstm", nn.OptimizedLSTMCell(size, dtype=dtype), initial)


def _sequential(name: str, module: Any, initial: Callable[[int], PyTree]) -> Core:
    """A core made of a module that reads sequences, as in ``blocks``;
    a step is a sequence of length 1.
    """

    def valid(features: jax.Array) -> jax.Array:
        return jnp.ones((1, features.shape[0]), bool)  # an export's batch has no number

    def init(key: jax.Array, features: jax.Array) -> tuple[dict[str, PyTree], jax.Array]:
        sequence = (features[None], initial(1), valid(features))
        (output, _), params = module.init_with_output(key, *sequence)
        return {name: params}, output[0]

    def step(params: PyTree, features: jax.Array, core: PyTree) -> tuple[jax.Array, PyTree]:
        output, core = module.apply(params[name], features[None], core, valid(features))
        return output[0], core

    def unroll(
        params: PyTree, features: jax.Array, core: PyTree, valid: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        output, core = module.apply(params[name], features, core, valid)
        return output, core

    return Core(init, step, unroll, initial)


def attention(size: int, window: int, dtype: DTypeLike) -> Core:
    """A transformer block that sees the last ``window`` steps of the episode,
    with parameters under ``attention``.

    Its layers compute in ``dtype``. Its state holds the block's inputs at these steps, float32
    ``[..., window, size]``, and which of them exist, float32 ``[..., window]`` of 0 and 1.
    """

    def initial(num_envs: int) -> PyTree:
        return {
            "inputs": jnp.zeros((num_envs, window, size)),
            "there": jnp.zeros((num_envs, window)),
        }

    return _sequential("attention", GatedAttention(size, dtype), initial)


def linear(size: int, dtype: DTypeLike) -> Core:
    """A linear recurrent unit of ``size`` complex numbers, with its parameters under ``linear``.

    Its recurrence computes in float32, other layers in ``dtype``. Its state holds real and
    imaginary parts, float32 ``[..., 2, size]``.
    """
    return _sequential(
        "linear", LinearRecurrence(size, dtype), lambda num_envs: jnp.zeros((num_envs, 2, size))
    )


def user_core(triple: Any) -> Core:
    """Makes a core from the user's ``(init, step, initial)``, with its parameters under ``core``.

    ``init(key, features [1, D]) -> params``; ``step(params, features [B, D], state [B, ...]) ->
    (output [B, H], state)``; ``initial(num_envs) -> state [num_envs, ...]``. An object with these
    methods works too.

    Raises:
      ConfigError: ``triple`` is not such a triple, the state of ``initial`` has no row for each
        environment, or ``step`` changes its shapes or dtypes.
    """
    if isinstance(triple, type):
        raise ConfigError(
            f"core must be an instance, such as {triple.__name__}(), "
            f"not the class {triple.__name__}"
        )
    if all(hasattr(triple, name) for name in ("init", "step", "initial")):
        triple = (triple.init, triple.step, triple.initial)
    if not (isinstance(triple, tuple) and len(triple) == 3 and all(map(callable, triple))):
        raise ConfigError(
            f"core must be a name, or three functions (init, step, initial), not {triple!r}"
        )
    init_params, step, initial = triple

    def init(key: jax.Array, features: jax.Array) -> tuple[PyTree, jax.Array]:
        params = init_params(key, features)
        state = initial(1)
        _check_rows(state, 1)
        _check_rows(initial(2), 2)
        output, next_state = step(params, features, state)
        before = jax.tree.map(_described, state)
        after = jax.tree.map(_described, next_state)
        if before != after:
            raise ConfigError(
                f"the core's step turned a state {before} into {after}; it must return an equal one"
            )
        if jnp.ndim(output) != 2 or len(output) != 1:
            raise ConfigError(
                f"the core's step returned {jnp.shape(output)} for features {features.shape}; "
                "it must return (1, width)"
            )
        return params, output

    return recurrent("core", init, step, initial)


def _check_rows(state: PyTree, count: int) -> None:
    """Checks that a state of the user's core has a row for each of ``count`` environments."""
    for leaf in jax.tree.leaves(state):
        if jnp.shape(leaf)[:1] != (count,):
            raise ConfigError(
                f"the core's initial({count}) returned {jnp.shape(leaf)}; "
                f"it must return ({count}, ...), a row for each environment"
            )


def _described(leaf: Array) -> str:
    return f"{jnp.result_type(leaf)}{[*jnp.shape(leaf)]}"


def beside(core: Core) -> Core:
    """Gives a core two features: it reads the first, and joins the second to its output,
    for a critic.
    """

    def init(key: jax.Array, features: PyTree) -> tuple[dict[str, PyTree], PyTree]:
        params, output = core.init(key, features[0])
        return params, join(output, features[1])

    def join(output: PyTree, second: PyTree) -> PyTree:
        return output, jnp.concatenate([output, second.astype(output.dtype)], axis=-1)

    def step(params: PyTree, features: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        output, state = core.step(params, features[0], state)
        return join(output, features[1]), state

    def unroll(
        params: PyTree, features: PyTree, state: PyTree, valid: jax.Array
    ) -> tuple[PyTree, PyTree]:
        output, state = core.unroll(params, features[0], state, valid)
        return join(output, features[1]), state

    return Core(init, step, unroll, core.initial)


_without_core: ContextVar[str] = ContextVar(
    "how to give the run a core, if it has none", default=""
)


@contextlib.contextmanager
def made_for(config: Any) -> Iterator[None]:
    """Within it, ``make_core`` refuses a core if the run's config of hyperparameters has none."""
    kind = type(config)
    remedy = ""
    if getattr(config, "core", None) == "none":
        remedy = f"class {kind.__name__}({kind.__bases__[0].__name__}, core=...)"
    token = _without_core.set(remedy)
    try:
        yield
    finally:
        _without_core.reset(token)


def make_core(config: CoreConfig, dtype: DTypeLike) -> Core:
    """Returns the core that ``config.core`` names or holds.

    Raises:
      ConfigError: it is not a core, or one that the run does not know of.
    """
    remedy = _without_core.get()
    if config.core != "none" and remedy:
        raise ConfigError(
            "make sets a core that the field core does not name, so the run uses the preset "
            f"without a core; name it, as in {remedy}"
        )
    if not isinstance(config.core, str):
        return user_core(config.core)
    kinds: dict[str, Callable[[], Core]] = {
        "none": lambda: NO_CORE,
        "gru": lambda: gru(config.core_size, dtype),
        "lstm": lambda: lstm(config.core_size, dtype),
        "attention": lambda: attention(config.core_size, config.core_window, dtype),
        "linear": lambda: linear(config.core_size, dtype),
    }
    if config.core not in kinds:
        raise ConfigError(f"unknown --core {config.core!r}; these work: {', '.join(kinds)}")
    return kinds[config.core]()
