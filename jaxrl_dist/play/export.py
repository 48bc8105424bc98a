"""Exports a trained policy as StableHLO or ONNX, to be used without this package."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.actors.step import read_later
from jaxrl_dist.errors import ConfigError, one_line
from jaxrl_dist.play import onnx
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run.storage import check_place, replacing
from jaxrl_dist.spaces import Part
from jaxrl_dist.types import PyTree

FORMATS = ("stablehlo", "onnx")
Size = Any
"""Number of environments: an int, JAX's symbolic one, or a name for ONNX."""


class Exported(NamedTuple):
    """Describes an exported file."""

    bytes: int
    inputs: tuple[str, ...]
    """Types and shapes of the function's arguments, such as ``float32[b,4]``."""
    outputs: tuple[str, ...]
    parts: Mapping[str, str] = {}
    """Types and shapes of the parts of ``obs`` by their path, such as
    ``{"camera/left": "uint8[b,64,64,3]"}``; empty for an observation without parts."""
    core: str = ""
    """The nested tuples of the core with types and shapes, as a StableHLO file takes them;
    empty: no arrays."""


def export(
    policy: Policy,
    out: str | pathlib.Path,
    *,
    batch: int | None = None,
    platforms: tuple[str, ...] = (),
    format: str | None = None,
) -> Exported:
    """Writes a policy as a function ``(obs [B, ...], core, start [B]) -> (action [B, ...], core)``.

    Actions are greedy, and within the environment's bounds. ``start`` (bool) marks the environments
    whose episode begins: their rows of ``core`` are ignored, so the first call may pass zeros. The
    trained variables are part of the file.

    A core that only exploration needs is left out,
    as are its parts that no greedy action depends on.

    - StableHLO: ``jax.export.deserialize(content).call(obs, core, start)`` runs it;
      it needs JAX, and not this package.
    - ONNX: any runtime of that format runs it. Inputs are ``obs``, or ``obs/<path>`` for each part
      of an observation, then ``core/<number>`` for each array of the core, and ``start``. Outputs
      are ``action``, or ``action/<path>``, and ``next_core/<number>``.

    An action mask is bool for JAX environments, and int8, as Gymnasium has it,
    for environments on the host.

    Args:
      out: the file to write.
      batch: the number of environments B; None: any number.
      platforms: where the file can run, such as ``("cpu", "cuda")``; empty: the platform of this
        machine. Only for StableHLO.
      format: one of ``FORMATS``; None: as ``format_of``.

    Raises:
      ConfigError: ``format`` contradicts the file's ending, a package or the file's directory is
        missing, or the policy reads rewards or only plans, or cannot be exported for any number of
        environments or for these platforms.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    format = format_of(out, format)
    check_place(pathlib.Path(out))
    _check(policy, platforms, format)
    try:
        content, args, results = _exported(policy, batch, platforms, format)
    except ConfigError:
        raise
    except Exception as error:
        hint = "; --batch N exports for N environments" if batch is None else ""
        raise ConfigError(
            f"the policy cannot be exported{hint} ({one_line(error, 200)})"
        ) from error
    with replacing(pathlib.Path(out)) as partial:
        partial.write_bytes(content)
    obs, core, _ = args
    layout = ""
    if jax.tree.leaves(core):
        layout = str(jax.tree.map(_kind, core)).replace("'", "")
    return Exported(
        bytes=len(content),
        inputs=tuple(map(_kind, jax.tree.leaves(args))),
        outputs=tuple(map(_kind, jax.tree.leaves(results))),
        parts={path: _kind(x) for path, x in spaces.leaves(obs).items() if path},
        core=layout,
    )


def format_of(out: str | pathlib.Path, format: str | None = None) -> str:
    """Returns the format of a file: what its ending names, and else ``format``,
    or StableHLO if that is None.

    Raises:
      ConfigError: there is no such format, or the ending names another one.
    """
    if format not in (*FORMATS, None):
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    ending = pathlib.Path(out).suffix[1:].lower()
    if ending not in FORMATS:
        return format or FORMATS[0]
    if format not in (ending, None):
        raise ConfigError(
            f"--format {format} contradicts the ending of {out}; "
            f"remove it, or name a .{format} file"
        )
    return ending


def _check(policy: Policy, platforms: tuple[str, ...], format: str) -> None:
    """Raises ``ConfigError`` as ``export``, for what cannot be exported in this format."""
    if platforms and format == "onnx":
        raise ConfigError(
            "--platforms works with StableHLO only, because the runtime of an ONNX file chooses "
            "the platform; remove it"
        )
    if names := list(policy.source.spec.policies):
        raise ConfigError(
            f"an exported file holds one policy, but the run has {', '.join(names)}; name one, as "
            f"in --policy {names[0]}"
        )
    if problem := policy.unable():
        raise ConfigError(f"{problem}: it cannot be exported")
    read = Traits.of(policy.config.algorithm).core_inputs
    if "reward" in read:
        raise ConfigError(
            f"an exported function takes no reward, but this policy was trained with "
            f"--core-inputs {read}; train one with --core-inputs action or none, or call this one "
            "in Python, as policy(obs, core, key, reward)"
        )
    if format == "onnx" and Traits.of(policy.config.algorithm).core == "linear":
        raise ConfigError(
            "--core linear computes with complex numbers, which ONNX lacks; "
            "export to a .stablehlo file"
        )
    if format == "stablehlo" and importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            "an export needs a package that is not installed: pip install flatbuffers"
        )


def _exported(
    policy: Policy, batch: int | None, platforms: tuple[str, ...], format: str
) -> tuple[bytes, tuple[PyTree, PyTree, jax.ShapeDtypeStruct], PyTree]:
    """Returns the file's content, and the shapes and
    dtypes of the function's arguments and results.

    Raises:
      ConfigError: a package is missing.
      Exception: what JAX raises if it cannot export the function.
    """
    from jax import export as jax_export

    size: Size = batch
    if batch is None:
        (size,) = jax_export.symbolic_shape("b")
    observation = policy.observation
    mask = None if policy.source.is_pure else policy.source.spec.mask

    def argument(path: str, part: Part) -> jax.ShapeDtypeStruct:
        dtype = np.dtype(np.int8) if path == mask else part.dtype
        return jax.ShapeDtypeStruct((size, *part.native_shape), dtype)

    obs = jax.tree.map(argument, spaces.paths(observation), observation)
    acting = Acting(policy, obs)
    args = obs, acting.core(size), jax.ShapeDtypeStruct((size,), jnp.bool_)
    if format == "onnx":
        return _onnx(acting, args, batch), args, jax.eval_shape(acting, *args)
    chosen = platforms or (jax.local_devices()[0].platform,)
    exported = jax_export.export(jax.jit(acting), platforms=chosen)(*args)
    return bytes(exported.serialize()), args, exported.out_avals


ROWS = 2
"""Environments with which ``Acting`` finds out what the core of a policy is for."""


class Acting:
    """The function to export: ``(obs [B, ...], core, start [B]) -> (action [B, ...], core)``.

    Its core has the arrays of the policy's core on which greedy actions depend.
    """

    def __init__(self, policy: Policy, obs: PyTree) -> None:
        """``obs``: shapes and dtypes of a batch of any size."""
        self._policy = policy
        self._initial = policy.initial_core(ROWS)
        self._rows, self._tree = jax.tree.flatten(self._initial)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _shapes(obs, ROWS))
        self._needed = read_later(lambda core: policy(blank, core), self._initial)
        self._alike = all(
            bool(jnp.all(self._rows[at] == self._rows[at][:1])) for at in self._needed
        )
        """Whether all environments start with the same core."""

    def core(self, size: Size) -> PyTree:
        """Returns the shapes and dtypes of the core for a batch of this size."""
        return self._reduced(_shapes(self._initial, size))

    def __call__(self, obs: PyTree, core: PyTree, start: jax.Array) -> tuple[PyTree, PyTree]:
        leaves = self._first(start.shape[0])
        for at, now in zip(sorted(self._needed), jax.tree.leaves(core), strict=True):
            begins = start.reshape(start.shape + (1,) * (now.ndim - 1))
            leaves[at] = jnp.where(begins, leaves[at], now)
        action, after = self._policy(obs, jax.tree.unflatten(self._tree, leaves))
        return action, self._reduced(after)

    def _first(self, size: Size) -> list[jax.Array]:
        """Returns the core at the start of episodes; what is not needed may be anything."""
        if not self._alike:
            return jax.tree.leaves(self._policy.initial_core(size))
        return [jnp.broadcast_to(row[0], (size, *row.shape[1:])) for row in self._rows]

    def _reduced(self, core: PyTree) -> PyTree:
        leaves = jax.tree.leaves(core)
        reduced = [None] * len(leaves)
        for at in self._needed:
            reduced[at] = leaves[at]
        return _plain(jax.tree.unflatten(self._tree, reduced))


def _shapes(tree: PyTree, size: Size) -> PyTree:
    """Returns the shapes and dtypes of arrays ``[B, ...]`` for a batch of this size."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), tree)


def _plain(tree: PyTree) -> PyTree:
    """Returns a tree of tuples, lists and dicts, which files can describe;
    () where no array is left.
    """
    if isinstance(tree, dict):
        plain: PyTree = {name: _plain(branch) for name, branch in tree.items()}
    elif isinstance(tree, list):
        plain = [_plain(branch) for branch in tree]
    elif isinstance(tree, tuple):
        plain = tuple(_plain(branch) for branch in tree)
    else:
        plain = tree
    return plain if jax.tree.leaves(plain) else ()


def _kind(array: jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _onnx(act: Acting, args: tuple[PyTree, ...], batch: int | None) -> bytes:
    """Returns the ONNX model of a function of ``(obs, core, start)``; if ``batch`` is None,
    its dimension is ``b``.
    """
    tree = jax.tree.structure(args)

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(act(*jax.tree.unflatten(tree, leaves)))

    def names(whole: str, tree: PyTree, memory: str, core: PyTree) -> list[str]:
        paths = [f"{whole}/{path}".rstrip("/") for path in spaces.leaves(tree)]
        return [*paths, *(f"{memory}/{number}" for number in range(len(jax.tree.leaves(core))))]

    specs = jax.tree.leaves(_shapes(args, "b" if batch is None else batch))
    action, core = jax.eval_shape(act, *args)
    inputs = [*names("obs", args[0], "core", args[1]), "start"]
    return onnx.converted(flat, specs, inputs, names("action", action, "next_core", core))
