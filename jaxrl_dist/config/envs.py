"""Names of environments, as ``--env`` and files write them.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import importlib.machinery
import pathlib
import sys

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.errors import ConfigError

BACKENDS = ("gymnax", "envpool", "gymnasium")
"""Sources of environments; an id without a prefix is looked up in this order."""
LIBRARIES = {
    **{name: name for name in ("brax", "craftax", "jaxmarl", "jumanji", "navix", "pgx")},
    **{"playground": "mujoco_playground", "xminigrid": "xminigrid"},
}
"""Further libraries of JAX environments, with their modules: their ids need the prefix,
and each is an extra."""

REMOTE = "remote"
"""Backend of environments that clients bring: ``remote:HOST:PORT``, where the trainer listens."""
OBJECT = "object"
"""Stands for the module in the name of an environment object from Python,
which cannot be loaded by name."""


def env_name(env: object) -> str:
    """Returns an environment's name for files and messages: its ``--env`` name,
    or for an object ``object:ITS_CLASS``.

    Args:
      env: as in ``Train``.
    """
    if isinstance(env, str):
        return env
    if isinstance(env, tuple) and env:
        env = env[0]
    return f"{OBJECT}:{type(env).__name__}"


def named_env(env: object) -> object:
    """Returns ``MODULE:NAME`` for a function or class that its module has under that name,
    else ``env`` unchanged.

    Other processes and resumed runs find it by this name.
    Lambdas and nested functions have no such name.
    """
    module, name = (str(getattr(env, field, "")) for field in ("__module__", "__name__"))
    has_name = callable(env) and getattr(sys.modules.get(module), name, None) is env
    if has_name:
        return f"{module}:{name}"
    return env


def split_env(env: str) -> tuple[str | None, str | None, str]:
    """Splits ``--env`` into backend, module and name: ``[BACKEND:]ID`` or
    ``[gymnax:|gymnasium:]MODULE:NAME``; ``pettingzoo:FAMILY/NAME`` is short for a ``MODULE:NAME``.
    The name of ``remote:HOST:PORT`` is ``HOST:PORT``.

    Raises:
      ConfigError: ``env`` has neither form.
    """
    *prefixes, name = env.split(":")
    match prefixes:
        case []:
            return None, None, name
        case [backend] if backend in (*BACKENDS, *LIBRARIES):
            return backend, None, name
        case [remote, *_] if remote == REMOTE:
            if len(prefixes) != 2 or not name.isdecimal() or int(name) >= 2**16:
                raise ConfigError(
                    f"--env {env}: name the address where clients connect, as in "
                    "remote:127.0.0.1:8800"
                )
            return REMOTE, None, f"{prefixes[1]}:{name}"
        case ["pettingzoo"]:
            return None, f"pettingzoo.{name.replace('/', '.')}", "parallel_env"
        case [module] if all(part.isidentifier() for part in module.split(".")):
            return None, module, name
        case ["gymnax" | "gymnasium" as backend, module] if all(
            part.isidentifier() for part in module.split(".")
        ):
            return backend, module, name
    near = did_you_mean(prefixes[0], [*BACKENDS, *LIBRARIES])
    raise ConfigError(
        f"--env {env}: unknown backend {prefixes[0]!r}{near}; write "
        "[gymnax:|envpool:|gymnasium:]ID, LIBRARY:ID or MODULE:NAME"
    )


def module_of_user(env: str) -> str | None:
    """Returns the module of ``--env`` that only the user may name, because importing it runs code;
    None: it has none. ``remote`` stands for a port that others than this machine can reach.

    PettingZoo's environments count as a library's, as do Gymnasium's registered ones. A library
    counts as the user's module if Python would take it from the current directory.
    """
    backend, module, name = split_env(env)
    if backend == REMOTE and not name.startswith(("127.0.0.1:", "localhost:")):
        return REMOTE
    library = {**LIBRARIES, "envpool": "envpool"}.get(backend or "")
    if module is not None and module.startswith("pettingzoo.") and name == "parallel_env":
        library = "pettingzoo"
    if library is None:
        return module
    return library if is_here(library) else None


def is_here(name: str) -> bool:
    """Returns whether Python finds a module, or package, in the current directory:
    its files may be anyone's.
    """
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return pathlib.Path.cwd() in [pathlib.Path(place).resolve().parent for place in places]
