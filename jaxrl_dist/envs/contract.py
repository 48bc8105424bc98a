"""What a JAX environment must return, checked where it is traced: structure, shapes and dtypes.

``train`` ends with the first fault, and ``check-env`` lists all; both say the same of each.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from jaxrl_dist.config.envs import LIBRARIES
from jaxrl_dist.envs.conversion import policy_space
from jaxrl_dist.envs.native import described, miscounted, named, named_spaces, unnamed
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.spaces import Space, leaves, zeros
from jaxrl_dist.types import PyTree

P = ParamSpec("P")
T = TypeVar("T")
METHODS = ("reset_env", "step_env", "is_truncated", "observation_space", "action_space")
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors of code that asks for the numbers of an array while JAX compiles it."""
_PACKAGE = __name__.partition(".")[0]
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_HIDDEN = tuple(
    os.path.dirname(path) + os.sep for path in (jax.__file__, os.path.dirname(__file__))
)
"""Folders of JAX and of this package, whose frames tell the author of an environment nothing."""


class Stop(Exception):
    """A check cannot go on."""


class Contract:
    """Checks what an environment returns; the first fault raises ``EnvError``."""

    def __init__(self, name: str) -> None:
        """``name``: the environment's, for messages."""
        self.name = name

    def stop(self, kind: str, text: str, cause: BaseException | None = None) -> Exception:
        """Returns the exception that ends the check after a fault; ``cause``:
        what the environment's code raised.
        """
        return EnvError(f"{self.name}: {text}", None if cause is None else _traceback(cause))

    def fault(self, kind: str, text: str) -> None:
        """Reports a fault, which need not end the check; ``kind`` tells faults apart."""
        raise self.stop(kind, text)

    def refuse(self, kind: str, error: ConfigError) -> None:
        """Reports a fault that other code has refused,
        such as a space that no policy here supports.
        """
        raise error

    def halt(self) -> None:
        """Ends the check if there have been faults."""

    def note(self, text: str) -> None:
        """Reports what is not a fault, but perhaps not meant."""

    def begin(self, phase: str) -> None:
        """Reports the begin of a phase that may take long."""

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Reports an exception raised inside as a fault that ends the check."""
        try:
            yield
        except (ConfigError, EnvError, Stop, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self.stop(doing, f"{doing} {_raised(error)}", error) from error

    def call(self, doing: str, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Calls a function of the environment inside ``during``."""
        with self.during(doing):
            return function(*args, **keywords)

    def trace(
        self, doing: str, env: object, function: Callable[..., PyTree], *args: PyTree
    ) -> PyTree:
        """Returns the result of ``traced`` for a function of the environment."""
        result = self.call(doing, traced, function, *args)
        attributes = getattr(env, "__dict__", {}).values()
        if not of_library(type(env)) and any(map(_holds_tracer, attributes)):
            raise self.stop(
                "tracer",
                f"{doing} keeps a traced value in the environment; keep everything that changes in "
                "the state",
            )
        return result

    # --- Checks of returned values; shapes and dtypes may stand for arrays ------------------------

    def returned(self, call: str, values: PyTree, names: Sequence[str]) -> PyTree:
        """Returns the values of a call after checking their number."""
        problem = miscounted(call, values, names)
        if problem:
            raise self.stop(call, problem)
        return values

    def observation(self, where: str, obs: PyTree, space: object) -> None:
        """Checks that an observation, or each of its parts, belongs to its space,
        the environment's own.
        """
        try:
            parts = leaves(named(space, obs))
        except ValueError as error:
            return self.fault("parts", f"{where}: {error}")
        for path, part in leaves(named_spaces(space)).items():
            place = f" at {path}" if path else ""
            self.part(f"the observation of {where}{place}", parts[path], part)

    def part(self, subject: str, obs: Any, space: Any) -> bool:
        """Checks shape and dtype of one part of an observation; returns whether they are right."""
        x = obs if hasattr(obs, "dtype") else np.asarray(obs)
        shape = tuple(int(size) for size in np.ravel(space.shape))
        if not _is_real(x.dtype):
            self.fault(
                "observation", f"{subject} is {described(obs)}, not an array of real numbers"
            )
        elif tuple(x.shape) != shape:
            self.fault("shape", f"{subject} has shape {tuple(x.shape)}, its space {shape}")
        elif not np.can_cast(x.dtype, space.dtype):
            self.fault("dtype", f"{subject} has dtype {x.dtype}, its space {np.dtype(space.dtype)}")
        else:
            return True
        return False

    def number(self, subject: str, x: Any) -> bool:
        """Checks that a reward is one real number; returns whether it is."""
        if isinstance(x, Real) or (getattr(x, "shape", None) == () and _is_real(x.dtype)):
            return True
        self.fault("reward", f"{subject} is {described(x)}, not a number")
        return False

    def flag(self, subject: str, x: object) -> None:
        """Checks that an end of an episode is one bool."""
        is_scalar = getattr(x, "shape", None) == () and getattr(x, "dtype", None) == np.dtype(bool)
        if not isinstance(x, bool) and not is_scalar:
            self.fault(subject, f"{subject} is {described(x)}, not a bool")

    def info(self, where: str, info: object) -> None:
        """Checks that an info is a dict."""
        if not isinstance(info, Mapping):
            self.fault(f"info {where}", f"{where}'s info is {described(info)}, not a dict")

    def arrays(self, state: PyTree, subject: str = "its state") -> None:
        """Checks that a state, or what ``subject`` names, holds nothing but arrays and numbers."""
        for path, leaf in jax.tree.leaves_with_path(state):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                self.fault(
                    "leaf",
                    f"{subject} holds {described(leaf)}{_place(path)}, not an array; "
                    "a NamedTuple or a dataclass of flax.struct may hold arrays",
                )

    def same(
        self,
        subject: str,
        first: PyTree,
        later: PyTree,
        reset: str = "reset_env",
        step: str = "step_env",
    ) -> None:
        """Checks that a step keeps structure, shapes and dtypes, as a compiled loop requires.

        A step may return another dtype of the same kind whose numbers the first can hold: JAX gives
        Python's numbers dtypes that depend on what they meet.
        """
        before: Any = jax.tree.structure(first)
        after: Any = jax.tree.structure(later)
        # their texts may differ where they are equal, as those of MuJoCo's states
        if before != after:
            return self.fault(
                "structure",
                f"{subject} of {step} is {shown(after)}, that of {reset} {shown(before)}",
            )
        for (path, old), new in zip(
            jax.tree.leaves_with_path(first), jax.tree.leaves(later), strict=True
        ):
            fits = {"shape": new.shape == old.shape, "dtype": _fits(new.dtype, old.dtype)}
            for kind, right in fits.items():
                if not right:
                    self.fault(
                        f"{subject} {kind}",
                        f"{subject}{_place(path)} has {kind} {getattr(new, kind)} after {step} "
                        f"and {getattr(old, kind)} after {reset}",
                    )


class Traced(NamedTuple):
    """A gymnax-style environment, and shapes and dtypes of what it returns."""

    params: Any
    native: tuple[Any, Any]
    """Its spaces of observations and actions."""
    action: Space
    obs: PyTree
    state: PyTree
    info: Mapping[str, Any]


def of_env(contract: Contract, env: Any, params: Any) -> Traced:
    """Traces a first step of a gymnax-style environment and checks all that it returns.

    Args:
      params: its parameters; None: its ``default_params``.

    Raises:
      ConfigError: no policy here supports its spaces.
      EnvError: a fault, or an error of its own code; ``check-env`` collects these.
    """
    for method in METHODS:
        if not callable(getattr(env, method, None)):
            contract.fault(method, f"it has no method {method}")
    if (
        params is None
        and not hasattr(type(env), "default_params")
        and not hasattr(env, "default_params")
    ):
        contract.fault("params", "it has no default_params, and no parameters were given with it")
    contract.halt()
    if params is None:
        params = contract.call("default_params", lambda: env.default_params)
    native: list[Any] = []
    spaces: list[Space] = []
    for role in ("observation", "action"):
        native.append(contract.call(f"{role}_space", getattr(env, f"{role}_space"), params))
        try:
            spaces.append(policy_space(native[-1], contract.name, f"{role}s"))
        except ConfigError as error:
            contract.refuse(role, error)
    contract.halt()
    observation, action = native
    checked = not of_library(env.observation_space)
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = contract.trace("reset_env", env, lambda key: env.reset_env(key, params), key)
    obs, state = contract.returned("reset_env", first, ("observation", "state"))
    if checked:
        contract.observation("reset_env", obs, observation)
    contract.arrays(state)
    contract.halt()
    chosen = zero_action(action, spaces[1])
    step = contract.trace(
        "step_env", env, lambda *now: env.step_env(*now, params), key, state, chosen
    )
    names = ("observation", "state", "reward", "terminated", "info")
    next_obs, next_state, reward, terminated, info = contract.returned("step_env", step, names)
    if checked:
        contract.observation("step_env", next_obs, observation)
    contract.number("the reward", reward)
    contract.flag("terminated", terminated)
    contract.info("step_env", info)
    contract.arrays(next_state)
    contract.halt()
    contract.same("the observation", obs, next_obs)
    contract.same("the state", state, next_state)
    contract.halt()
    truncated = contract.trace(
        "is_truncated", env, lambda state: env.is_truncated(state, params), next_state
    )
    contract.flag("what is_truncated returns", truncated)
    contract.halt()
    return Traced(params, (observation, action), spaces[1], obs, state, info)


def traced(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns a function's result without computing it:
    shapes and dtypes stand for arrays and numbers.

    All else, such as texts, stays as it is.
    """
    structure: list[Any] = []

    def arrays(*args: PyTree) -> list[Any]:
        result, tree = jax.tree.flatten(function(*args))
        structure[:] = (tree, result)
        return [x for x in result if _is_array(x)]

    shapes = iter(jax.eval_shape(arrays, *args))
    tree, result = structure
    for number, x in enumerate(result):
        if _is_array(x):
            result[number] = next(shapes)
    return jax.tree.unflatten(tree, result)


def _place(path: jax.tree_util.KeyPath) -> str:
    """Names a leaf of a tree for messages; empty: the tree is this leaf."""
    where = jax.tree_util.keystr(path)
    return f" at {where}" if where else ""


def shown(x: object) -> str:
    """Returns a value's text in one short line."""
    return " ".join(str(x).split())[:80]


def zero_action(native: object, action: Space) -> PyTree:
    """Returns an action of one environment, in its own form: all zero."""
    return jax.tree.map(lambda x: x[0], unnamed(native, zeros(action, 1)))


def _is_array(x: object) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | bool | int | float | complex)


def _is_real(dtype: object) -> bool:
    """Returns False for complex numbers, texts, objects and JAX's keys."""
    return isinstance(dtype, np.dtype) and dtype.kind not in "cOSUMm"


def _fits(new: object, old: object) -> bool:
    """Returns whether a dtype holds all numbers of another of the same kind."""
    if new == old:
        return True
    if not isinstance(new, np.dtype) or not isinstance(old, np.dtype):  # as those of JAX's keys
        return False
    return new.kind == old.kind and np.can_cast(new, old)


def _holds_tracer(tree: PyTree) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # dicts whose keys have no order
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
    return False


def of_library(function: object) -> bool:
    """Returns whether a method or class is a library's:
    some spaces have other dtypes and shapes than observations.
    """
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package in ("gymnax", _PACKAGE, *LIBRARIES)


def _raised(error: BaseException) -> str:
    """Says in one line what a user's code has raised, and where."""
    frames = _frames(error)
    frames = [x for x in frames if not x.filename.startswith(_INSTALLED)] or frames
    frames = [x for x in frames if not x.filename.startswith(_OURS)] or frames
    where = ""
    if frames:
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    first_line = str(error).strip().split("\n")[0].rstrip(".")
    said = ": ".join(filter(None, (type(error).__name__, first_line)))
    if isinstance(error, _NEEDS_VALUES):
        return (
            f"cannot run in a compiled program{where}: {said}; "
            "use jnp.where or jax.lax.cond in place of if, and jax.numpy in place of numpy"
        )
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    return "; ".join([f"raises {said}{where}", *notes])


def _traceback(error: BaseException) -> str | None:
    """Returns the environment's own part of a traceback;
    None where the line that raised says it all.
    """
    if isinstance(error, _NEEDS_VALUES):
        return None
    last = traceback.format_exception_only(error)[0]  # without JAX's note on tracebacks
    return "".join(
        ["Traceback (most recent call last):\n", *traceback.format_list(_frames(error)), last]
    )


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_HIDDEN)
    ]
