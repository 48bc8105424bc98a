"""Errors and warnings for the user; each message is one line.

A message is written with the flags of settings, such as ``--num-envs``, and the command line prints
``with_flags``. In Python, where settings are fields, ``str(error)`` says ``num_envs``. The setting
that a message is about is its ``field``: the message is then the rest of the sentence.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Self

DIVERGED = "training has diverged"
"""How the message of a run's ``DivergedError`` begins."""
_COMMANDS_OR_FLAGS = re.compile(
    r"((?:jaxrl-dist|pip|python) [^;`]*)|--(?!help\b)(no-)?([A-Za-z_][\w-]*\.(?=[a-z]))?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
)


def visible(text: str, most: int = 10**6) -> str:
    """Returns at most so many characters of a text, for the terminal.

    Escapes such as ``\\x1b`` replace characters that move the cursor or change how others look:
    names and messages may come from anyone's files and environments.
    """

    def escaped(letter: str) -> str:
        if letter.isprintable() or letter in "\n\t":
            return letter
        return ascii(letter)[1:-1]

    shown = "".join(map(escaped, text[:most]))
    if len(text) <= most:
        return shown
    return f"{shown} ... ({len(text) - most} more characters)"


def say(message: str) -> None:
    """Prints one line to stderr, unless that is closed, as a terminal may be."""
    with contextlib.suppress(OSError, ValueError):
        print(visible(f"jaxrl-dist: {message}", 2_000), file=sys.stderr, flush=True)


def flag(name: str) -> str:
    """Returns the command-line spelling of a field: ``num_envs`` -> ``--num-envs``."""
    return "--" + name.replace("_", "-")


class _Message(Exception):
    """A message about settings, with their flags or with their fields."""

    def __init__(self, text: str = "", field: str | None = None, where: str = "") -> None:
        """``text`` follows the flag of ``field``, if there is one.

        ``where`` comes before both, such as the name of a file or of a policy.
        """
        super().__init__(text, field, where)
        self.text = text
        self.field = field
        self.where = where

    @property
    def with_flags(self) -> str:
        """The message with the flags of settings."""
        if self.field is None:
            return f"{self.where}{self.text}"
        return f"{self.where}{flag(self.field)} {self.text}"

    def __str__(self) -> str:
        text = _COMMANDS_OR_FLAGS.sub(_field, self.text)
        if self.field is None:
            return f"{self.where}{text}"
        return f"{self.where}{self.field} {text}"

    def within(self, where: str, policy: str = "") -> Self:
        """Returns the same message about a setting of a policy, or of another place.

        Args:
          where: comes first, such as ``policy prey`` or the name of a file.
          policy: whose setting it is, so that its flag is ``--prey.batch-size``.
        """
        field = self.field
        if field is not None and policy:
            field = f"{policy}.{field}"
        return type(self)(self.text, field, f"{where}: {self.where}")


def _field(match: re.Match[str]) -> str:
    """Returns a flag's field, such as ``double=False`` for ``--no-double``;
    a command line stays as it is.
    """
    command, negated, policy, name = match.groups()
    return command or (policy or "") + name.replace("-", "_") + ("=False" if negated else "")


class ConfigError(_Message, ValueError):
    """The user asked for something impossible; the message is one line that says what would
    work.
    """


def one_line(error: BaseException, most: int = 300) -> str:
    """Formats an exception as one line of at most ``most`` characters: its type and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, as far as 300 characters,
    or the error's type if it has none.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


class UnusedError(ConfigError):
    """The value of ``field`` has no effect, given the others."""


class FinishedError(ConfigError):
    """The run to be resumed is finished."""


class CheckpointError(RuntimeError):
    """No checkpoint of the run can be read; the message is one line."""


class ConfigWarning(_Message, UserWarning):
    """The run is possible, but probably not what the user meant; the message is one line."""


class EnvWarning(UserWarning):
    """An environment failed, or has a feature that no policy uses, and the run continues;
    the message is one line.
    """


class DivergedError(RuntimeError):
    """Training has diverged; the message is one line."""


class ProcessError(RuntimeError):
    """Another process of the run has failed; the message is one line."""

    exit_code = 1
    """Exit code of the failed process."""


class FileWarning(UserWarning):
    """A file of a run cannot be written or is damaged, and the run continues without it;
    the message is one line.
    """


class EnvError(RuntimeError):
    """An environment's own code failed; the message is one line,
    and a note holds the original traceback.
    """

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        if traceback is not None:
            self.add_note(traceback.rstrip())
