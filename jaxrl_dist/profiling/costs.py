"""Counts the floating-point operations of a program's matrix products, by layer of the network,
and bytes it moves.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Literal

SCOPES = ("iteration", "env_step", "epoch", "update")
"""Names of ``jax.named_scope`` that name the loops of a run, outer ones first."""


def of_products(jaxpr: Any, within: str = "") -> Counter[str]:
    """Counts the floating-point operations of a traced
    program's matrix products and convolutions, on all devices.

    A loop whose number of passes is known only at run time counts once; of several branches,
    the largest counts.

    Args:
      within: the names of the scopes that the program is called in.

    Returns:
      The operations of each layer, such as ``MLP/Dense_0``:
      the path of its flax modules or other named scopes.
    """
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        scopes = f"{within}/{eqn.source_info.name_stack}"
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total[_layer(scopes)] += (
                2 * eqn.outvars[0].aval.size * int(np.prod([left[axis] for axis in contracted]))
            )
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total[_layer(scopes)] += 2 * eqn.outvars[0].aval.size * kernel.size // channels
        else:
            inside = [of_products(inner, scopes) for inner in _inside(eqn)]
            if name == "cond":
                counted = sorted(inside, key=Counter.total)[-1:]
            else:
                counted = inside
            for layer, flops in sum(counted, Counter[str]()).items():
                total[layer] += _times(eqn) * flops
    return total


def of_memory(jaxpr: Any) -> int:
    """Counts the bytes that a traced program reads and writes on all devices,
    if XLA fuses all elementwise operations.

    Matrix products, convolutions, reductions and sorts read their operands and write their results.
    Gathering and slicing read and write only what they take, and their counterparts what they put.
    The elementwise operations of a program read its arguments and write its results, and those of a
    loop do so in each pass. Caches are ignored: what fits into one may move faster than memory
    does. Loops and branches count as in ``of_products``.
    """
    moved, read, written = _moved(jaxpr)
    return (
        moved
        + _sizes(jaxpr.invars[at] for at in read)
        + _sizes(jaxpr.outvars[at] for at in written)
    )


def _moved(jaxpr: Any) -> tuple[int, set[int], set[int]]:
    """Counts the bytes of all but elementwise operations.

    Returns:
      The bytes, the places of the arguments that elementwise operations read,
      and of the results that they write.
    """
    place = dict(zip(jaxpr.invars, itertools.count(), strict=False))  # also for views of arguments
    made: dict[Any, int] = {}  # values that elementwise operations make
    total = 0
    read = set[int]()
    for eqn in jaxpr.eqns:
        name, operands, out = eqn.primitive.name, eqn.invars, eqn.outvars
        if name in _VIEWS:
            for known in (place, made):
                known.update(zip(out, _among(operands[:1], known), strict=False))
        if (moved := _moved_at_once(eqn)) is not None:
            total += moved
        elif inside := list(_inside(eqn)):
            bytes_inside, *places = zip(*map(_moved, inside), strict=True)
            total += _times(eqn) * (max if name == "cond" else sum)(bytes_inside)
            for inner, reads, writes in zip(inside, *places, strict=True):
                passed = operands[len(operands) - len(inner.invars) :]
                read |= {*_among(map(passed.__getitem__, reads), place)}
                made |= dict.fromkeys(map(out.__getitem__, writes), 1)
        else:
            read |= {*_among(operands, place)}
            made |= dict.fromkeys(out, 1)
    return total, read, {at for at, x in enumerate(jaxpr.outvars) if _among([x], made)}


def _moved_at_once(eqn: Any) -> int | None:
    """Returns the bytes that an operation reads and writes; None: it is elementwise,
    or calls a program.
    """
    name, operands, out = eqn.primitive.name, eqn.invars, eqn.outvars
    if name in ("scan", "while"):
        return _times(eqn) * sum(map(of_memory, _inside(eqn)))
    if name in _SAME:
        return 0
    if name in _TAKING:
        return _sizes(operands[1:]) + 2 * _sizes(out)
    if name in _PUTTING:
        return _sizes(operands[1:]) + _sizes(operands[_PUTTING[name] :][:1])
    if name in _WHOLE or name.startswith(("reduce_", "cum")):
        return _sizes(operands) + _sizes(out)
    return None


_SAME = ("reshape", "squeeze", "expand_dims")
_TAKING = ("gather", "dynamic_slice", "slice")
_PUTTING = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that put an operand, by its place among the operands, into the first one."""
_VIEWS = {*_SAME, *_PUTTING}
"""Operations whose result stands for their first operand: it has another shape, or new parts."""
_WHOLE = ("dot_general", "conv_general_dilated", "sort", "top_k", "argmax", "argmin")


def _among(variables: Iterable[Any], known: Mapping[Any, int]) -> list[int]:
    """Returns the values of the variables that are known; constants, which cannot be hashed,
    are not.
    """
    return [known[x] for x in variables if not isinstance(x, Literal) and x in known]


def _sizes(variables: Iterable[Any]) -> int:
    """Returns the bytes of arrays; keys and effects have none."""
    avals = (x.aval for x in variables)
    return sum(
        aval.size * getattr(aval.dtype, "itemsize", 0) for aval in avals if hasattr(aval, "dtype")
    )


def _times(eqn: Any) -> int:
    """Returns how often an operation runs the programs inside it, over all devices."""
    name, params = eqn.primitive.name, eqn.params
    return int(
        params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
    )


def _inside(eqn: Any) -> Iterator[Any]:
    """Yields the programs inside an operation."""
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else [value]:
            if hasattr(x, "eqns"):
                yield x
            elif hasattr(x, "jaxpr"):
                yield x.jaxpr


def _layer(scopes: str) -> str:
    """Returns the scopes of a layer's forward pass, without those of transformations and loops."""
    words = re.sub(r"\w+\(|\)", "", scopes).split("/")
    named = [word for word in words if word and word not in ("shard_map", *SCOPES)]
    # A custom derivative that takes one itself has its scope's name twice.
    return "/".join(word for word, _ in itertools.groupby(named)) or "other"
