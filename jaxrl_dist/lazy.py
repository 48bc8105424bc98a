"""Modules that are imported on first use, so that ``--help``, which reads algorithm files,
needs no JAX.

An algorithm file imports them from here by their usual names,
so that all its imports are at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrl_dist.heavy import Module, jax, jnp, np, optax

_NETWORKS = (
    "core_inputs",
    "cores",
    "distributions",
    "models",
    "networks",
    "observations",
    "perturbation",
    "torsos",
    "values",
)

if TYPE_CHECKING:
    import mctx

    from jaxrl_dist import mesh, packing, returns, rng, spaces
    from jaxrl_dist.nn import (
        core_inputs,
        cores,
        distributions,
        models,
        networks,
        observations,
        perturbation,
        torsos,
        values,
    )
else:
    mctx = Module("mctx")
    mesh, packing, returns, rng, spaces = (
        Module(f"jaxrl_dist.{name}") for name in ("mesh", "packing", "returns", "rng", "spaces")
    )
    (
        core_inputs,
        cores,
        distributions,
        models,
        networks,
        observations,
        perturbation,
        torsos,
        values,
    ) = (Module(f"jaxrl_dist.nn.{name}") for name in _NETWORKS)

__all__ = ["jax", "jnp", "mctx", "np", "optax"]
__all__ += ["mesh", "packing", "returns", "rng", "spaces"]
__all__ += [
    "core_inputs",
    "cores",
    "distributions",
    "models",
    "networks",
    "observations",
    "perturbation",
    "torsos",
    "values",
]
