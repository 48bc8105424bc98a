"""Prepares a release: ``python scripts/release.py 0.2.0`` sets the version in each file,
and dates the changelog.

The page docs/releasing.md says what comes next.
"""

from __future__ import annotations

import datetime
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNRELEASED = "## [Unreleased]"


def number(version: str) -> tuple[int, ...]:
    """Returns a version such as ``0.2.0`` as numbers.

    Raises:
      ValueError: it has another form.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"{version!r} is no version such as 0.2.0")
    return tuple(map(int, version.split(".")))


def release(root: pathlib.Path, version: str, today: datetime.date) -> None:
    """Writes ``version`` into ``version.py`` and ``CITATION.cff``,
    and gives unreleased changes its name and date.

    Raises:
      ValueError: the version has a wrong form or is not above the newest released one,
        or there is nothing to release.
    """
    paths = {
        name: root / name for name in ("jaxrl_dist/run/version.py", "CITATION.cff", "CHANGELOG.md")
    }
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", texts["CHANGELOG.md"], re.MULTILINE)
    if released and number(version) <= number(released[0]):
        raise ValueError(f"{version} is not above {released[0]}, the newest release")
    _, _, after = texts["CHANGELOG.md"].partition(f"{UNRELEASED}\n")
    if not after.split("\n## [")[0].strip():
        raise ValueError("CHANGELOG.md has no unreleased changes")
    patterns = {
        "jaxrl_dist/run/version.py": (r'^RELEASE = ".*"$', f'RELEASE = "{version}"'),
        "CITATION.cff": (
            r"^version: .*\ndate-released: .*$",
            f"version: {version}\ndate-released: {today}",
        ),
        "CHANGELOG.md": (re.escape(UNRELEASED), f"{UNRELEASED}\n\n## [{version}] - {today}"),
    }
    for name, (pattern, text) in patterns.items():
        changed, count = re.subn(pattern, text, texts[name], count=1, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"{name} has no line like {pattern}")
        paths[name].write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    try:
        release(ROOT, " ".join(sys.argv[1:]), datetime.datetime.now(datetime.UTC).date())
    except ValueError as error:
        sys.exit(f"release.py: error: {error}")
