"""The errors and warnings that a user meets; each message is one line."""

from __future__ import annotations


class ConfigError(ValueError):
    """The user asked for something that cannot be done; the message is one line that says what would work."""


class CheckpointError(RuntimeError):
    """A run has no checkpoint that can be read; the message is one line."""


class ConfigWarning(UserWarning):
    """What the user asked for can be done, and may not be what was meant; the message is one line."""


class EnvWarning(UserWarning):
    """An environment failed, or has something that no policy heeds, and the run goes on; the message is one line."""


class DivergedError(RuntimeError):
    """Training has gone wrong by itself; the message is one line."""


class FileWarning(UserWarning):
    """A file of a run cannot be written or is damaged, and the run goes on without it; the message is one line."""


class EnvError(RuntimeError):
    """An environment's own code failed; the message is one line, and a note holds the original traceback."""

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        if traceback is not None:
            self.add_note(traceback.rstrip())
