"""Finds Gymnasium environments, registered ones and the user's own,
and reads their options and spaces.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import Error

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config.envs import BACKENDS, LIBRARIES
from jaxrl_dist.envs import episodes, goals, masks
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.conversion import space_of
from jaxrl_dist.envs.env_options import check_options, parse_option
from jaxrl_dist.envs.host import runners
from jaxrl_dist.envs.host import worker as env_worker
from jaxrl_dist.envs.host.calls import awaited
from jaxrl_dist.envs.making import construct, creator, describe, parameters_of
from jaxrl_dist.envs.native import Description, advice_on, env_label, tuples
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.spaces import Box, leaves
from jaxrl_dist.types import EnvSpec


def ids() -> list[str]:
    """Returns the ids in Gymnasium's registry, in its order;
    some need libraries that may not be installed.
    """
    # The excluded ids run any older Gym environment that an option names,
    # so a file could choose code to run.
    return [name for name in gymnasium.registry if not name.startswith(("GymV21", "GymV26"))]


Result = TypeVar("Result")


def describe_or_adapt(
    env_id: str,
    texts: Mapping[str, str],
    timeout: float,
    workers: str,
    adapt: Callable[[object], Result],
) -> Description | Result:
    """Makes an environment, reads its description and closes it.

    Args:
      env_id: ``ID`` of Gymnasium's registry, or ``MODULE:NAME``: a function or class of the module
        that makes an environment, or an id that the module registers on import.
      texts: ``--env-options``.
      timeout: seconds for making the environment.
      workers: where to make it: in a thread, or in a process, which survives a crash.
      adapt: converts a gymnax-style environment; those need ``threads``.

    Returns:
      The description of a ``gymnasium.Env``, or the result of ``adapt``.

    Raises:
      ConfigError: no environment has this name and these options, a library that it needs is not
        installed, or it is of another kind.
      EnvError: its code raised another error.
      TimeoutError: making it took too long.
    """
    name = env_label("gymnasium", env_id)
    to_close: list[gymnasium.Env] = []
    closing: Future[bytes] = Future()

    def make() -> Description | Result:
        env = construct(env_id, options(env_id, texts))
        description = describe(env)
        if description.gymnasium:
            to_close.append(env)
        if description.gymnax:
            return adapt(env)
        return description

    def close() -> None:
        closing.set_result(env_worker.closed(to_close[0]) if to_close else b"")

    if workers == "processes":
        keywords = _in_time(name, timeout, lambda: options(env_id, texts))
        result: Description | Result = runners.read_description(env_id, keywords, timeout)
    else:
        result = _in_time(name, timeout, make, close)
        awaited(lambda nap: futures.wait([closing], nap).done, runners.CLOSE_SECONDS)
        runners.warn_of_closing(name, closing.result() if closing.done() else None)
    if isinstance(result, Description):
        _check_kind(name, result)
    return result


def _check_kind(name: str, made: Description) -> None:
    """Checks that a Gymnasium environment was made.

    Raises:
      ConfigError: it is an object of another kind.
    """
    if made.gymnasium:
        return
    if made.gymnax:
        raise ConfigError(
            f"--env-workers processes needs a Gymnasium environment, but {name} is not one"
        )
    if "VectorEnv" in made.kind:
        raise ConfigError(
            f"{name} made a {made.kind}; return one environment, which --num-envs copies"
        )
    raise ConfigError(
        f"{name} made a {made.kind}, which is neither a gymnasium.Env nor a gymnax-style "
        "environment (reset_env, step_env, is_truncated, observation_space and action_space) "
        "of one agent; docs/your-environment.md shows both"
    )


def _in_time(
    name: str,
    timeout: float,
    function: Callable[[], Result],
    then: Callable[[], None] = lambda: None,
) -> Result:
    """Runs ``function`` (user code that may hang) and then ``then`` in a thread;
    returns the result of ``function``.
    """

    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        then()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not awaited(lambda nap: futures.wait([answer], nap).done, timeout):
        raise TimeoutError(f"{name}: making an environment took longer than {timeout:g} s")
    try:
        return answer.result()
    except (ConfigError, EnvError):
        raise
    except (Error, ImportError) as error:
        raise ConfigError(f"{name} cannot be made here: {error}{advice_on(name)}") from error
    except BaseException as error:  # SystemExit too
        raise EnvError(
            f"{name} cannot be made: {type(error).__name__}: {error}", traceback.format_exc()
        ) from error


def spec(env_id: str, made: Description, wrappers: Wrappers) -> EnvSpec:
    """Builds the spec of an environment for algorithms.

    Raises:
      ConfigError: no policy supports its spaces.
    """
    name = env_label("gymnasium", env_id)
    observation = space_of(made.observation, name, "observations")
    action = space_of(made.action, name, "actions")
    for part in leaves(action).values():
        if isinstance(part, Box) and not np.issubdtype(part.dtype, np.floating):
            raise ConfigError(f"{name} has Box actions of {part.dtype}; a Box of floats works")
    observation, mask = masks.with_mask(observation, action, made.mask)
    return EnvSpec(
        env_id,
        "gymnasium",
        made.family,
        observation,
        action,
        max_episode_steps=wrappers.limit(made.time_limit),
        mask=mask,
        unread_mask=made.mask.unread,
        info_metrics=episodes.parse(wrappers.info_metrics),
        fps=made.fps and made.fps / wrappers.action_repeat,
        tuples=tuples(made.observation, made.action, made.mask),
        inside=made.inside,
        goals=goals.known(env_id) or getattr(_function(env_id)[0], "goals", None),
    )


def options(env_id: str, texts: Mapping[str, str]) -> dict[str, object]:
    """Parses ``--env-options`` into keyword arguments.

    Each text is parsed as the type of the argument's default; without a default, as the first of
    int, float, bool and str that fits.

    Raises:
      ConfigError: unknown environment, unknown option, missing option, or invalid value.
      Exception: any error from importing the environment's module.
    """
    name = env_label("gymnasium", env_id)
    function, hidden_defaults = _function(env_id)
    parameters = parameters_of(function)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    defaults = {x.name: x.default for x in parameters if x.kind in kinds} | hidden_defaults
    if all(x.kind is not x.VAR_KEYWORD for x in parameters):
        check_options(name, texts, defaults)
    for key, default in defaults.items():
        if default is inspect.Parameter.empty and key not in texts:
            raise ConfigError(f"{name} needs an option: --env-options {key}=...")
    values: dict[str, object] = {}
    for key, text in texts.items():
        default = defaults.get(key)
        if default in (None, inspect.Parameter.empty):
            values[key] = _guess(text)
        else:
            values[key] = parse_option(name, key, text, default)
    return values


def _function(env_id: str) -> tuple[Callable[..., object], dict[str, object]]:
    """Returns the function that makes the environment,
    and the defaults that its signature does not show.

    Raises:
      ConfigError: unknown environment.
      Exception: any error from importing its module.
    """

    module, _, _ = env_id.rpartition(":")
    try:
        function, name = creator(env_id)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but lacks another module
        if module.startswith("pettingzoo."):
            raise ConfigError(f"--env {env_id}: {_missing_from_pettingzoo(module)}") from None
        near = did_you_mean(module, [*BACKENDS, *LIBRARIES])
        raise ConfigError(
            f"--env {env_id}: unknown backend {module!r}{near}, and no module of that name can be "
            "imported"
        ) from None
    if callable(function):
        return function, {}
    if name in gymnasium.registry:
        spec = gymnasium.registry[name]
        entry: Any = spec.entry_point
        if isinstance(entry, str):
            entry = load_env_creator(entry)
        limit = spec.max_episode_steps or -1  # Gymnasium's value for no limit
        return entry or gymnasium.make, {"max_episode_steps": limit, **spec.kwargs}
    near = did_you_mean(name, dict(inspect.getmembers(sys.modules[module], callable)))
    raise ConfigError(f"--env {env_id}: the module {module} has no function {name!r}{near}")


def _missing_from_pettingzoo(module: str) -> str:
    """Says why PettingZoo has no module of this name, such as ``pettingzoo.classic.chess_v0``."""
    family, _, name = module.rpartition(".")
    try:
        package = importlib.import_module(family)
    except ModuleNotFoundError:
        return "PettingZoo is not installed, or has no such environment: pip install pettingzoo"
    games = [
        game.name
        for game in pkgutil.iter_modules(package.__path__)
        if re.search(r"_v\d+$", game.name)
    ]
    return f"PettingZoo has no such environment{did_you_mean(name, games)}"


def _guess(text: str) -> int | float | bool | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)
