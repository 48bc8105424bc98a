"""Counts the floating-point operations of a program's matrix products, by layer of the network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_dist.training.loops import SCOPES


def of_products(jaxpr: Any, within: str = "") -> Counter[str]:
    """Counts the floating-point operations of a traced program's matrix products and convolutions, on all devices.

    A loop whose number of passes is known only at run time counts once; of several branches, the largest counts.

    Args:
      within: the names of the scopes that the program is called in.

    Returns:
      The operations of each layer, such as ``MLP/Dense_0``: the path of its flax modules or other named scopes.
    """
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        scopes = f"{within}/{eqn.source_info.name_stack}"
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total[_layer(scopes)] += 2 * eqn.outvars[0].aval.size * int(np.prod([left[axis] for axis in contracted]))
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total[_layer(scopes)] += 2 * eqn.outvars[0].aval.size * kernel.size // channels
        else:
            inside = [of_products(inner, scopes) for value in params.values() for inner in _jaxprs(value)]
            times = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
            counted = sorted(inside, key=Counter.total)[-1:] if name == "cond" else inside
            for layer, flops in sum(counted, Counter[str]()).items():
                total[layer] += times * flops
    return total


def _layer(scopes: str) -> str:
    """Returns the scopes of a layer's forward pass, without those of transformations and loops."""
    words = re.sub(r"\w+\(|\)", "", scopes).split("/")
    return "/".join(word for word in words if word and word not in ("shard_map", *SCOPES)) or "other"


def _jaxprs(value: Any) -> Iterator[Any]:
    for x in value if isinstance(value, (tuple, list)) else [value]:
        if hasattr(x, "eqns"):
            yield x
        elif hasattr(x, "jaxpr"):
            yield x.jaxpr
