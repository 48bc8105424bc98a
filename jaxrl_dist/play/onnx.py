"""A trained policy in the Open Neural Network Exchange format, by jax2onnx."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jaxrl_dist.errors import ConfigError

OLDEST = (0, 17)
"""Oldest version of jax2onnx that supports the operations of a policy."""
INSTALL = "`pip install 'jaxrl-dist[onnx]'`, then `pip install --upgrade --no-deps jax2onnx`"
"""Its own bounds exclude the versions of Orbax that this package needs; it works with them."""


def converted(function: Callable[..., Any], specs: Sequence[Any], inputs: list[str], outputs: list[str]) -> bytes:
    """Returns a model that computes ``function``.

    Args:
      function: takes and returns flat lists of arrays.
      specs: a shape and dtype for each argument; a dimension may be a name, such as ``("B", 4)``.
      inputs, outputs: names of the arguments and results.

    Raises:
      ConfigError: jax2onnx, or what it needs, is not installed.
      Exception: it cannot convert the function.
    """
    try:
        installed = importlib.metadata.version("jax2onnx")
        if tuple(map(int, installed.split(".")[:2])) < OLDEST:
            least = ".".join(map(str, OLDEST))
            raise ConfigError(f"--format onnx needs jax2onnx {least}, and {installed} is installed: {INSTALL}")
        import jax2onnx
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}, which is not installed: {INSTALL}") from None

    def inlined(*args: Any) -> list[Any]:
        return _evaluate(jax.make_jaxpr(function)(*args), *args)

    model = jax2onnx.to_onnx(inlined, specs, model_name="policy", input_names=inputs, output_names=outputs)
    return model.SerializeToString()


def _evaluate(program: jex.ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a program, and inlines calls and the CPU's platform branches: jax2onnx supports neither.

    It does so as https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html does.
    """
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(program.jaxpr.invars, args, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jex.Literal) else known[variable]

    for equation in program.jaxpr.eqns:
        out = _outputs(equation, [read(variable) for variable in equation.invars])
        known |= dict(zip(equation.outvars, out, strict=True))
    return [read(variable) for variable in program.jaxpr.outvars]


def _outputs(equation: jex.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "platform_index":
        return [np.int32(next(at for at, names in enumerate(params["platforms"]) if names is None or "cpu" in names))]
    if primitive.name == "cond" and not isinstance(values[0], jax.core.Tracer):
        return _evaluate(params["branches"][int(values[0])], *values[1:])
    called = params.get("jaxpr", params.get("call_jaxpr"))
    if called is not None and primitive.name not in ("scan", "while"):
        return _evaluate(called if hasattr(called, "consts") else jex.ClosedJaxpr(called, ()), *values)
    aval: Any = equation.outvars[0].aval
    constant = values and aval.shape == () and not any(isinstance(x, jax.core.Tracer) for x in values)
    # Such as the index of a platform's branch, which does not depend on the arguments.
    with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
        out = primitive.bind(*values, **params)
    return out if primitive.multiple_results else [out]
