"""The command line ``jaxrl-dist``: runs a command, and turns errors into one line and an exit
code.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

# All other imports are inside functions: until signals are handled, one prints a traceback.
from jaxrl_dist.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    EnvError,
    ProcessError,
    say,
    visible,
)
from jaxrl_dist.run import signals


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: success; 1: the command failed while running, such as on a full disk, or ``check-env``,
    ``check-algorithm`` or ``doctor`` found faults; 2: invalid input; 129: SIGHUP; 130: Ctrl-C; 143:
    SIGTERM. A failure prints one line to stderr, after the traceback of a failed environment and
    the command that resumes a saved run.
    """
    # file names may hold characters that the terminal's encoding lacks
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals.raising(), failing_exits():  # unless the command handles signals itself
            code = _run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        from jaxrl_dist.run.console import discard_output

        discard_output()
        return 1
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # after --help
            return 0
        notes = getattr(error, "__notes__", ())
        explained = _explained(error)
        if explained is None:
            # JAX's note on tracebacks would be the last line that a user reads
            error.__notes__ = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
            raise
        message, code = explained
        _end_with_error(message, code, notes)
        return code


def _end_with_error(message: str, code: int, notes: Sequence[str]) -> None:
    """Prints an error, after an environment's traceback among its ``notes``,
    and tells the other processes of the run.
    """
    if code == 1:
        for note in notes:
            print(visible(note, 20_000), file=sys.stderr)
    say(f"error: {' '.join(message.split())}")
    start = sys.modules.get("jaxrl_dist.hosts.start")
    if start is not None:
        start.leave(code)


def _explained(error: BaseException) -> tuple[str, int] | None:
    """Returns the message and the exit code of an error; None: it is a fault of this package."""
    match error:
        case SystemExit():
            return f"your Python code called sys.exit({error.code!r})", 2
        case ConfigError():
            return error.with_flags, 2
        case CheckpointError():
            return str(error), 2
        case signals.Interrupted() | ProcessError():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", 130
        case OSError():
            code = 2 if error.errno == errno.ENAMETOOLONG else 1
            if error.filename:
                return f"{error.filename!s:.300}: {error.strerror}", code
            return str(error), code
        case EnvError() | DivergedError():
            return str(error), 1
    if "RESOURCE_EXHAUSTED" in str(error):  # XLA's name for it
        return (
            f"out of memory; fewer --num-envs or a shorter --rollout-length need less ({error})",
            1,
        )

    from jaxrl_dist.commands import accelerators

    problem = accelerators.no_devices()
    if problem is None:
        return None
    return (problem, 2)


@contextlib.contextmanager
def failing_exits() -> Iterator[None]:
    """Makes ``os._exit(0)`` in this process an exit with a line and code 1:
    the command has not ended.

    An environment or algorithm that calls it would make a supervisor take the run for finished.
    """
    process = os.getpid()
    leave = os._exit

    def failing(status: int) -> NoReturn:
        # a child of `fork`, such as one of multiprocessing, may end this way
        if status == 0 and os.getpid() == process:
            say(
                "error: the environment or the algorithm called os._exit(0), which ends the "
                "process; remove that call"
            )
            status = 1
        leave(status)

    os._exit = failing
    try:
        yield
    finally:
        os._exit = leave


def _run(args: list[str]) -> int:
    from jaxrl_dist.checks import did_you_mean
    from jaxrl_dist.commands import COMMANDS, help_text
    from jaxrl_dist.heavy import in_32_bits
    from jaxrl_dist.hosts import warn
    from jaxrl_dist.run import version

    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    name, *rest = args
    if name == "--version":
        print(f"jaxrl-dist {version.version()}")
        return 0
    if name not in COMMANDS:
        similar = did_you_mean(name, [*COMMANDS, "--version", "--help"])
        raise ConfigError(f"unknown command {name!r}{similar}; see: jaxrl-dist --help")
    if "jax" not in sys.modules:
        # XLA writes alarms of slow compilations between the lines of a table, which has its own
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warn.one_line_warnings():
        command = importlib.import_module(f"jaxrl_dist.commands.{name.replace('-', '_')}").run
        if "JAX_ENABLE_X64" in os.environ:
            command = in_32_bits(command)
        code: int = command(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
