"""Exports a trained policy as StableHLO, to be used without this package."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.spaces import Part
from jaxrl_dist.types import PyTree


class Exported(NamedTuple):
    """What was written."""

    bytes: int
    inputs: tuple[str, ...]
    """Types and shapes of the function's arguments, such as ``float32[b,4]``."""
    outputs: tuple[str, ...]
    parts: Mapping[str, str] = {}
    """Types and shapes of the parts of ``obs`` by their path, such as ``{"camera/left": "uint8[b,64,64,3]"}``; of an
    observation without parts, none."""


def export(
    policy: Policy, out: str | pathlib.Path, *, batch: int | None = None, platforms: tuple[str, ...] = ()
) -> Exported:
    """Writes a policy as a function ``(obs [B, ...], core, start [B]) -> (action [B, ...], core)``.

    Actions are greedy, and within the environment's bounds. ``start`` (bool) marks the environments whose episode
    begins: their rows of ``core`` are ignored, so the first call may pass zeros. The trained variables are part of the
    file. ``jax.export.deserialize(content).call(obs, core, start)`` runs it; it needs JAX, and not this package.

    An action mask is bool for JAX environments, and int8, as Gymnasium has it, for environments on the host.

    Args:
      out: the file to write.
      batch: the number of environments B; None: any number.
      platforms: where it is to run, such as ``("cpu", "cuda")``; empty: the platform of this machine.

    Raises:
      ConfigError: the package flatbuffers is missing, the file cannot be written, or the policy cannot be exported for
        any number of environments or for these platforms.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError("an export needs a package that is not installed: pip install flatbuffers")
    from jax import export as jax_export

    def act(obs: PyTree, core: PyTree, start: jax.Array) -> tuple[jax.Array, PyTree]:
        first = policy.initial_core(start.shape[0])

        def begin(initial: jax.Array, now: jax.Array) -> jax.Array:
            return jnp.where(start.reshape(start.shape + (1,) * (now.ndim - 1)), initial, now)

        return policy(obs, jax.tree.map(begin, first, core))

    observation = policy.source.spec.observation
    try:
        size = jax_export.symbolic_shape("b")[0] if batch is None else batch
        hidden = getattr(policy.config.algorithm, "hidden", ())
        if isinstance(observation, dict):
            observation = {name: part for name, part in observation.items() if name not in hidden}
        mask = None if policy.source.is_pure else policy.source.spec.mask

        def given(path: str, part: Part) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, *part.shape), np.dtype(np.int8) if path == mask else part.dtype)

        obs = jax.tree.map(given, spaces.paths(observation), observation)
        core = jax.eval_shape(lambda x: policy.initial_core(x.shape[0]), jax.tree.leaves(obs)[0])
        start = jax.ShapeDtypeStruct((size,), jnp.bool_)
        chosen = platforms or (jax.local_devices()[0].platform,)
        exported = jax_export.export(jax.jit(act), platforms=chosen)(obs, core, start)
        content = exported.serialize()
    except Exception as error:
        hint = "; --batch N exports for N environments" if batch is None else ""
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(f"the policy cannot be exported{hint} ({line})") from error
    try:
        pathlib.Path(out).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    inputs, outputs = (tuple(aval.str_short() for aval in avals) for avals in (exported.in_avals, exported.out_avals))
    parts = {path: f"{x.dtype}[{','.join(map(str, x.shape))}]" for path, x in spaces.leaves(obs).items() if path}
    return Exported(len(content), inputs, outputs, parts)
