"""Errors and warnings for the user; each message is one line."""

from __future__ import annotations


class ConfigError(ValueError):
    """The user asked for something impossible; the message is one line that says what would work."""


class CheckpointError(RuntimeError):
    """No checkpoint of the run can be read; the message is one line."""


class ConfigWarning(UserWarning):
    """The run is possible, but probably not what the user meant; the message is one line."""


class EnvWarning(UserWarning):
    """An environment failed, or has a feature that no policy uses, and the run continues; the message is one line."""


class DivergedError(RuntimeError):
    """Training has diverged; the message is one line."""


class FileWarning(UserWarning):
    """A file of a run cannot be written or is damaged, and the run continues without it; the message is one line."""


class EnvError(RuntimeError):
    """An environment's own code failed; the message is one line, and a note holds the original traceback."""

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        if traceback is not None:
            self.add_note(traceback.rstrip())
