"""Data sets: what they hold, and what their files may hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import runs  # noqa: F401  which sets up the devices

from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete


def episodes():
    """Two episodes of 3 and 2 steps; the second one is cut by a time limit."""
    rng = np.random.default_rng(0)
    return [
        {
            "obs": rng.normal(size=(length + 1, 4)).astype(np.float32),
            "action": rng.integers(0, 2, length),
            "reward": np.arange(1.0, length + 1),
            "terminated": terminated,
            "log_prob": np.full(length, -0.7),
        }
        for length, terminated in ((3, True), (2, False))
    ]


def test_episodes_lie_one_after_the_other_with_their_last_observations():
    data = Dataset.from_episodes(episodes())
    assert data.valid.tolist() == [True, True, True, False, True, True, False]
    assert data.terminated.tolist() == [False, False, True, False, False, False, False]
    assert data.truncated.tolist() == [False, False, False, False, False, True, False]
    assert data.returns.tolist() == [6, 3] and data.lengths.tolist() == [3, 2] and data.steps == 5
    np.testing.assert_array_equal(data.obs, np.concatenate([episode["obs"] for episode in episodes()]))
    assert isinstance(data.action_space, Discrete) and isinstance(data.observation_space, Box)


def test_flat_arrays_as_d4rl_has_them_lose_the_last_step_of_a_time_out():
    obs = np.arange(6, dtype=np.float32)[:, None]
    terminals, timeouts = np.zeros((2, 6), bool)
    terminals[1], timeouts[4] = True, True
    data = Dataset.from_arrays(obs, np.zeros((6, 1), np.float32), np.ones(6), terminals, timeouts)
    assert data.obs[:, 0].tolist() == [0, 1, 1, 2, 3, 4] and data.valid.tolist() == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert data.terminated.tolist() == [False, True, *[False] * 4] and np.flatnonzero(data.truncated).tolist() == [4]
    with_next = Dataset.from_arrays(
        obs, np.zeros((6, 1), np.float32), np.ones(6), terminals, timeouts, next_obs=obs + 10
    )
    assert with_next.obs[:, 0].tolist() == [0, 1, 11, 2, 3, 4, 14, 5, 15]


def test_a_data_set_survives_its_files_and_joins_and_sorts(tmp_path):
    data = Dataset.from_episodes(episodes(), about={"env": "CartPole-v1"})
    data.save(tmp_path / "a")
    again = Dataset.load(tmp_path / "a")
    for name in ("obs", "action", "reward", "terminated", "truncated", "valid", "log_prob"):
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
    assert again.about == {"env": "CartPole-v1"} and again.action_space == data.action_space
    joined = Dataset.joined([again, data])
    assert joined.returns.tolist() == [6, 3, 6, 3] and joined.about["env"] == "CartPole-v1"
    assert joined.best(0.5).returns.tolist() == [6, 6] and joined.best(0.01).returns.tolist() == [6]
    with pytest.raises(ConfigError, match="exists"):
        data.save(tmp_path / "a")


def _truncated(path):
    (path / "obs.npy").write_bytes((path / "obs.npy").read_bytes()[:-8])


def _other_index(**changes):
    def change(path):
        content = json.loads((path / "dataset.json").read_text())
        (path / "dataset.json").write_text(json.dumps(content | changes))

    return change


def _link(path):
    (path / "reward.npy").rename(path.parent / "elsewhere.npy")
    (path / "reward.npy").symlink_to(path.parent / "elsewhere.npy")


MUTATIONS = {
    "a truncated array": _truncated,
    "no index": lambda path: (path / "dataset.json").unlink(),
    "an empty index": lambda path: (path / "dataset.json").write_text(""),
    "a deep index": lambda path: (path / "dataset.json").write_text("[" * 100_000),
    "no array": lambda path: (path / "action.npy").unlink(),
    "one more file": lambda path: (path / "more.npy").write_bytes(b"x"),
    "a link": _link,
    "another format": _other_index(format=99),
    "no spaces": _other_index(spaces={}),
    "spaces of nothing": _other_index(spaces={"obs": [], "action": None}),
    "huge spaces": _other_index(spaces={"obs": {"shape": [2**60], "dtype": "float32"}, "action": {"n": 2}}),
    "objects": _other_index(spaces={"obs": {"shape": [4], "dtype": "object"}, "action": {"n": 2}}),
    "other spaces": _other_index(spaces={"obs": {"n": 3}, "action": {"n": 2}}),
    "fewer actions": lambda path: _edit(path, "spaces", "action", {"n": 1}),
    "text for files": _other_index(files="x"),
    "no dict about it": _other_index(about=[1]),
}


def _edit(path, part, name, value):
    content = json.loads((path / "dataset.json").read_text())
    content[part][name] = value
    (path / "dataset.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_and_hostile_files_are_refused_in_one_line(tmp_path, name):
    Dataset.from_episodes(episodes()).save(tmp_path / "data")
    MUTATIONS[name](tmp_path / "data")
    with pytest.raises(ConfigError) as raised:
        Dataset.load(tmp_path / "data")
    assert "\n" not in str(raised.value) and "data" in str(raised.value)


def test_what_no_algorithm_can_learn_from_is_refused():
    whole = episodes()
    whole[0]["reward"][1] = np.nan
    with pytest.raises(ConfigError, match="reward has a NaN"):
        Dataset.from_episodes(whole)
    with pytest.raises(ConfigError, match="one more observation"):
        Dataset.from_episodes([{**episodes()[0], "action": np.zeros(2, int)}])
    with pytest.raises(ConfigError, match="actions"):
        Dataset.joined([Dataset.from_episodes(episodes()), Dataset.from_episodes(episodes(), action_space=Discrete(5))])
