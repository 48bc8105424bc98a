"""Compiled programs that runs of the tests hand on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import conftest
import pytest
from jax._src import compilation_cache

pytestmark = pytest.mark.quick


def test_whole_programs_are_kept_and_the_next_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, first, second = (tmp_path / name for name in ("kept", "first", "second"))
    for folder in (kept, first, second):
        folder.mkdir()
    monkeypatch.setattr(conftest, "KEPT", kept)
    program = compilation_cache.compress_executable(b"a program" * 100)
    (first / "whole-cache").write_bytes(program)
    (first / "cut-cache").write_bytes(program[: len(program) // 2])
    (first / "empty-cache").write_bytes(b"")
    conftest.keep(first)
    assert [path.name for path in kept.iterdir()] == ["whole-cache"] and not first.exists()
    conftest.link_kept(second)
    assert (second / "whole-cache").read_bytes() == program
    conftest.keep(second)
    assert (kept / "whole-cache").read_bytes() == program


def test_old_programs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "run"
    kept.mkdir()
    folder.mkdir()
    monkeypatch.setattr(conftest, "KEPT", kept)
    for name, days in {"old": conftest.MAX_AGE_DAYS + 1, "new": conftest.MAX_AGE_DAYS - 1}.items():
        (kept / name).touch()
        os.utime(kept / name, (time.time() - days * 86400,) * 2)
    conftest.link_kept(folder)
    assert (
        [path.name for path in kept.iterdir()]
        == [path.name for path in folder.iterdir()]
        == ["new"]
    )
