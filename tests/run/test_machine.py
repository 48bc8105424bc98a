"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_dist.run import machine

GB = 10**9


@pytest.mark.parametrize(
    "groups, files, limit",
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "2000000000\n"}, 2 * GB),
        ("0::/job/step\n", {"job/memory.max": str(3 * GB), "job/step/memory.max": "max"}, 3 * GB),
        ("0::/job/step\n", {"job/memory.max": str(3 * GB), "job/step/memory.max": str(GB)}, GB),
        ("0::/job\n", {"other/memory.max": str(GB)}, None),
        ("4:cpu,cpuacct:/a\n3:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(GB)}, GB),
        ("3:memory:/docker/unseen\n", {"memory/memory.limit_in_bytes": str(GB)}, GB),
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": str(GB)}, None),
        ("nonsense\n", {"memory.max": "nonsense"}, None),
    ],
)
def test_the_limit_of_a_container_is_found(
    groups: str,
    files: dict[str, str],
    limit: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert machine.container_limit(tmp_path) == limit
    physical = machine.memory_size()
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.memory_size() == min(physical, limit or physical)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert machine.container_limit(tmp_path) is None
