"""Data sets of Minari, made here."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib

import jax
import numpy as np
import pytest
import runs  # noqa: F401  which sets up the devices

from jaxrl_dist import cli
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import MultiDiscrete

pytestmark = pytest.mark.quick

minari = pytest.importorskip("minari", reason="needs jaxrl-dist[minari]")
h5py = pytest.importorskip("h5py")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def episodes(action=lambda rng, size: rng.integers(0, 2, size)):
    rng = np.random.default_rng(0)

    def obs(size):
        a = rng.normal(size=(size, 3)).astype(np.float32)
        return {"a": a, "b": rng.integers(0, 5, size)}

    return [
        {
            "obs": obs(n + 1),
            "action": action(rng, n),
            "reward": rng.random(n),
            "terminated": n > 3,
            "log_prob": -rng.random(n),
        }
        for n in (3, 1, 5)
    ]


@pytest.mark.parametrize(
    "action", [lambda rng, n: rng.integers(0, 2, n), lambda rng, n: rng.normal(size=(n, 2))]
)
def test_a_data_set_comes_back_from_minari(action):
    data = Dataset.from_episodes(
        episodes(action), about={"env": "X-v0", "random": 1.0, "behaviour": {"run": "x"}}
    )
    assert data.to_minari("ab/c-v0").total_steps == 9
    again = Dataset.from_minari("ab/c-v0")
    for x, y in zip(jax.tree.leaves(data.columns), jax.tree.leaves(again.columns), strict=True):
        np.testing.assert_array_equal(x, y)
    assert again.about == data.about and repr(again.kinds) == repr(data.kinds)
    with pytest.raises(ConfigError, match=r"minari/ab/c-v0 exists; choose another name"):
        data.to_minari("ab/c-v0")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_spaces_of_gymnasium_become_ours():
    from gymnasium import spaces

    buffer = minari.data_collector.EpisodeBuffer(
        observations=(np.array([5, 6, 7]), np.eye(3, dtype=np.float64)),
        actions=np.array([[1, 0], [0, 1]], np.int8),
        rewards=np.array([1.0, 2.0]),
        terminations=np.array([False, True]),
        truncations=np.array([False, False]),
    )
    observation = spaces.Tuple([spaces.Discrete(4, start=5), spaces.Box(-1, 1, (3,), np.float64)])
    made = minari.create_dataset_from_buffers(
        "x-v1",
        [buffer],
        action_space=spaces.MultiBinary(2),
        observation_space=observation,
        algorithm_name="y",
    )
    data = Dataset.from_minari(made)
    assert data.obs["0"].tolist() == [0, 1, 2] and data.obs["1"].dtype == np.float32
    assert (
        data.action_space == MultiDiscrete((2, 2))
        and data.action[0].tolist() == [1, 0]
        and data.returns == 3
    )
    assert data.about == {"behaviour": {"minari": "x-v1", "algorithm": "y"}}


def test_no_code_that_metadata_name_is_run(tmp_path, monkeypatch):
    Dataset.from_episodes(episodes()).to_minari("x-v0")
    path = pathlib.Path(tmp_path, "minari", "x-v0", "data", "metadata.json")
    (tmp_path / "hostile.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = {
        "id": "Hostile-v0",
        "entry_point": "hostile:make",
        "additional_wrappers": [],
        "vector_entry_point": None,
    }
    content = json.loads(path.read_text()) | {"env_spec": json.dumps(spec)}
    path.write_text(json.dumps(content))
    assert Dataset.from_minari("x-v0").steps == 9
    del content["observation_space"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match="by code that makes an environment, and such code is not run"
    ):
        Dataset.from_minari("x-v0")
    with pytest.raises(ConfigError, match=r"Minari.*y-v0.*minari.*y-v0"):
        Dataset.from_minari("y-v0")


def test_the_command_converts_both_ways(tmp_path, capsys):
    Dataset.from_episodes(episodes()).save(tmp_path / "data")
    assert cli.main(["data", str(tmp_path / "data"), "-o", "minari:z-v0"]) == 0
    assert cli.main(["data", "minari:z-v0", "-o", str(tmp_path / "again")]) == 0
    assert "9 steps in 3 episodes" in capsys.readouterr().out
    assert (tmp_path / "again" / "obs.a.npy").read_bytes() == (
        tmp_path / "data" / "obs.a.npy"
    ).read_bytes()


@pytest.mark.parametrize("name", ["../x-v0", "/x-v0", "cart", "", "x/../../y-v0"])
def test_names_that_lead_elsewhere_are_refused_first(tmp_path, name):
    data = Dataset.from_episodes(episodes())
    for use in (data.to_minari, Dataset.from_minari):
        with pytest.raises(ConfigError, match=f"^minari:{name}.*Minari"):
            use(name)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    """HDF5 ends the process where it meets a full disk."""
    asked = []

    def full(number, start, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        Dataset.from_episodes(episodes()).to_minari("ab/x-v0")
    assert caught.value.filename == str(tmp_path / "minari" / "ab" / "x-v0")
    monkeypatch.undo()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    Dataset.from_episodes(episodes()).to_minari("ab/x-v0")
    files = [path for path in (tmp_path / "minari").rglob("*") if path.is_file()]
    assert asked[0] > sum(path.stat().st_size for path in files)


def replaced(file, **options):
    """Makes the rewards of the first episode another array of the HDF5 file."""
    del file["episode_0/rewards"]
    file.create_dataset("episode_0/rewards", (3,), "f8", **options)


HOSTILE = {
    "external": lambda file, secret: replaced(file, external=[(str(secret), 0, 24)]),
    "external link": lambda file, secret: file.__setitem__(
        "episode_0/infos/x", h5py.ExternalLink(str(secret), "/x")
    ),
    "soft link": lambda file, secret: file.__setitem__(
        "episode_0/infos/x", h5py.SoftLink("/episode_1/actions")
    ),
    "hard link": lambda file, secret: file.__setitem__("episode_3", file["episode_0"]),
    "cycle": lambda file, secret: file.__setitem__("episode_0/infos/x", file["episode_0"]),
    "virtual": lambda file, secret: file.create_virtual_dataset(
        "episode_0/infos/x", layout(secret)
    ),
}


def layout(secret):
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (3,))
    return layout


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_data_set_of_minari_reads_no_other_file(tmp_path, capsys, change):
    secret = tmp_path / "secret"
    secret.write_bytes(b"private!" * 3)
    data = Dataset.from_episodes(episodes()).to_minari("x-v0")
    with h5py.File(tmp_path / "minari" / "x-v0" / "data" / "main_data.hdf5", "a") as file:
        change(file, secret)
    assert cli.main(["data", "minari:x-v0", "-o", str(tmp_path / "out")]) == 2
    assert (
        "main_data.hdf5: episode_" in (error := capsys.readouterr().err) and error.count("\n") == 1
    )
    with pytest.raises(ConfigError, match="is a link, or lies in another file"):
        Dataset.from_minari(data)
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_data_set_of_minari_is_refused(tmp_path):
    Dataset.from_episodes(episodes()).to_minari("x-v0")
    folder = tmp_path / "minari" / "x-v0" / "data"
    (folder / "main_data.hdf5").rename(tmp_path / "elsewhere")
    (folder / "main_data.hdf5").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"main_data.hdf5 is damaged: it is not a plain file"):
        Dataset.from_minari("x-v0")
    (folder / "main_data.hdf5").unlink()
    (tmp_path / "elsewhere").rename(folder / "main_data.hdf5")
    (tmp_path / "minari").rename(tmp_path / "disk")
    (tmp_path / "minari").symlink_to(tmp_path / "disk")  # which the user names
    assert Dataset.from_minari("x-v0").steps == 9


def test_arrays_that_a_file_of_minari_cannot_hold_are_not_read(tmp_path, monkeypatch):
    """Packed values pass, the tightest as well."""
    same = [
        {"obs": np.zeros((10**5 + 1, 4)), "action": np.zeros(10**5, int), "reward": np.zeros(10**5)}
    ]
    Dataset.from_episodes([{**same[0], "terminated": True}]).to_minari("x-v0")
    path = tmp_path / "minari" / "x-v0" / "data" / "main_data.hdf5"
    with h5py.File(path) as old, h5py.File(tmp_path / "packed", "w") as new:
        new.create_group("episode_0").attrs.update(old["episode_0"].attrs)
        for name, values in old["episode_0"].items():
            size = {"chunks": (10**5 + (name == "observations"), *values.shape[1:])}
            new["episode_0"].create_dataset(
                name, data=values[:], compression="gzip", compression_opts=9, **size
            )
    (tmp_path / "packed").replace(path)
    assert path.stat().st_size < 20_000 and Dataset.from_minari("x-v0").steps == 10**5
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_dist.run.machine.memory_size", lambda: 10**6)
        with pytest.raises(
            ConfigError, match=r"announces [\d,]+ bytes, more than its [\d,]+ bytes or the memory"
        ):
            Dataset.from_minari("x-v0")
    for shape in [(10**8, 4), (2**40, 2**40)]:
        with h5py.File(path, "a") as file:
            del file["episode_0/observations"]
            file.create_dataset("episode_0/observations", shape, "f8", chunks=(1000, 4))
        with pytest.raises(ConfigError, match=f"announces {8 * math.prod(shape) + 10**6:,} bytes"):
            Dataset.from_minari("x-v0")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.EIO, "bad disk"), OSError("HDF5 says no")]
)
def test_an_unfinished_data_set_does_not_block_its_name(monkeypatch, error):
    def update(self, metadata):
        raise error

    data = Dataset.from_episodes(episodes())
    with monkeypatch.context() as patch:
        patch.setattr(minari.dataset.minari_storage.MinariStorage, "update_metadata", update)
        with pytest.raises((KeyboardInterrupt, OSError, ConfigError)):
            data.to_minari("x-v0")
    Dataset.from_episodes(episodes()).to_minari("x-v0")
    assert Dataset.from_minari("x-v0").steps == 9


def made_elsewhere(name, observation_space, action_space=None, **changes):
    """Makes a data set of one episode of three steps by Minari alone."""
    from gymnasium import spaces

    ends = np.array([False, False, True])
    columns = {
        "observations": np.zeros((4, 2), np.float32),
        "actions": np.zeros(3, int),
        "rewards": np.ones(3),
    }
    columns |= {"terminations": ends, "truncations": np.zeros(3, bool)} | changes
    buffer = minari.data_collector.EpisodeBuffer(**columns)
    return minari.create_dataset_from_buffers(
        name,
        [buffer],
        observation_space=observation_space,
        action_space=action_space or spaces.Discrete(2),
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("flag", ["terminations", "truncations"])
def test_an_end_inside_an_episode_is_refused(flag):
    from gymnasium import spaces

    data = made_elsewhere(
        f"ab/{flag}-v0", spaces.Box(-1, 1, (2,)), **{flag: np.array([False, True, True])}
    )
    with pytest.raises(ConfigError, match=r"0.*minari:ab/.*"):
        Dataset.from_minari(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_infos_of_others_are_not_probabilities():
    from gymnasium import spaces

    infos = {"log_prob": np.float32([0, -1, -2, -3])}  # Gymnasium's: that of the reset comes first
    assert (
        Dataset.from_minari(
            made_elsewhere("ab/infos-v0", spaces.Box(-1, 1, (2,)), infos=infos)
        ).log_prob
        is None
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_text_part_is_refused_with_a_way_out():
    from gymnasium import spaces

    space = spaces.Dict(image=spaces.Box(-1, 1, (2,)), mission=spaces.Text(9))
    observations = {"image": np.zeros((4, 2), np.float32), "mission": ["go"] * 4}
    data = made_elsewhere("ab/mission-v0", space, observations=observations)
    with pytest.raises(
        ConfigError, match=r"observations mission of the kind Text.*create_dataset_from_buffers"
    ):
        Dataset.from_minari(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("both_sides", [False, True])
def test_what_belongs_to_spaces_comes_back_from_minari(both_sides):
    from gymnasium import spaces

    space = spaces.Dict(
        action_mask=spaces.Box(0, 1, (3,), np.int8),
        at=spaces.Tuple([spaces.Discrete(4, start=-1), spaces.Box(-1, 1)]),
    )
    place = np.array([-1, 2, 1, 0]), np.zeros((4, 1), np.float32)
    obs = {"action_mask": np.ones((4, 3), np.int8), "at": place}
    episode = {"obs": obs, "action": np.array([5, 7, 6]), "reward": np.ones(3), "terminated": True}
    action = spaces.Discrete(3, start=5)
    data = Dataset.from_episodes(
        [episode], observation_space=space, action_space=action, both_sides=both_sides
    )
    theirs = data.to_minari(f"ab/whole{both_sides}-v0")
    assert theirs.action_space == action and theirs.observation_space["at"] == space["at"]
    (back,) = theirs.iterate_episodes()
    np.testing.assert_array_equal(back.actions, episode["action"])
    np.testing.assert_array_equal(back.observations["at"][0], place[0])
    again = Dataset.from_minari(theirs).interface
    assert (again.mask, again.both_sides, again.tuples) == (
        "action_mask",
        both_sides,
        ("observation/at",),
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_vector_of_bits_comes_back_from_minari():
    from gymnasium import spaces

    action = np.array([[0, 1], [1, 1], [0, 0]], np.int8)
    data = made_elsewhere(
        "ab/bits-v0", spaces.Box(-1, 1, (2,)), actions=action, action_space=spaces.MultiBinary(2)
    )
    back = Dataset.from_minari(data).to_minari("ab/bitsback-v0")
    assert back.action_space == spaces.MultiBinary(2)
    np.testing.assert_array_equal(next(back.iterate_episodes()).actions, action)
