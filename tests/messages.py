"""The reviewed error lines in ``messages.txt``: a changed sentence is a changed line of that file.

``python -m pytest tests/test_cli.py --rewrite-messages`` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).with_name("messages.txt")
REWRITE = "python -m pytest tests/test_cli.py --rewrite-messages"


def shortened(text: str) -> str:
    """Dots for long rows of one digit and for what Python or the network adds to a message."""
    text = re.sub(r"(\d)\1{20,}\.*", r"\1\1\1...", text)
    return re.sub(r"(is not JSON|cannot be made here): .*", r"\1: ...", text)


class Messages:
    """``lines``: command -> its error line, in the order of the file."""

    def __init__(self, rewrite: bool) -> None:
        entries = FILE.read_text("utf-8").split("\n\n")
        self.lines = dict(entry.removeprefix("$ ").strip().split("\n") for entry in entries)
        self.rewrite = rewrite

    def compare(self, command: str, line: str) -> None:
        command = shortened(command)
        line = shortened(line)
        if self.rewrite:
            self.lines[command] = line
        assert line == self.lines.get(command), f"not the reviewed message; `{REWRITE}` stores it"

    def write(self, commands: Sequence[str]) -> None:
        """Stores the lines of these commands, in their order."""
        lines = {command: self.lines[command] for command in map(shortened, commands)}
        FILE.write_text("\n".join(f"$ {command}\n{line}\n" for command, line in lines.items()))
