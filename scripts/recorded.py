"""Says where the measured numbers of the documents come from:
``python scripts/recorded.py`` writes docs/recorded.json.

Measurements lie in the files of ``DATA``, which scripts write, and in tables of pages. Tables that
no script writes are copied, with the command that their section names; without one they were
measured by hand, as the page says. ``recorded_at`` is the commit that brought a number into the
repository, which git tells; that one was measured, or an older one. So this needs the repository's
history.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "recorded.json"
DATA = {
    "docs/learning/results.json": "python scripts/learning.py",
    "docs/learning/ppo-es.json": "python scripts/ppo_es.py",
    "docs/records/results.json": "python scripts/records.py",
    "docs/speed/results.json": "python scripts/benchmark.py --minutes 60 --out speed --with-peers",
    "docs/scale.json": "python benchmarks/scale.py",
    "docs/accelerators.json": "python scripts/accelerators.py",
}
"""The files of measurements, and the commands that write them."""
WRITTEN = {
    "README.md": {"Does it learn, and how fast?"},
    "docs/learning.md": {"Tasks that presets were tuned on", "Tasks that no preset was tuned on"},
    "docs/evidence/records.md": {"What it reaches"},
    "docs/speed.md": {"What came out"},
}
"""Sections with tables from these files, which tests compare with them. Generated parts of pages
(``scripts/docs.py``) need no entry."""
PEERS = {
    "rejax": "PyPI 0.1.3",
    "SBX": "PyPI 0.28.0",
    "SB3": "PyPI 2.9.2",
    "RLlib": "PyPI 2.60.0",
    "Sample Factory": "PyPI 2.1.1",
    "CleanRL": None,
}
"""Versions of other libraries; None: of a repository, whose commit was not written down."""


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def pages() -> list[str]:
    """The README and the pages, as paths from the root."""
    return [
        "README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ]


def tables(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the section and the rows of each table of a page that has a column of numbers;
    generated tables are left out.
    """
    section = ""
    rows = list[str]()
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^<!-- generated: .*?^<!-- end -->$", "", text, flags=re.M | re.S)
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            section = line.strip("# ")
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            cells = [cell.strip() for row in rows[2:] for cell in row.strip("|").split("|")[1:]]
            if any(re.match(r"[-+≥≤]?\d[\d,.]*( %)?( [(+].*|, .*)?$", cell) for cell in cells):
                yield section, rows[2:]
            rows = []


def command_of(page: str, section: str, row: str) -> str | None:
    """The command that a section names for the table with a row: the last one before it,
    or the next one.
    """
    text = (ROOT / page).read_text(encoding="utf-8").partition(f" {section}\n")[2]
    text = re.split(r"^#", text, flags=re.MULTILINE)[0]
    before, _, after = text.partition(row)
    pattern = r"`(python (?:benchmarks|scripts)/[^`]+)`|```sh\n(jaxrl-dist train .*?)\n```"
    named = [
        *reversed(re.findall(pattern, before, re.DOTALL)),
        *re.findall(pattern, after, re.DOTALL),
    ]
    if named:
        return " ".join("".join(named[0]).replace("\\\n", " ").split())
    return None


def of_line(page: str, line: str) -> dict[str, str]:
    """The newest commit that brought a line of a page."""
    commit, date = git(
        "log", "-1", "--abbrev=7", "--format=%h %as", f"-S{line}", "--", page
    ).split()
    return {"recorded_at": commit, "date": date}


def of_data(file: str) -> dict[str, Any]:
    """The command of a file's measurements,
    and the first commit that had each of them as it is now.
    """
    entries: dict[str, Any] = {}
    now = entries_of(json.loads((ROOT / file).read_text(encoding="utf-8")))
    for line in reversed(git("log", "--abbrev=7", "--format=%h %as", "--", file).splitlines()):
        commit, date = line.split()
        try:
            then = entries_of(json.loads(git("show", f"{commit}:{file}")))
        except (subprocess.CalledProcessError, ValueError):
            continue
        for name, value in now.items():
            if name not in entries and then.get(name) == value:
                entries[name] = {"recorded_at": commit, "date": date}
    return {"command": DATA[file], "entries": {name: entries.get(name) for name in now}}


def entries_of(content: dict[str, Any]) -> dict[str, Any]:
    """The measurements of a file by name: each is found again if its numbers are the same."""
    rows = content.get("rows", content)
    if isinstance(rows, list) or "runs" in content:
        return {"all": content}
    return {name: row["returns"] if isinstance(row, dict) else row for name, row in rows.items()}


def main() -> None:
    """Writes the file. A table that has only moved keeps its command and its date."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))["tables"]
    dated = {tuple(table["rows"]): table for table in stored}
    by_hand: list[dict[str, Any]] = []
    for page in pages():
        for section, rows in tables(page):
            if section in WRITTEN.get(page, ()):
                continue
            if tuple(rows) in dated:
                by_hand.append({**dated[tuple(rows)], "page": page, "section": section})
                continue
            newest = max((of_line(page, row) for row in rows), key=lambda found: found["date"])
            by_hand.append(
                {
                    "page": page,
                    "section": section,
                    "command": command_of(page, section, rows[0]),
                    **newest,
                    "rows": rows,
                }
            )
    content = {"data": {file: of_data(file) for file in DATA}, "peers": PEERS, "tables": by_hand}
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
