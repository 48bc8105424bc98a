"""Data sets: what they hold, and what their files may hold."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
import runs  # noqa: F401  which sets up the devices

from jaxrl_dist.data import columns
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


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_returns_to_go_are_sums_over_the_rest_of_an_episode(discount):
    """Its mean reward goes on after a time limit, if a discount makes that a number."""
    data = Dataset.from_episodes(episodes())
    found = columns.returns_to_go(data.reward, data.ends, data.terminated, discount)
    rest = 1.5 / (1 - discount) if discount < 1 else -np.inf
    expected = [sum(discount**k * r for k, r in enumerate(rewards)) for rewards in ([1, 2, 3], [2, 3], [3])]
    last = 2 + discount * rest
    np.testing.assert_allclose(found[data.valid], [*expected, 1 + discount * last, last], rtol=1e-6)


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


def _index(**changes):
    """Changes the index; ``spaces={...}`` and the like replace whole entries, ``spaces__obs=...`` one below."""

    def change(path):
        content = json.loads((path / "dataset.json").read_text())
        for name, value in changes.items():
            *outer, last = name.split("__")
            functools.reduce(dict.__getitem__, outer, content)[last] = value
        (path / "dataset.json").write_text(json.dumps(content))

    return change


def _text(old, new):
    def change(path):
        (path / "dataset.json").write_text((path / "dataset.json").read_text().replace(old, new))

    return change


def _file(name, content, more=lambda path: None):
    """Writes another file, of which the index has the right checksum."""

    def change(path):
        (path / name).write_bytes(content)
        more(path)
        files = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in path.glob("*.npy")}
        _index(files=files)(path)

    return change


def _npy(x, **header):
    """Returns an ``.npy`` file whose header says something else."""
    stream = io.BytesIO()
    known = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": x.shape}
    np.lib.format.write_array_header_1_0(stream, known | header)
    return stream.getvalue() + x.tobytes()


def _pickled():
    stream = io.BytesIO()
    np.save(stream, np.array([_Hostile()] * 7, object), allow_pickle=True)
    return stream.getvalue()


def _zipped():
    np.savez(stream := io.BytesIO(), reward=REWARD)
    return stream.getvalue()


class _Hostile:
    def __reduce__(self):
        return (open, ("ran", "w"))


def _link(path):
    (path / "reward.npy").rename(path.parent / "elsewhere.npy")
    (path / "reward.npy").symlink_to(path.parent / "elsewhere.npy")


def _linked_index(path):
    (path / "dataset.json").rename(path.parent / "elsewhere.json")
    (path / "dataset.json").symlink_to(path.parent / "elsewhere.json")


def _hole(path):
    (path / "more.npy").touch()
    os.truncate(path / "more.npy", 2**43)
    _index(**{"files__more.npy": "0" * 64})(path)


REWARD, OBS, FLAG = np.arange(7, dtype=np.float32), np.ones((7, 4), np.float32), np.zeros(7, bool)
BOX, HEADER = {"shape": [4], "dtype": "float32", "low": 0, "high": 1}, _npy(REWARD)[:128]
MUTATIONS = {
    "a truncated array": lambda path: (path / "obs.npy").write_bytes((path / "obs.npy").read_bytes()[:-8]),
    "a hole of 8 TB": lambda path: os.truncate(path / "obs.npy", 2**43),
    "a hole of 8 TB that the index names": _hole,
    "no index": lambda path: (path / "dataset.json").unlink(),
    "an empty index": lambda path: (path / "dataset.json").write_text(""),
    "a deep index": lambda path: (path / "dataset.json").write_text("[" * 100_000),
    "a linked index": _linked_index,
    "no array": lambda path: (path / "action.npy").unlink(),
    "one more file": lambda path: (path / "more.npy").write_bytes(b"x"),
    "a link": _link,
    "another format": _index(format=99),
    "a format of many lines": _index(format="\n" * 1000),
    "no spaces": _index(spaces={}),
    "spaces of nothing": _index(spaces={"obs": [], "action": None}),
    "no parts": _index(spaces__obs={"parts": {}}),
    "a part above": _index(spaces__obs={"parts": {"../../x": BOX}}),
    "an absolute part": _index(spaces__obs={"parts": {"/etc/passwd": BOX}}),
    "a part of two lines": _index(spaces__obs={"parts": {"a\nb": BOX}}),
    "a part with a null": _index(spaces__obs={"parts": {"a\0b": BOX}}),
    "two parts of one path": _index(spaces__obs={"parts": {"a/b": BOX, "a": {"parts": {"b": BOX}}}}),
    "a deep space": _text('"spaces": {', '"spaces": {"obs": ' + '{"parts": {"a": ' * 40_000 + "}" * 80_000 + ","),
    "the same space twice": _text('"spaces": {', '"spaces": {}, "spaces": {"more": {}, "obs": {"n": 3}, "x": {'),
    "huge spaces": _index(spaces__obs=BOX | {"shape": [2**60]}),
    "large spaces": _index(spaces__obs=BOX | {"shape": [2**20, 2**10]}),
    "many actions": _index(spaces__action={"n": 2**40}),
    "a huge integer": _text('"n": 2', '"n": 1' + "0" * 9999),
    "no components": _index(spaces__action={"nvec": []}),
    "bounds of nothing": _index(spaces__obs=BOX | {"low": "nan"}),
    "objects": _index(spaces__obs=BOX | {"dtype": "object"}),
    "a dtype of many": _index(spaces__obs=BOX | {"dtype": "(1000000,1000000)f4"}),
    "other spaces": _index(spaces__obs={"n": 3}),
    "fewer actions": _index(spaces__action={"n": 1}),
    "text for files": _index(files="x"),
    "files above": _index(files__x={"../../x": "0" * 64}),
    "no dict about it": _index(about=[1]),
    "a text for a return": _index(about={"random": "x"}),
    "an infinite return": _text('"about": {', '"about": {"expert": 1e999, '),
    "a list for a behaviour": _index(about={"behaviour": ["x"]}),
    "pickled objects": _file("reward.npy", _pickled()),
    "a pickle": _file("reward.npy", pickle.dumps(_Hostile())),
    "an archive": _file("reward.npy", _zipped()),
    "an announced shape": _file("reward.npy", _npy(REWARD, shape=(2**40,))),
    "a shape that overflows": _file("obs.npy", _npy(OBS, shape=(2**32, 2**32))),
    "a negative shape": _file("reward.npy", _npy(REWARD, shape=(-7,))),
    "no shape": _file("reward.npy", _npy(REWARD, shape=())),
    "a long header": _file("reward.npy", b"\x93NUMPY\1\0\xff\xff" + b"(" * 65535),
    "the order of Fortran": _file("obs.npy", _npy(OBS, fortran_order=True)),
    "another dtype": _file("reward.npy", _npy(REWARD.astype(np.float64))),
    "another byte order": _file("reward.npy", _npy(REWARD.astype(">f4"))),
    "only a header": _file("reward.npy", HEADER),
    "more than the header says": _file("reward.npy", HEADER + bytes(2**20)),
    "NaN rewards": _file("reward.npy", _npy(REWARD + np.nan)),
    "infinite observations": _file("obs.npy", _npy(OBS + np.inf)),
    "other lengths": _file("reward.npy", _npy(REWARD[:6])),
    "an end in the middle of nowhere": _file("terminated.npy", _npy(~FLAG)),
    "flags of other bytes": _file("valid.npy", _npy(FLAG.view(np.uint8) + 7, descr="|b1")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_and_hostile_files_are_refused_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Dataset.from_episodes(episodes()).save(tmp_path / "data")
    MUTATIONS[name](tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    tracemalloc.start()
    with pytest.raises(ConfigError) as raised:
        Dataset.load(tmp_path / "data")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(raised.value) and "data" in str(raised.value)
    assert peak < 2**22 and sorted(tmp_path.rglob("*")) == before


def test_names_of_parts_lead_nowhere(tmp_path):
    obs = {"../../x": OBS, "/y": OBS, "%2F": OBS}
    Dataset.from_arrays(obs, FLAG.astype(int), REWARD, ~FLAG).save(tmp_path / "in" / "data")
    assert [x.name for x in tmp_path.iterdir()] == ["in"] and [x.name for x in (tmp_path / "in").iterdir()] == ["data"]
    (tmp_path / "link").symlink_to("in/data")
    assert Dataset.load(tmp_path / "link").obs.keys() == obs.keys()
    _index(format=2)(tmp_path / "link")
    with pytest.raises(ConfigError, match="has format 2, and this version reads 1"):
        Dataset.load(tmp_path / "link")


def test_what_no_algorithm_can_learn_from_is_refused():
    whole = episodes()
    whole[0]["reward"][1] = np.nan
    with pytest.raises(ConfigError, match="reward has a NaN"):
        Dataset.from_episodes(whole)
    with pytest.raises(ConfigError, match="one more observation"):
        Dataset.from_episodes([{**episodes()[0], "action": np.zeros(2, int)}])
    with pytest.raises(ConfigError, match="actions"):
        Dataset.joined([Dataset.from_episodes(episodes()), Dataset.from_episodes(episodes(), action_space=Discrete(5))])


def test_joined_bounds_are_those_of_all_parts():
    def of(size):
        actions = np.linspace(-size, size, 6, dtype=np.float32)[:, None]
        return Dataset.from_arrays({"x": actions * 2}, actions, np.ones(6), np.arange(6) == 5)

    for parts in ([of(0.1), of(0.9)], [of(0.9), of(0.1)]):
        data = Dataset.joined(parts)
        np.testing.assert_array_equal([data.action_space.low, data.action_space.high], np.float32([[-0.9], [0.9]]))
        np.testing.assert_array_equal(data.observation_space["x"].high, np.float32([1.8]))


def test_shares_are_exact():
    data = Dataset.from_arrays(np.ones((100, 1)), np.zeros(100, int), np.arange(100), np.ones(100, bool))
    taken = {share: len(data.best(share).ends) for share in (0.07, 0.14, 0.55, 0.071)}
    assert taken == {0.07: 7, 0.14: 14, 0.55: 55, 0.071: 8}


def test_probabilities_of_flat_arrays_follow_their_steps():
    obs, ends, known = np.arange(6.0)[:, None], np.array([0, 1, 0, 0, 0, 1], bool), -np.arange(6.0)
    arrays = obs, np.zeros(6, int), np.ones(6), ends
    for data in (
        Dataset.from_arrays(*arrays, log_prob=known),
        Dataset.from_arrays(*arrays, next_obs=obs, log_prob=known),
    ):
        assert data.log_prob[data.valid].tolist() == known.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_integer_actions_are_categories(dtype):
    data = Dataset.from_arrays(np.ones((4, 1)), np.array([0, 2, 1, 0], dtype), np.ones(4), np.ones(4, bool))
    assert data.action_space == Discrete(3) and data.action.dtype == np.int32


FLAT = {"obs": np.ones((4, 1)), "action": np.zeros(4, int), "reward": np.ones(4), "terminals": np.arange(4) == 3}
WRONG = {
    "a time-out for all": ({"timeouts": [True]}, "one length"),
    "fewer time-outs": ({"timeouts": [True, False, False]}, "one length"),
    "no step with a successor": ({"terminals": np.zeros(4, bool), "timeouts": np.ones(4, bool)}, "has a successor"),
    "fewer probabilities": ({"log_prob": np.zeros(3)}, "one length"),
    "successors of another width": ({"next_obs": np.ones((4, 2))}, "next_obs has other shapes"),
    "successors of other parts": ({"next_obs": {"x": np.ones((4, 1))}}, "next_obs has other shapes"),
    "text": ({"obs": np.array([["a"], ["b"], ["c"], ["d"]])}, "arrays of numbers"),
    "ragged lists": ({"obs": [[1], [1, 2], [1], [1]]}, "arrays of numbers"),
    "a number": ({"action": 1}, "arrays of numbers"),
    "fractions of categories": (
        {"action": [0.2, 1.7, 0.9, 0.0], "action_space": Discrete(2)},
        "cannot hold, such as 0.2",
    ),
    "a category beyond 32 bits": (
        {"action": [0, 0, 2**32 + 1, 0], "action_space": Discrete(2)},
        "cannot hold, such as 4",
    ),
    "a pixel beyond 255": (
        {
            "obs": [[300], [0], [0], [0]],
            "observation_space": Box((1,), np.dtype(np.uint8), np.array([0]), np.array([255])),
        },
        "cannot hold, such as 300",
    ),
    "time stamps": ({"obs": np.array([[1], [2**21], [0], [0]])}, "integers up to 2097152"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_would_be_misread_are_refused(name):
    changes, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        Dataset.from_arrays(**{**FLAT, **changes})


def test_lists_are_arrays():
    lists = {name: np.asarray(x).tolist() for name, x in FLAT.items()}
    for one, other in zip(
        Dataset.from_arrays(**lists).rollout()[:6], Dataset.from_arrays(**FLAT).rollout()[:6], strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "changes", [{"obs": np.ones((3, 5))}, {"terminated": np.zeros(2, bool)}, {"log_prob": np.zeros(1)}]
)
def test_episodes_unlike_the_others_are_refused(changes):
    first, second = episodes()
    with pytest.raises(ConfigError, match="episode 1 has"):
        Dataset.from_episodes([first, {**second, **changes}])
