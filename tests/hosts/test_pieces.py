"""One checkpoint of several processes, each of which writes the pieces that only it has."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_dist.errors import ConfigError, ProcessError
from jaxrl_dist.hosts import arrays as of_hosts
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.arrays import Pieces
from jaxrl_dist.run import arrays, checkpoint, directories, saving
from jaxrl_dist.training.opening import check_shared

pytestmark = pytest.mark.quick

X = np.arange(6 * 4, dtype=np.float32).reshape(6, 4)
FLAGS = np.arange(6) % 2 == 0
BYTES = np.arange(12, dtype=np.uint8).reshape(2, 6)
WHOLE = {
    "params": np.ones(3),
    "memory": {"x": X, "flags": FLAGS},
    "frames": BYTES,
    "none": np.zeros((0, 2)),
}


def held(process: int, processes: int) -> dict[str, Any]:
    """The state as one of the processes has it: an equal part of ``memory`` and, along axis 1,
    of ``frames``.
    """

    def piece(x: np.ndarray, axis: int) -> Pieces:
        size, bounds = x.shape[axis] // processes, [(0, n) for n in x.shape]
        kept = {}
        for start in range(process * size, (process + 1) * size):  # a device for each row
            bounds[axis] = (start, start + 1)
            kept[tuple(bounds)] = np.take(x, [start], axis)
        return Pieces(x.shape, x.dtype, kept)

    return {
        **WHOLE,
        "memory": {"x": piece(X, 0), "flags": piece(FLAGS, 0)},
        "frames": piece(BYTES, 1),
    }


class Mail:
    """A ``Post`` whose other processes have sent their values already."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def send(self, value: Any) -> None:
        self.values[peers.index()] = value

    def collect(self) -> dict[int, Any]:
        return self.values


def save(path: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mail: Any = Mail()
    path.parent.mkdir(exist_ok=True)
    for process in range(1, processes):
        with monkeypatch.context() as patch:
            patch.setattr(peers, "index", lambda process=process: process)
            saving._write_pieces(path, held(process, processes), mail)
    saving._write(path, held(0, processes), {"progress": {}}, mail)


def assert_restored(found: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(WHOLE)
    for (name, value), (_, wanted) in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree_util.tree_leaves_with_path(WHOLE),
        strict=True,
    ):
        np.testing.assert_array_equal(value, wanted, err_msg=str(name))
        assert value.dtype == wanted.dtype


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_what_several_processes_have_written_is_read_as_one(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoints" / "000000000010"
    save(path, processes, monkeypatch)
    assert {entry.name for entry in path.parent.iterdir()} == {path.name}
    parts = {"arrays", *(f"arrays.{process}" for process in range(1, processes))}
    assert {entry.name for entry in path.iterdir()} == {*parts, "run.json", "manifest.json"}
    checkpoint.verify(path, WHOLE)
    assert_restored(arrays.restore(path / "arrays", WHOLE))
    some = arrays.restore(path / "arrays", {"flags": FLAGS}, "memory/")
    np.testing.assert_array_equal(some["flags"], FLAGS)
    for part in parts - {"arrays"}:  # nobody writes what others have
        stored = sum(math.prod(entry.shape) for entry in arrays._entries(path / part))
        assert stored == (X.size + FLAGS.size + BYTES.size) // processes


def test_a_checkpoint_without_a_process_s_pieces_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoints" / "000000000010"
    save(path, 3, monkeypatch)
    file = next((path / "arrays.1").rglob("manifest.ocdbt"))
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(directories.DamageError, match="is not what was written"):
        checkpoint.verify(path, WHOLE)
    with pytest.raises(directories.DamageError, match="cannot be read"):
        arrays.restore(path / "arrays", WHOLE)
    shutil.rmtree(path / "arrays.1")
    with pytest.raises(
        directories.DamageError, match=r"arrays.1/.* is damaged: No such file or directory"
    ):
        checkpoint.verify(path, WHOLE)
    with pytest.raises(
        directories.DamageError, match="the pieces of frames have 8 of its 12 elements"
    ):
        arrays.restore(path / "arrays", WHOLE)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_process_that_cannot_write_leaves_no_checkpoint(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "checkpoints" / "000000000010"
    save(path, 2, monkeypatch)
    monkeypatch.setattr(arrays, "save_pieces" if fails else "save", full)
    message = f"{path} cannot be written: {'process 1: ' if fails else ''}.*No space left on device"
    with pytest.raises(OSError, match=message):
        save(path, 2, monkeypatch)
    assert {entry.name for entry in path.parent.iterdir()} == {path.name}  # the earlier one
    assert_restored(arrays.restore(path / "arrays", WHOLE))


def test_pieces_that_show_late_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system; those that never show leave no checkpoint."""
    path, shown = tmp_path / "late", threading.Timer(0.2, lambda: (tmp_path / "late").mkdir())
    shown.start()
    assert directories.appears(path, 30)
    shown.join()
    appears = directories.appears
    monkeypatch.setattr(
        directories, "appears", lambda path: appears(path.with_name("elsewhere"), 0.1)
    )
    with pytest.raises(
        OSError,
        match=r"process 1 wrote .*pieces-1, but this process does not see it; use a file system that all hosts share",
    ):
        save(tmp_path / "checkpoints" / "000000000010", 2, monkeypatch)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_directory_that_is_not_shared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    check_shared(folder)  # process 0 has made it
    monkeypatch.setattr(peers, "first", lambda: False)
    monkeypatch.setattr(peers, "index", lambda: 1)
    monkeypatch.setattr(directories, "appears", lambda path: path.exists())
    with pytest.raises(ConfigError, match=r"1.*metrics.jsonl"):
        check_shared(folder)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    check_shared(folder)


def test_pieces_of_a_killed_session_are_deleted(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".000000000010.pieces-3"
    (left / "arrays").mkdir(parents=True)
    saving.Saver(tmp_path, 1).close()
    assert not left.exists() and checkpoint.saved(tmp_path) == []


def test_each_element_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if several devices have it."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    monkeypatch.setattr(of_hosts, "is_here", lambda x: False)
    specs: Any = (
        ("a",),
        ("b", "a"),
        ("a", "b"),
        (None, "b"),
        (("a", "b"),),
        (("b", "a"), None),
        (None, ("a", "b")),
        (),
    )
    x = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    for spec in specs:
        pieces = of_hosts.pieces(
            {"x": jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))}
        )["x"]
        found, count = np.zeros_like(x), np.zeros_like(x)
        for bounds, piece in pieces.by_bounds.items():
            found[tuple(slice(*pair) for pair in bounds)] = piece
            count[tuple(slice(*pair) for pair in bounds)] += 1
        assert pieces.shape == x.shape and pieces.dtype == x.dtype
        np.testing.assert_array_equal(found, x)
        assert (count == 1).all()
        assert of_hosts.pieces(pieces) is pieces


def test_devices_that_do_not_reach_each_other_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError(
            "UNKNOWN: Gloo context initialization failed:\n  Connect timeout"
        )

    monkeypatch.setattr(of_hosts, "put", put)
    with pytest.raises(
        ProcessError,
        match=r"UNKNOWN:.*Gloo.*Connect",
    ):
        of_hosts.connect()
