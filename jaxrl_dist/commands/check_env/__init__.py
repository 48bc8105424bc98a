"""``jaxrl-dist check-env``: checks the user's environment and prints one line per fault."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxrl_dist.checks import check_range
from jaxrl_dist.commands import find_modules, flags
from jaxrl_dist.errors import ConfigError

if TYPE_CHECKING:
    from jaxrl_dist.commands.check_env.findings import Findings


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Plays an environment with random actions and prints one line per fault."""

    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]] = ""
    """Environment such as my_module:make, your own function or class; see train's --env."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment."""
    env_timeout: float = 120.0
    """Seconds within which each of its calls must return."""


def run(args: Sequence[str]) -> int:
    """Runs ``check-env ENV [FLAGS]``; returns 1 if the environment has faults."""
    asked = flags.parse(CheckEnv, args, "jaxrl-dist check-env")
    if not asked.env:
        raise ConfigError("which environment? Such as: jaxrl-dist check-env my_module:make")
    check_range(asked, "env_timeout", above=0, high=10**6)
    find_modules(asked.env)
    found = check(asked.env, asked.env_options, asked.env_timeout)
    for fault in found.faults:
        print(f"{asked.env}: {fault}")
    for note in found.notes:
        print(f"{asked.env}: note: {note}")
    if found.faults:
        return 1
    print(f"{asked.env}: no fault found in {found.steps} steps, {found.episodes} episodes")
    return 0


def check(env: str, options: Mapping[str, str] = {}, timeout: float = 120.0) -> Findings:
    """Plays a Gymnasium or gymnax-style environment with random actions and checks everything it returns.

    Args:
      env: its name, as for ``envs.find``.
      options: ``--env-options``.
      timeout: seconds within which each of its calls must return.

    Raises:
      ConfigError: no environment has this name and these options, or EnvPool provides it.
    """
    from jaxrl_dist.commands.check_env.findings import Check, Findings
    from jaxrl_dist.config import LIBRARIES
    from jaxrl_dist.envs import gymnasium, gymnax, libraries
    from jaxrl_dist.envs.contract import Stop
    from jaxrl_dist.envs.native import construct, is_team
    from jaxrl_dist.envs.source import locate

    backend, name, _ = locate(env)
    if backend == "envpool":
        raise ConfigError(f"envpool:{name} is EnvPool's own; check-env is for Gymnasium and gymnax-style environments")
    from jaxrl_dist.commands.check_env.gymnasium import check_gymnasium
    from jaxrl_dist.commands.check_env.gymnax import check_gymnax

    found = Check(env)
    refused: list[ConfigError] = []

    def play() -> None:
        if backend in LIBRARIES:
            return check_gymnax(found, libraries.make(backend, name, options), name, backend)
        if backend == "gymnax":
            return check_gymnax(found, gymnax.native(name, options), name, backend)
        with found.during("importing its module"):
            keywords = gymnasium.options(name, options)

        def make() -> Any:
            return found.call("its constructor", construct, name, keywords)

        made = make()
        single = made[0] if isinstance(made, tuple) and len(made) == 2 else made
        if is_team(single) or hasattr(single, "reset_env") or hasattr(single, "step_env"):
            return check_gymnax(found, made, name, "gymnax")
        check_gymnasium(found, made, make, name)

    def run() -> None:
        try:
            play()
        except Stop:
            pass
        except ConfigError as error:
            refused.append(error)
        except Exception as error:  # what no check has foreseen is a fault all the same
            found.fault("check", f"{found.doing} ends the check by {type(error).__name__}: {error}")

    # In a thread, because the user's code may hang.
    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if time.monotonic() - found.since > timeout:
            found.fault("time", f"{found.doing} has not come back within {timeout:g} s")
            break
    if refused:
        raise refused[0]
    return Findings(list(found.faults.values()), list(found.notes), found.steps, found.episodes)
