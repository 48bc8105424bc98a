"""The command line ``jaxrl-dist``: runs a command, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.commands import COMMANDS, accelerators, help_text
from jaxrl_dist.errors import CheckpointError, ConfigError, DivergedError, EnvError, ProcessError, say, visible
from jaxrl_dist.hosts import start
from jaxrl_dist.run.signals import Interrupted


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: success; 1: the command failed while running, such as on a full disk, or ``check-env`` or ``doctor`` found
    faults; 2: invalid input; 129: SIGHUP; 130: Ctrl-C; 143: SIGTERM. A failure prints one line to stderr, after the
    traceback of a failed environment and the command that resumes a saved run.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may hold characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        if not stop.code:  # after --help
            return 0
        return _fail(f"Python code of yours has called sys.exit({stop.code!r})", 2)
    except ConfigError as error:
        return _fail(error.with_flags, 2)
    except (Interrupted, ProcessError) as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        from jaxrl_dist.run.console import discard_output

        discard_output()
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1, error)
    except (EnvError, DivergedError, CheckpointError) as error:
        return _fail(str(error), 1, error)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):  # XLA's name for it
            text = f"out of memory; fewer --num-envs or a shorter --rollout-length need less ({error})"
            return _fail(text, 1, error)
        if (problem := accelerators.no_devices()) is None:
            raise
        return _fail(problem, 2)


def _fail(message: str, code: int, error: BaseException | None = None) -> int:
    """Prints the notes of an error, such as the traceback of an environment, and a line; returns the exit code."""
    for note in getattr(error, "__notes__", ()):
        print(visible(note, 20_000), file=sys.stderr)
    say(f"error: {' '.join(message.split())}")
    start.leave(code)
    return code


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    name, *rest = args
    if name == "--version":
        print(f"jaxrl-dist {version()}")
        return 0
    if name not in COMMANDS:
        similar = did_you_mean(name, [*COMMANDS, "--version", "--help"])
        raise ConfigError(f"unknown command {name!r}{similar}; see: jaxrl-dist --help")
    code: int = importlib.import_module(f"jaxrl_dist.commands.{name.replace('-', '_')}").run(rest)
    return code


def version() -> str:
    """Returns the installed version."""
    return accelerators.version("jaxrl-dist") or "(not installed: run from its source tree)"


if __name__ == "__main__":
    sys.exit(main())
