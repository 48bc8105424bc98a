"""A trained policy in the Open Neural Network Exchange format, by jax2onnx."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.typing import ArrayLike

from jaxrl_dist.errors import ConfigError

OLDEST = (0, 17)
"""Oldest version of jax2onnx that supports the operations of a policy."""
INSTALL = "`pip install 'jaxrl-dist[onnx]'`, then `pip install --upgrade --no-deps jax2onnx`"
"""Its own bounds exclude the versions of Orbax that this package needs; it works with them."""


def converted(
    function: Callable[..., list[jax.Array]],
    specs: Sequence[jax.ShapeDtypeStruct],
    inputs: list[str],
    outputs: list[str],
) -> bytes:
    """Returns a model that computes ``function``.

    Args:
      function: takes and returns flat lists of arrays.
      specs: a shape and dtype for each argument; a dimension may be a name, such as ``("B", 4)``.
      inputs, outputs: names of the arguments and results.

    Raises:
      ConfigError: jax2onnx, or what it needs, is not installed.
      Exception: it cannot convert the function, or to something that is not valid.
    """
    try:
        installed = importlib.metadata.version("jax2onnx")
        if tuple(map(int, installed.split(".")[:2])) < OLDEST:
            least = ".".join(map(str, OLDEST))
            raise ConfigError(
                f"--format onnx needs jax2onnx {least}, and {installed} is installed: {INSTALL}"
            )
        import jax2onnx
        import onnx
    except ImportError as error:
        raise ConfigError(
            f"--format onnx needs {error.name}, which is not installed: {INSTALL}"
        ) from None

    def inlined(*args: ArrayLike) -> list[ArrayLike]:
        return _evaluate(jax.make_jaxpr(function)(*args), *args)

    logger = logging.getLogger("onnx_ir")  # warns of each shape with a name in it
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model = jax2onnx.to_onnx(
            inlined, specs, model_name="policy", input_names=inputs, output_names=outputs
        )
    finally:
        logger.setLevel(level)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _evaluate(program: jex.ClosedJaxpr, *args: ArrayLike) -> list[ArrayLike]:
    """Evaluates a program, and inlines calls and the CPU's platform branches:
    jax2onnx supports neither.

    It does so as
    https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html does.
    """
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(program.jaxpr.invars, args, strict=True))

    def read(variable: jex.Var | jex.Literal) -> ArrayLike:
        return variable.val if isinstance(variable, jex.Literal) else values[variable]

    for equation in program.jaxpr.eqns:
        out = _outputs(equation, [read(variable) for variable in equation.invars])
        values |= dict(zip(equation.outvars, out, strict=True))
    return [read(variable) for variable in program.jaxpr.outvars]


def _outputs(equation: jex.JaxprEqn, values: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
    primitive = equation.primitive
    params = equation.params
    if primitive.name == "platform_index":
        on_cpu = [names is None or "cpu" in names for names in params["platforms"]]
        return [np.int32(on_cpu.index(True))]
    if call := _called(primitive.name, params, values):
        program, *args = call
        return _evaluate(program, *args)
    traced = any(isinstance(value, jax.core.Tracer) for value in values)
    aval: Any = equation.outvars[0].aval
    constant = values and not traced and aval.shape == ()
    # Such as the index of a platform's branch, which does not depend on the arguments.
    with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
        out = primitive.bind(*values, **params)
    return out if primitive.multiple_results else [out]


def _called(primitive: str, params: Mapping[str, Any], values: Sequence[Any]) -> Sequence[Any]:
    """Returns the program that an operation calls once, and its arguments; empty: it is a loop,
    or calls none.
    """
    if primitive == "cond" and not isinstance(values[0], jax.core.Tracer):
        return params["branches"][int(values[0])], *values[1:]
    program = params.get("jaxpr", params.get("call_jaxpr"))
    if program is None or primitive in ("scan", "while"):
        return ()
    return program if hasattr(program, "consts") else jex.ClosedJaxpr(program, ()), *values
