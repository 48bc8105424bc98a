"""Data sets: what they hold, and what their files may hold."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import tracemalloc
import warnings

import gymnasium
import numpy as np
import pytest
import runs  # noqa: F401  which sets up the devices

from jaxrl_dist import spaces
from jaxrl_dist.data import columns
from jaxrl_dist.data.dataset import Dataset, check_spaces
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.spaces import Box, Discrete

pytestmark = pytest.mark.quick


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


def test_episodes_lie_in_order_with_their_last_observations():
    data = Dataset.from_episodes(episodes())
    assert data.valid.tolist() == [True, True, True, False, True, True, False]
    assert data.terminated.tolist() == [False, False, True, False, False, False, False]
    assert data.truncated.tolist() == [False, False, False, False, False, True, False]
    assert data.returns.tolist() == [6, 3] and data.lengths.tolist() == [3, 2] and data.steps == 5
    np.testing.assert_array_equal(
        data.obs, np.concatenate([episode["obs"] for episode in episodes()])
    )
    assert isinstance(data.action_space, Discrete) and isinstance(data.observation_space, Box)


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_returns_to_go_are_sums_over_the_rest_of_an_episode(discount):
    """Its mean reward goes on after a time limit, if a discount makes that a number."""
    data = Dataset.from_episodes(episodes())
    found = columns.returns_to_go(data.reward, data.ends, data.terminated, discount)
    rest = 1.5 / (1 - discount) if discount < 1 else -np.inf
    expected = [
        sum(discount**k * r for k, r in enumerate(rewards)) for rewards in ([1, 2, 3], [2, 3], [3])
    ]
    last = 2 + discount * rest
    np.testing.assert_allclose(found[data.valid], [*expected, 1 + discount * last, last], rtol=1e-6)


def test_flat_arrays_of_d4rl_lose_the_last_step_of_a_time_out():
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
    assert data.terminated.tolist() == [False, True, *[False] * 4] and np.flatnonzero(
        data.truncated
    ).tolist() == [4]
    with_next = Dataset.from_arrays(
        obs,
        np.zeros((6, 1), np.float32),
        np.ones(6),
        terminals,
        timeouts,
        next_obs=obs + np.eye(6)[:, 1:2] * 10 + 1,
    )
    assert with_next.obs[:, 0].tolist() == [0, 1, 12, 2, 3, 4, 5, 5, 6]


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
    """Changes the index; ``interface={...}`` and the like replace whole entries,
    ``interface__mask=...`` one below.
    """

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
    known = {
        "descr": np.lib.format.dtype_to_descr(x.dtype),
        "fortran_order": False,
        "shape": x.shape,
    }
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
INTERFACE = '"interface": {'
VECTOR = {"nvec": [2, 3], "start": [], "axes": [], "binary": False}
BOX, HEADER = {"shape": [4], "dtype": "float32", "low": 0, "high": 1}, _npy(REWARD)[:128]
MUTATIONS = {
    "a truncated array": lambda path: (path / "obs.npy").write_bytes(
        (path / "obs.npy").read_bytes()[:-8]
    ),
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
    "no spaces": _index(interface={}),
    "spaces of nothing": _index(interface={"observation": [], "action": None}),
    "no parts": _index(interface__observation={"parts": {}}),
    "a part above": _index(interface__observation={"parts": {"../../x": BOX}}),
    "an absolute part": _index(interface__observation={"parts": {"/etc/passwd": BOX}}),
    "a part of two lines": _index(interface__observation={"parts": {"a\nb": BOX}}),
    "a part with a null": _index(interface__observation={"parts": {"a\0b": BOX}}),
    "two parts of one path": _index(
        interface__observation={"parts": {"a/b": BOX, "a": {"parts": {"b": BOX}}}}
    ),
    "a deep space": _text(
        '"interface": {',
        '"interface": {"observation": ' + '{"parts": {"a": ' * 40_000 + "}" * 80_000 + ",",
    ),
    "the same space twice": _text(
        '"interface": {',
        '"interface": {}, "interface": {"more": {}, "observation": {"n": 3}, "x": {',
    ),
    "huge spaces": _index(interface__observation=BOX | {"shape": [2**60]}),
    "large spaces": _index(interface__observation=BOX | {"shape": [2**20, 2**10]}),
    "many actions": _index(interface__action={"n": 2**40}),
    "a huge integer": _text('"n": 2', '"n": 1' + "0" * 9999),
    "no components": _index(interface__action=VECTOR | {"nvec": []}),
    "no start": _index(interface__action={"n": 2}),
    "a huge start": _index(interface__action={"n": 2, "start": 2**40}),
    "a start of text": _index(interface__action={"n": 2, "start": "1"}),
    "starts of other sizes": _index(interface__action=VECTOR | {"start": [1]}),
    "axes of other sizes": _index(interface__action=VECTOR | {"axes": [3]}),
    "ten thousand axes": _index(interface__action=VECTOR | {"axes": [2**20] * 10**4}),
    "an array of ten thousand axes": _index(
        interface__observation=BOX | {"shape": [2**20] * 10**4}
    ),
    "negative axes": _index(interface__action=VECTOR | {"axes": [-1, -2]}),
    "a flag of text": _index(interface__action=VECTOR | {"binary": "no"}),
    "a mask that is no part": _index(interface__mask="mask"),
    "a mask of numbers": _index(interface__mask=1),
    "sides in words": _index(interface__both_sides="no"),
    "a tuple that is no part": _index(interface__tuples=["observation/0"]),
    "a tuple elsewhere": _index(interface__tuples=["mask"]),
    "a tuple of numbers": _index(interface__tuples=[1]),
    "no tuples": _index(interface__tuples=None),
    "bounds of nothing": _index(interface__observation=BOX | {"low": "nan"}),
    "objects": _index(interface__observation=BOX | {"dtype": "object"}),
    "a dtype of many": _index(interface__observation=BOX | {"dtype": "(1000000,1000000)f4"}),
    "other spaces": _index(interface__observation={"n": 3}),
    "fewer actions": _index(interface__action={"n": 1}),
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
    assert [x.name for x in tmp_path.iterdir()] == ["in"] and [
        x.name for x in (tmp_path / "in").iterdir()
    ] == ["data"]
    (tmp_path / "link").symlink_to("in/data")
    assert Dataset.load(tmp_path / "link").obs.keys() == obs.keys()
    _index(format=1)(tmp_path / "link")
    with pytest.raises(
        ConfigError, match="has format 1, but this version reads 2; make the data set again"
    ):
        Dataset.load(tmp_path / "link")


def test_what_no_algorithm_can_learn_from_is_refused():
    whole = episodes()
    whole[0]["reward"][1] = np.nan
    with pytest.raises(ConfigError, match="reward has a NaN"):
        Dataset.from_episodes(whole)
    with pytest.raises(ConfigError, match="one more observation"):
        Dataset.from_episodes([{**episodes()[0], "action": np.zeros(2, int)}])
    with pytest.raises(ConfigError, match="actions"):
        Dataset.joined(
            [
                Dataset.from_episodes(episodes()),
                Dataset.from_episodes(episodes(), action_space=Discrete(5)),
            ]
        )


def test_joined_bounds_are_those_of_all_parts():
    def of(size):
        actions = np.linspace(-size, size, 6, dtype=np.float32)[:, None]
        return Dataset.from_arrays({"x": actions * 2}, actions, np.ones(6), np.arange(6) == 5)

    for parts in ([of(0.1), of(0.9)], [of(0.9), of(0.1)]):
        data = Dataset.joined(parts)
        np.testing.assert_array_equal(
            [data.action_space.low, data.action_space.high], np.float32([[-0.9], [0.9]])
        )
        np.testing.assert_array_equal(data.observation_space["x"].high, np.float32([1.8]))


def test_shares_are_exact():
    data = Dataset.from_arrays(
        np.ones((100, 1)), np.zeros(100, int), np.arange(100), np.ones(100, bool)
    )
    taken = {share: len(data.best(share).ends) for share in (0.07, 0.14, 0.55, 0.071)}
    assert taken == {0.07: 7, 0.14: 14, 0.55: 55, 0.071: 8}


def test_probabilities_of_flat_arrays_follow_their_steps():
    obs, ends, known = np.arange(6.0)[:, None], np.array([0, 1, 0, 0, 0, 1], bool), -np.arange(6.0)
    arrays = obs, np.zeros(6, int), np.ones(6), ends
    for data in (
        Dataset.from_arrays(*arrays, log_prob=known),
        Dataset.from_arrays(*arrays, next_obs=obs + 1, log_prob=known),
    ):
        assert data.log_prob[data.valid].tolist() == known.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_integer_actions_are_categories(dtype):
    data = Dataset.from_arrays(
        np.ones((4, 1)), np.array([0, 2, 1, 0], dtype), np.ones(4), np.ones(4, bool)
    )
    assert data.action_space == Discrete(3) and data.action.dtype == np.int32


FLAT = {
    "obs": np.ones((4, 1)),
    "action": np.zeros(4, int),
    "reward": np.ones(4),
    "terminals": np.arange(4) == 3,
}
WRONG = {
    "a time-out for all": ({"timeouts": [True]}, "same length"),
    "fewer time-outs": ({"timeouts": [True, False, False]}, "same length"),
    "no step with a successor": (
        {"terminals": np.zeros(4, bool), "timeouts": np.ones(4, bool)},
        "has a successor",
    ),
    "fewer probabilities": ({"log_prob": np.zeros(3)}, "same length"),
    "successors of another width": (
        {"next_obs": np.ones((4, 2))},
        "next_obs and obs have different shapes",
    ),
    "successors of other parts": (
        {"next_obs": {"x": np.ones((4, 1))}},
        "next_obs and obs have different shapes",
    ),
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
        Dataset.from_arrays(**lists).rollout()[:6],
        Dataset.from_arrays(**FLAT).rollout()[:6],
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "changes",
    [{"obs": np.ones((3, 5))}, {"terminated": np.zeros(2, bool)}, {"log_prob": np.zeros(1)}],
)
def test_episodes_unlike_the_others_are_refused(changes):
    first, second = episodes()
    with pytest.raises(ConfigError, match="episode 1 has"):
        Dataset.from_episodes([first, {**second, **changes}])


def transitions(data):
    """The rows ``(s, a, r, s', done)`` of a data set with flat observations, in any order."""
    steps = np.flatnonzero(data.valid)
    columns_ = (
        data.obs[steps],
        data.action[steps],
        data.reward[steps],
        data.obs[steps + 1],
        data.terminated[steps],
    )
    return sorted(zip(*(x.reshape(len(steps), -1).tolist() for x in columns_), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
@pytest.mark.parametrize("seed", range(4))
def test_given_successors_are_kept_in_any_order_of_rows(seed, dtype):
    rng = np.random.default_rng(seed)
    first = [
        rng.integers(0, 200, (size + 1, 2)) / (1 if dtype == np.uint8 else 7)
        for size in (4, 1, 3, 5)
    ]
    obs, after = (
        np.concatenate([x[part] for x in first]).astype(dtype)
        for part in (slice(-1), slice(1, None))
    )
    # the second and the last episode are cut, which no flag says
    terminals = np.isin(np.arange(13), (3, 7))
    order = rng.permutation(13) if seed else np.arange(13)
    rows = obs, np.arange(13) % 3, np.arange(13.0), terminals
    given = [x[order] for x in rows]
    with warnings.catch_warnings(action="ignore"):
        data = Dataset.from_arrays(*given, next_obs=after[order])
    stored = data.obs.dtype
    wanted = zip(obs.astype(stored), rows[1], rows[2], after.astype(stored), terminals, strict=True)
    wanted = [[np.ravel(x).tolist() for x in row] for row in wanted]
    assert transitions(data) == sorted(map(tuple, wanted))
    if not seed:
        assert data.lengths.tolist() == [4, 1, 3, 5] and np.flatnonzero(
            data.truncated
        ).tolist() == [5, 15]


def test_dicts_in_two_precisions_continue_an_episode():
    obs = {"a": np.linspace(0, 1, 6)[:5, None], "b": np.arange(5)[:, None] * 0.1}
    after = {
        "a": np.linspace(0, 1, 6)[1:, None].astype(np.float32),
        "b": np.arange(1, 6)[:, None] * 0.1,
    }
    assert Dataset.from_arrays(
        obs, np.zeros(5, int), np.ones(5), np.zeros(5), next_obs=after
    ).lengths.tolist() == [5]
    after["b"][1] += 1
    data = Dataset.from_arrays(obs, np.zeros(5, int), np.ones(5), np.zeros(5), next_obs=after)
    assert data.lengths.tolist() == [2, 3] and data.obs["b"][2] == after["b"][1].astype(np.float32)


def test_shuffled_rows_are_told_to_be_pieces():
    obs = np.arange(8.0)[::-1, None]
    with pytest.warns(ConfigWarning, match="7 of 8 rows.*best"):
        Dataset.from_arrays(obs, np.zeros(8, int), np.ones(8), np.zeros(8), next_obs=obs + 1)


def test_returns_of_small_episodes_follow_a_huge_one():
    rewards = np.array([2e17, 1, 1, 2, 2])
    data = Dataset.from_arrays(np.ones((5, 1)), np.zeros(5, int), rewards, [1, 0, 1, 0, 1])
    assert data.returns[1:].tolist() == [2, 4]


MISUSED = {
    "text for episodes": (lambda data: Dataset.from_episodes("ab"), "list of episodes"),
    "one episode alone": (lambda data: Dataset.from_episodes(episodes()[0]), "list of episodes"),
    "no observations": (lambda data: Dataset.from_episodes([{"action": [0]}]), "has no obs"),
    "no end": (
        lambda data: Dataset.from_episodes([{"obs": [0], "action": [0], "reward": [1]}]),
        "no terminated",
    ),
    "an end in words": (
        lambda data: Dataset.from_episodes([{**episodes()[0], "terminated": "False"}]),
        "True and",
    ),
    "an end of 2": (
        lambda data: Dataset.from_episodes([{**episodes()[0], "terminated": 2}]),
        "True and False",
    ),
    "an end of None": (
        lambda data: Dataset.from_episodes([{**episodes()[0], "terminated": None}]),
        "True and False",
    ),
    "parts without names": (
        lambda data: Dataset.from_arrays(**{**FLAT, "obs": {1: FLAT["obs"]}}),
        "keys",
    ),
    "nothing observed": (
        lambda data: Dataset.from_arrays(**{**FLAT, "obs": None}),
        "arrays of numbers",
    ),
    "ends in words": (
        lambda data: Dataset.from_arrays(**{**FLAT, "terminals": ["False"] * 4}),
        "terminals must contain True",
    ),
    "a note that is not JSON": (
        lambda data: Dataset.from_arrays(**FLAT, about={"x": object()}),
        "not a dict in JSON",
    ),
    "nothing to join": (lambda data: Dataset.joined([]), "no data set to join"),
    "no share": (lambda data: data.best(0), "at most 1"),
    "a share of NaN": (lambda data: data.best(float("nan")), "at most 1"),
    "a negative share": (lambda data: data.best(-1), "at most 1"),
    "a share of 2": (lambda data: data.best(2), "at most 1"),
    "no episodes": (lambda data: data.episodes([]), "0 to 1"),
    "an episode that is not there": (lambda data: data.episodes([2]), "0 to 1"),
    "a number for a path": (lambda data: Dataset.load(5), "path"),
    "a path with a NUL": (lambda data: Dataset.load("a\0b"), "path"),
    "a name that leads upward": (lambda data: data.save("a/.."), "name"),
    "a name with a NUL": (lambda data: data.save("a\0b"), "name"),
    "sides in words": (
        lambda data: Dataset.from_arrays(**FLAT, both_sides="yes"),
        "both_sides must be True or False",
    ),
    "a huge start": (
        lambda data: Dataset.from_arrays(**FLAT, action_space=Discrete(3, 2**40)),
        "not of the space",
    ),
    "a vector of one action": (
        lambda data: Dataset.from_arrays(**{**FLAT, "action": np.ones((4, 1), int)}),
        "N, 1",
    ),
    "negative actions": (
        lambda data: Dataset.from_arrays(**{**FLAT, "action": [-1, 0, 1, 0]}),
        "action_space=",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = MISUSED[name]
    with pytest.raises(ConfigError, match=message) as refused:
        call(Dataset.from_episodes(episodes()))
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_states_that_never_occur_name_the_space_to_give():
    data = Dataset.from_arrays(np.arange(4), np.zeros(4, int), np.ones(4), np.ones(4))
    with pytest.raises(ConfigError, match=r"Discrete\(4\), not Discrete\(16\).*observation_space="):
        check_spaces("data", data, Discrete(16), data.action_space)


NATIVE = {
    "a start": (gymnasium.spaces.Discrete(3, start=1), [1, 3, 2, 1], [0, 2, 1, 0]),
    "a start of ours": (Discrete(3, 1), [1, 3, 2, 1], [0, 2, 1, 0]),
    "a column": (gymnasium.spaces.Discrete(3), [[0], [2], [1], [0]], [0, 2, 1, 0]),
    "starts": (
        gymnasium.spaces.MultiDiscrete([3, 4], start=[5, -2]),
        [[5, -2], [7, 1], [6, 0], [5, 0]],
        None,
    ),
    "a matrix": (
        gymnasium.spaces.MultiBinary([2, 2]),
        np.eye(4, dtype=int).reshape(4, 2, 2),
        np.eye(4),
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_declared_actions_are_the_environments_own(name, tmp_path):
    space, given, stored = NATIVE[name]
    data = Dataset.from_arrays(**{**FLAT, "action": given}, action_space=space)
    data.save(tmp_path / "data")
    for again in (data, Dataset.load(tmp_path / "data")):
        rows = again.action[again.valid]
        np.testing.assert_array_equal(
            spaces.native(again.action_space, rows), np.reshape(given, (4, *space.shape))
        )
        assert stored is None or np.array_equal(rows, stored)


def test_an_action_below_the_declared_start_is_refused():
    with pytest.raises(ConfigError, match=r"Discrete\(3\).*1"):
        Dataset.from_arrays(
            **{**FLAT, "action": [0, 1, 2, 1]}, action_space=gymnasium.spaces.Discrete(3, start=1)
        )


def test_an_undeclared_start_is_another_space():
    with pytest.warns(ConfigWarning, match="action 0 never occurs"):
        data = Dataset.from_arrays(**{**FLAT, "action": [1, 2, 1, 2]})
    with pytest.raises(ConfigError, match=r"Discrete\(3\).*Discrete\(3\).*1.*action_space="):
        check_spaces("data", data, data.observation_space, Discrete(3, 1))


@pytest.mark.parametrize("space", [5, "Discrete", {"a": 5}, {}, gymnasium.spaces.Text(3)])
def test_what_is_no_space_is_refused(space):
    with pytest.raises(ConfigError) as refused:
        Dataset.from_arrays(**FLAT, action_space=space)
    assert "\n" not in str(refused.value)


def test_a_mask_is_found_declared_or_denied(tmp_path):
    legal = np.array([[1, 0], [1, 1], [0, 1], [1, 1]], bool)
    obs = {"action_mask": legal, "place": np.ones((4, 1)), "other": ~legal}
    flat = {**FLAT, "obs": obs, "action": [0, 1, 1, 0]}
    data = Dataset.from_arrays(**flat)
    data.save(tmp_path / "data")
    assert data.interface.mask == Dataset.load(tmp_path / "data").interface.mask == "action_mask"
    assert Dataset.joined([data, data]).best(0.5).interface.mask == "action_mask"
    assert Dataset.from_arrays(**flat, mask="other").interface.mask == "other"
    assert Dataset.from_arrays(**flat, mask="").interface.mask is None
    with pytest.raises(
        ConfigError,
        match=r"'place'.*2",
    ):
        Dataset.from_arrays(**flat, mask="place")
    with pytest.raises(ConfigError, match="differ in their masks"):
        Dataset.joined([data, Dataset.from_arrays(**flat, mask="")])


def test_tuples_of_observations_are_read_as_the_environments():
    space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(4, start=2)]
    )
    values = np.ones((4, 1), np.float32), np.array([2, 3, 5, 2])
    data = Dataset.from_arrays(**{**FLAT, "obs": values}, observation_space=space)
    assert data.interface.tuples == ("observation",)
    assert data.obs["1"][data.valid].tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize("shape", [(84, 84), (12, 14, 3)])
def test_images_have_the_bounds_of_bytes(shape):
    """Whatever their brightest pixel is, so that they are read as those of an environment."""
    pictures = np.zeros((4, *shape), np.uint8)
    pictures[0] = 200
    space = Dataset.from_arrays(**{**FLAT, "obs": pictures}).observation_space
    assert spaces.is_image(space) and space.low.max() == 0 and space.high.min() == 255
    board = Dataset.from_arrays(
        **{**FLAT, "obs": np.arange(256, dtype=np.uint8).reshape(4, 8, 8) // 32}
    )
    assert board.observation_space.high.max() == 7 and not spaces.is_image(board.observation_space)


def test_ends_that_hold_the_time_outs_are_refused():
    """As SB3's buffers have them beside their time-outs:
    each cut would count as an end of the task.
    """
    timeouts = np.arange(4) % 2 == 1
    with pytest.raises(ConfigError, match="terminals & ~timeouts"):
        Dataset.from_arrays(
            **{**FLAT, "terminals": timeouts, "timeouts": timeouts}, next_obs=FLAT["obs"]
        )


@pytest.mark.parametrize("action", [[0, 1, 1, 0], [1, 3, 2, 1]])
@pytest.mark.filterwarnings("ignore:action 0 never occurs")
def test_a_mask_of_another_width_is_refused(action):
    """The last action never occurs, or actions count from 1: the mask says how many there are."""
    obs = {
        "action_mask": np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 1]], np.int8),
        "place": np.ones((4, 1)),
    }
    with pytest.raises(
        ConfigError,
        match=r"action_mask.*3.*Discrete\(\d\).*action_space=",
    ):
        Dataset.from_arrays(**{**FLAT, "obs": obs, "action": action})
    space = gymnasium.spaces.Discrete(3, start=min(action))
    data = Dataset.from_arrays(**{**FLAT, "obs": obs, "action": action}, action_space=space)
    assert data.interface.mask == "action_mask"


def test_numbers_that_float32_cannot_tell_apart_are_told():
    with pytest.warns(ConfigWarning, match="subtract a constant"):
        Dataset.from_arrays(**{**FLAT, "obs": 1e8 + np.arange(4.0)[:, None]})
    Dataset.from_arrays(**{**FLAT, "obs": 1e4 + np.arange(4.0)[:, None]})


@pytest.mark.parametrize(
    "action", [np.zeros((4, 2, 2), int), np.zeros((4, 2), bool), np.zeros(4, bool)]
)
def test_actions_of_an_unclear_kind_ask_for_their_space(action):
    with pytest.raises(ConfigError, match=r"MultiBinary or MultiDiscrete; .*action_space="):
        Dataset.from_arrays(**{**FLAT, "action": action})


def test_episodes_may_come_one_by_one():
    assert Dataset.from_episodes(iter(episodes())).lengths.tolist() == [3, 2]


def test_actions_of_episodes_that_may_count_from_1_are_told():
    """The padding after an episode's last action is none."""
    later = [{**episode, "action": episode["action"] + 1} for episode in episodes()]
    with pytest.warns(ConfigWarning, match="action 0 never occurs"):
        Dataset.from_episodes(later)
    Dataset.from_episodes(later, action_space=Discrete(2, 1))
