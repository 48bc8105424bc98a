"""Experience that is written as a data set while it is played."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time

import jax
import numpy as np
import pytest
import runs  # noqa: F401  which sets up the devices

from jaxrl_dist.data import files, recorder, writing
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.play.recording import of_rollout
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.types import EnvSpec, Rollout

pytestmark = pytest.mark.quick

SPEC = EnvSpec(
    "x",
    "gymnax",
    "x",
    Box((1,), np.dtype(np.float32), np.array([0]), np.array([9])),
    Discrete(3),
    None,
)


def played(length, num_envs=3):
    """A rollout of whole and cut episodes, whose observations count the steps of all
    environments.
    """
    rng = np.random.default_rng(0)
    valid, ends = np.ones((length, num_envs), bool), rng.random((length, num_envs)) < 0.2
    for t in range(1, length):
        valid[t] = ~(ends[t - 1] & valid[t - 1])
    ends &= valid
    terminated = ends & (rng.random(ends.shape) < 0.5)
    obs = np.arange((length + 1) * num_envs, dtype=np.float32).reshape(length + 1, num_envs, 1)
    action, reward = (
        rng.integers(0, 3, valid.shape).astype(np.int32),
        rng.random(valid.shape, np.float32),
    )
    extras = {"log_prob": rng.random(valid.shape, np.float32)}
    return Rollout(obs, action, reward, terminated, ends & ~terminated, valid, extras, (), ())


def part(rollout, start, stop):
    cut = jax.tree.map(lambda x: x[start:stop], rollout._replace(obs=()))
    return cut._replace(obs=rollout.obs[start : stop + 1])


def recording(path, **options):
    writer = writing.Writer(writing.Place(path), recorder.kinds(SPEC, known=True), SPEC.interface)
    return recorder.Recorder(writer, SPEC, {"env": "x"}, **{"episodic": False, **options})


def test_two_recorders_of_one_directory_do_not_mix(tmp_path):
    """The second is refused at once, in whatever process;
    what a killed one has left is overwritten.
    """
    rollout, record = played(8), recording(tmp_path / "data")
    with pytest.raises(
        ConfigError, match=r"another process is writing .*data; name a directory of its own"
    ):
        recording(tmp_path / "data")
    record(7, [part(rollout, 0, 8)])
    record.close()
    assert len(Dataset.load(tmp_path / "data").returns) and not list(tmp_path.glob(".*"))
    left = tmp_path / ".next.new"
    left.mkdir()
    (left / "reward.npy").write_bytes(b"of a killed process")
    record = recording(tmp_path / "next")
    record(7, [part(rollout, 0, 8)])
    record.close()
    Dataset.load(tmp_path / "next")


def test_a_place_deletes_nothing_of_the_users(tmp_path):
    folder = tmp_path / ".data.new"
    for name in ("thesis.txt", "thesis/chapter.npy", "reward.npy/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        with pytest.raises(
            ConfigError,
            match=rf"\.data\.new/{name.split('/')[0]} does not belong to a data set; move it",
        ):
            writing.Place(tmp_path / "data")
        assert (folder / name).read_text() == "mine"
        shutil.rmtree(folder)
    folder.write_text("mine")
    with pytest.raises(ConfigError, match=r".*\.data\.new.*File"):
        writing.Place(tmp_path / "data")
    assert folder.read_text() == "mine"
    folder.unlink()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"the directory .*\.data\.new cannot be made"):
        writing.Place(tmp_path / "data")
    assert folder.is_symlink()
    folder.unlink()
    writing.Place(tmp_path / "data").close()
    assert not list(tmp_path.iterdir())


def test_a_part_with_too_long_a_name_is_named(tmp_path):
    obs = {"a" * 300: np.ones((4, 2), np.float32)}
    data = Dataset.from_arrays(obs, np.zeros(4, int), np.zeros(4), np.ones(4, bool))
    with pytest.raises(
        ConfigError, match=r"the part 'a+\.\.\. has a name of 300 letters, too many for a file"
    ):
        data.save(tmp_path / "data")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def disk(monkeypatch):
    """A disk whose ``room`` for further bytes is what a test sets;
    what a file has already may be written again.
    """

    class Disk(io.FileIO):
        room = 2**30

        def write(self, data):
            place = self.tell()
            fits = max(os.fstat(self.fileno()).st_size - place, 0) + Disk.room
            if not fits:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = super().write(bytes(data)[:fits])
            Disk.room -= max(place + written - max(place, place + fits - Disk.room), 0)
            return written

    monkeypatch.setattr(writing, "FileIO", Disk)
    return Disk


def test_a_disk_that_is_full_keeps_what_was_recorded(tmp_path, monkeypatch, disk):
    """Whatever has filled it: the index has its room from the start."""
    monkeypatch.setattr(recorder, "BLOCK", 4)
    rollout, record = played(60), recording(tmp_path / "data")
    record(7, [part(rollout, 0, 40)])
    while not record._writer.rows:
        time.sleep(0.01)
    kept, disk.room = record._writer.rows, 5
    record(7, [part(rollout, 40, 60)])
    with pytest.raises(OSError, match="No space left on device"):
        record.close()
    data = Dataset.load(tmp_path / "data")
    assert data.steps + len(data.returns) == kept and not list(tmp_path.glob(".*"))


def test_a_disk_that_is_full_from_the_start_is_named(tmp_path, disk):
    disk.room = 100
    with pytest.raises(OSError, match="No space left on device") as caught:
        recording(tmp_path / "data")
    assert caught.value.filename == str(tmp_path / "data") and not list(tmp_path.iterdir())


def test_what_does_not_belong_to_a_data_set_is_named(tmp_path, monkeypatch):
    rollout, record = played(8), recording(tmp_path / "data")
    record(7, [part(rollout, 0, 8)])
    record.close()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            files.describe(tmp_path / "data", {"random": 3.0})
    Dataset.load(tmp_path / "data")
    (tmp_path / "data" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"'notes.txt'.*dataset.json"):
        Dataset.load(tmp_path / "data")


def test_a_place_without_a_directory_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "data", tmp_path / "file" / "deeper" / "data"):
        with pytest.raises(
            ConfigError, match=rf"data cannot be written: {tmp_path}/file is not a directory"
        ):
            recording(path)
    for path in ("/proc/nowhere/deeper/data", "/proc/data"):  # root may write there, and cannot
        with pytest.raises(ConfigError, match=f"{path} cannot be written: "):
            recording(path)


@pytest.mark.parametrize("most", [recorder.MAX_STEPS, 4])
def test_episodes_are_those_that_were_played(tmp_path, monkeypatch, most):
    monkeypatch.setattr(recorder, "MAX_STEPS", most)
    monkeypatch.setattr(recorder, "BLOCK", 8)
    rollout, record = played(60), recording(tmp_path / "data")
    for start in range(0, 60, 4):
        record(7, [part(rollout, start, start + 4)])
    record.close()
    data, whole = Dataset.load(tmp_path / "data"), of_rollout(rollout, SPEC, {})
    order, others = np.argsort(data.obs[data.valid, 0]), np.argsort(whole.obs[whole.valid, 0])
    for name in ("obs", "action", "reward", "terminated", "log_prob"):
        x, y = getattr(data, name)[data.valid][order], getattr(whole, name)[whole.valid][others]
        np.testing.assert_array_equal(x, y)
    first = np.append(0, data.ends[:-1] + 2)
    # their last one
    np.testing.assert_array_equal(data.obs[data.ends + 1, 0], data.obs[first, 0] + 3 * data.lengths)
    if most > 60:
        assert sorted(data.lengths) == sorted(whole.lengths) and not list(tmp_path.glob(".*"))


def test_nothing_played_is_no_data_set_and_errors_keep_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "BLOCK", 8)
    recording(tmp_path / "none").close()
    assert not list(tmp_path.iterdir())
    record, rollout = recording(tmp_path / "data"), played(60)
    record(0, [rollout])
    record(0, [rollout._replace(action=rollout.action + 3)])  # cannot be learnt from
    with pytest.raises(Exception, match="does not have"):
        record.close()
    assert Dataset.load(tmp_path / "data").steps == record._writer.rows - record._episodes > 0


def test_rollouts_of_whole_episodes_end_with_them(tmp_path):
    record, rollout = recording(tmp_path / "data", episodic=True), played(12)
    for _ in range(2):
        record(0, [rollout])
    record.close()
    assert Dataset.load(tmp_path / "data").steps == 2 * rollout.valid.sum()


def kept(path):
    """Makes a directory of someone else's, and returns its content."""
    path.mkdir()
    (path / "theirs.txt").write_text("theirs")
    return lambda: (path / "theirs.txt").read_text() == "theirs" and len(list(path.iterdir())) == 1


def test_a_directory_that_takes_the_name_meanwhile_is_kept(tmp_path):
    record = recording(tmp_path / "data")
    same, next_one = kept(tmp_path / "data"), kept(tmp_path / "data-2")
    record(7, [played(8)])
    with pytest.warns(FileWarning, match="data appeared while its data set was written.*data-3"):
        record.close()
    assert record.place.path == tmp_path / "data-3" and Dataset.load(record.place.path).steps
    assert same() and next_one() and not list(tmp_path.glob(".*"))


def test_saving_keeps_what_has_the_name_meanwhile(tmp_path):
    data = of_rollout(played(8), SPEC, {})
    with contextlib.closing(writing.Place(tmp_path / "data")) as place:
        same = kept(tmp_path / "data")
        with pytest.warns(FileWarning, match="appeared"):
            path = data.save(place)
    assert path == tmp_path / "data-2" and Dataset.load(path).steps == data.steps and same()


def test_a_claimed_place_is_refused_to_others_and_left_empty(tmp_path):
    with (
        contextlib.closing(writing.Place(tmp_path / "data")),
        pytest.raises(ConfigError, match="another process"),
    ):
        of_rollout(played(8), SPEC, {}).save(tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_a_name_of_minari_is_not_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"minari:x-v0.*jaxrl-dist.*DIR.*minari:x-v0"):
        of_rollout(played(8), SPEC, {}).save("minari:x-v0")
    with pytest.raises(ConfigError, match=r"minari:a/x-v0.*DIR"):
        Dataset.load("minari:a/x-v0")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_says_how_to_go_on(tmp_path, disk):
    record = recording(tmp_path / "data")
    disk.room = 0
    record(7, [played(8)])
    with pytest.raises(OSError, match="No space left") as caught:
        record.close()
    assert any("--record None" in note for note in caught.value.__notes__)
