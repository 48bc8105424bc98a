"""``jaxrl-dist check-env``: checks the user's environment and prints one line per fault."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.envs import LIBRARIES, REMOTE
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible

if TYPE_CHECKING:
    from jaxrl_dist.commands.check_env.findings import Check


IMPORTING = "importing its module"


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Plays an environment with random actions and prints one line per fault."""

    env: Annotated[str, help.Argument("ENV")] = ""
    """Environment such as my_module:make, your own function or class; see train's --env."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment."""
    env_timeout: float = setting(120.0, above=0, high=10**6)
    """Seconds within which each of its calls must return."""


def run(args: Sequence[str]) -> int:
    """Runs ``check-env ENV [FLAGS]``; returns 1 if the environment has faults."""
    options = flags.parse(CheckEnv, args, "jaxrl-dist check-env")
    if not options.env:
        raise ConfigError("which environment? Such as: jaxrl-dist check-env my_module:make")
    find_modules(options.env)
    result = check(options)
    lines = result.lines(options.env, f"{result.steps} steps, {result.episodes} episodes")
    print(visible("\n".join(lines)))
    return int(bool(result.faults))


def check(options: CheckEnv) -> Check:
    """Plays a Gymnasium or gymnax-style environment with
    random actions and checks everything it returns.

    Raises:
      ConfigError: no environment has this name and these options, or EnvPool provides it.
    """
    from jaxrl_dist.commands.check_env.findings import Check
    from jaxrl_dist.envs.contract import Stop
    from jaxrl_dist.envs.source import locate

    backend, name, _ = locate(options.env)
    if backend == REMOTE:
        raise ConfigError(
            f"clients play {REMOTE}:{name}, and training checks each of their messages; check-env "
            "checks Gymnasium and gymnax-style environments of your own"
        )
    if backend == "envpool":
        raise ConfigError(
            f"envpool:{name} comes from EnvPool; check-env checks Gymnasium and gymnax-style "
            "environments of your own"
        )
    result = Check(options.env)
    refused: list[ConfigError] = []

    def run() -> None:
        try:
            _play(result, backend, name, options.env_options)
        except Stop:
            pass
        except ConfigError as error:
            refused.append(error)
        except Exception as error:  # what no check has foreseen is a fault all the same
            result.fault(
                "check", f"{result.doing} stopped the check: {type(error).__name__}: {error}"
            )

    # In a thread, because the user's code may hang.
    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if time.monotonic() - result.since > options.env_timeout:
            if result.doing == IMPORTING:  # which says nothing of the environment
                raise ConfigError(
                    f"{IMPORTING} took longer than {options.env_timeout:g} s; "
                    "if the machine is only busy, try again or raise --env-timeout"
                )
            result.fault(
                "time",
                f"{result.doing} did not return within {options.env_timeout:g} s; if the machine "
                "is only busy, raise --env-timeout",
            )
            break
    if refused:
        raise refused[0]
    return result


def _play(check: Check, backend: str, name: str, options: Mapping[str, str]) -> None:
    """Makes the environment and plays it."""
    from jaxrl_dist.commands.check_env.gymnasium import check_gymnasium
    from jaxrl_dist.commands.check_env.gymnax import check_gymnax
    from jaxrl_dist.envs.device import gymnax, libraries
    from jaxrl_dist.envs.host import gymnasium
    from jaxrl_dist.envs.making import construct
    from jaxrl_dist.envs.native import advice_on, is_team

    if backend in LIBRARIES:
        return check_gymnax(check, libraries.make(backend, name, options), name, backend)
    if backend == "gymnax":
        return check_gymnax(check, gymnax.native(name, options), name, backend)
    with check.during(IMPORTING):
        keywords = gymnasium.options(name, options)

    def make() -> Any:
        with check.during("its constructor"):
            try:
                return construct(name, keywords)
            except ImportError as error:
                if advice := advice_on(name):
                    error.add_note(advice.removeprefix("; "))
                raise

    made = make()
    env = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if is_team(env) or hasattr(env, "reset_env") or hasattr(env, "step_env"):
        return check_gymnax(check, made, name, "gymnax")
    check_gymnasium(check, made, make, name)
