"""Values that Python offers, made what flags and files can say."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.config.train import ALONE, GROUPS, OWN, RESUMABLE, VARIED, Processes, Train
from jaxrl_dist.config.values import check_declared, marked, plain, setting
from jaxrl_dist.errors import ConfigError

pytestmark = pytest.mark.quick

if TYPE_CHECKING:
    from nowhere import Nothing

NATURAL: dict[str, tuple[Any, Any]] = {
    # field: what Python offers, what it becomes
    "seed": (np.int64(3), 3),
    "num_envs": (np.arange(5)[4], 4),
    "total_env_steps": (1e6, 1_000_000),
    "report_interval": (np.float64(512), 512),
    "normalize_observations": (np.bool_(True), True),
    "run_dir": (pathlib.Path("runs/x"), "runs/x"),
    "init_from": (pathlib.PurePath("runs/y"), "runs/y"),
    "clip_rewards": (1, "1"),
    "actor_devices": (np.int64(0), "0"),
    "env_timeout": (5, 5.0),
    "mem_fraction": (np.float32(0.5), 0.5),
    "env_options": (
        {"gravity": 9.8, "steps": np.int64(3), "on": True, "off": np.bool_(False), "name": "x"},
        None,
    ),
    "hidden_sizes": ([4, np.int64(5)], (4, 5)),
    "learning_rate": (np.float32(0.25), 0.25),
    "discount": (jnp.float32(0.5), 0.5),
    "value_clip_epsilon": (1, 1.0),
    "num_minibatches": (np.int32(8), 8),
    "num_epochs": (2.0, 2),
}
OPTIONS = {"gravity": "9.8", "steps": "3", "on": "True", "off": "False", "name": "x"}


@pytest.mark.parametrize("name", NATURAL)
def test_natural_values_become_plain_ones(name: str) -> None:
    value, wanted = NATURAL[name]
    wanted = OPTIONS if wanted is None else wanted
    run = {name: value} if name in Train.__dataclass_fields__ else {}
    own = {} if run else {name: value}
    config = Train(PPO(**own), env="X", **run).checked()
    made = getattr(config if run else config.algorithm, name)
    assert made == wanted and type(made) is type(wanted)
    if isinstance(made, tuple):
        assert [type(part) for part in made] == [int, int]


def test_an_array_is_a_tuple() -> None:
    assert plain(PPO(hidden_sizes=np.array([4, 4]))).hidden_sizes == (4, 4)  # type: ignore[arg-type]


def test_plain_values_stay_as_they_are() -> None:
    for config in (
        PPO(hidden_sizes=(3, 5), torso="mlp", value_clip_epsilon=None),
        Train(PPO(), env="X", num_envs=8),
    ):
        assert plain(config) is config or plain(config) == config
    torso = (lambda key: None, lambda params, x: x)
    assert plain(PPO(torso=torso)).torso is torso


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text for a switch": (
        {"normalize_observations": "False"},
        "normalize_observations must be True or False, not",
    ),
    "1 for a switch": ({"tensorboard": 1}, "tensorboard must be True or False, not 1"),
    "text for a second": ({"tensorboard": "no"}, "tensorboard must be True or False, not 'no'"),
    "a switch for a number": ({"seed": True}, "seed must be a whole number, not True"),
    "a switch of numpy": ({"seed": np.bool_(True)}, "seed must be a whole number, not True"),
    "a fraction": ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
    "infinity": (
        {"total_env_steps": float("inf")},
        "total_env_steps must be a whole number, not inf",
    ),
    "text for a number": ({"discount": "0.9"}, "discount must be a number, not '0.9'"),
    "a switch for a fraction": ({"discount": True}, "discount must be a number, not True"),
    "no core": (
        {"core": "bogus"},
        "core must be one of none, gru, lstm, attention, linear, not 'bogus'",
    ),
    "nearly one": ({"activation": "tahn"}, "not 'tahn' (did you mean 'tanh'?)"),
    "no precision": ({"precision": 32}, "precision must be one of float32, bfloat16, not 32"),
    "no torso": (
        {"torso": "bogus"},
        "torso must be one of auto, mlp, minatar, nature, impala, not 'bogus'",
    ),
    "nothing for a torso": ({"torso": None}, "torso must be one of"),
    "no plan": (
        {"plan": "fast"},
        "plan must be one of on_device, synchronous, asynchronous, own_pace, gradients, offline, not 'fast'",
    ),
    "nothing": ({"env_timeout": None}, "env_timeout must be a number, not None"),
    "nothing for options": (
        {"env_options": None},
        "env_options must be a dictionary of names and values, not None",
    ),
    "a list as an option": (
        {"env_options": {"a": [1]}},
        "env_options a must be text or a number, not [1]",
    ),
    "a tuple of names": (
        {"info_metrics": ("success", "task/score")},
        "info_metrics must be text or a number, not ('success', 'task/score'); as text it is 'success,task/score'",
    ),
    "one size": ({"hidden_sizes": 64}, "hidden_sizes must be a tuple, not 64"),
    "text among sizes": (
        {"hidden_sizes": [4, "4"]},
        "hidden_sizes must be a whole number, not '4'",
    ),
    "bytes for a name": (
        {"init_from": b"runs"},
        "init_from must be text, not bytes; decode it: b'runs'.decode()",
    ),
    "a huge number": ({"num_envs": 10**400}, "num_envs must be >= 1 and <= 1048576, not 1000"),
    "a huger number": (
        {"seed": 10**5000},
        "seed must be >= 0 and <= 2147483647, not a number of thousands of dig",
    ),
    "a huge size": (
        {"hidden_sizes": [10**400]},
        "hidden_sizes must be >= 1 and <= 1048576, not 1000",
    ),
    "a huge count": (
        {"learning_rate_steps": 10**400},
        "learning_rate_steps must be >= 1 and <= 1000000000000000, not 1000",
    ),
    "a huge fraction": ({"discount": 10**400}, "discount must be a number, not 1000"),
    "a huge bound": (
        {"clip_rewards": 10**5000},
        "clip_rewards must be text or a number, not a number of thousands",
    ),
    "a huge device": (
        {"actor_devices": "1" * 5000},
        "actor_devices must be device numbers such as 0,1 or 2-7, not",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_type_is_refused_with_its_field(what: str) -> None:
    values, message = WRONG[what]
    run = {name: value for name, value in values.items() if name in Train.__dataclass_fields__}
    own = {name: value for name, value in values.items() if name not in run}
    with pytest.raises(ConfigError) as error:
        Train(PPO(**own), env="X", **run).checked()
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@dataclasses.dataclass(frozen=True)
class Mine:
    """A config of somebody else's, with types that nobody here knows."""

    size: int = 1
    pair: tuple[float, str] = (0.5, "a")
    either: int | str = 1
    level: Literal["low", "high"] | None = None
    anything: Any = None
    made: int = dataclasses.field(init=False, default=3)


def test_types_that_are_not_known_are_left_alone() -> None:
    values = {"either": np.int64(3), "anything": np.float32(1)}
    mine = plain(Mine(size=np.int64(2), pair=[1, "b"], level="high", **values))  # type: ignore[arg-type]
    assert mine == Mine(2, (1.0, "b"), level="high", **values) and type(mine.pair[0]) is float
    assert mine.either is values["either"] and mine.anything is values["anything"]
    with pytest.raises(ConfigError, match="pair must be a tuple of 2 values"):
        plain(Mine(pair=(1.0,)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="level must be one of low, high, not 'medium'"):
        plain(Mine(level="medium"))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Of a type that is there for type checkers only."""

    size: Nothing = 1


def test_types_that_cannot_be_looked_up_are_left_alone() -> None:
    config = Unknown(np.int64(3))
    assert plain(config).size is config.size


def test_field_declarations_match_resumable_and_stored() -> None:
    assert set(marked(Train, stored=False)) == {"algorithm", "run_dir", *marked(Processes)}
    assert set(marked(Processes)) <= set(RESUMABLE) and not {
        "seed",
        "plan",
        "num_envs",
        *VARIED,
    } & set(RESUMABLE)
    assert set(OWN) < set(VARIED) and OWN == (
        "normalize_observations",
        "scale_rewards",
        "clip_rewards",
        "her",
        "her_horizon",
        "goal_reward",
        "ema_steps",
    )
    alone = {
        "seeds": 1,
        "vary": {},
        "zip": False,
        "evolve": None,
        "evolve_interval": None,
        "average_every": None,
    }
    assert alone == ALONE
    assert set(marked(Train, of_machine=True)) == {
        "num_devices",
        "learner_devices",
        "actor_devices",
    }
    # Programs that a notebook keeps are found by the other fields: sizes,
    # networks and what policies see.
    assert {"num_envs", "time_limit", "num_devices", "normalize_observations"} <= set(
        marked(Train, compiled=True)
    )
    assert (
        sum(len(marked(group)) for group in GROUPS) == len(marked(Train)) == len(set(marked(Train)))
    )


@dataclasses.dataclass(frozen=True)
class Declared:
    size: int | None = setting(None, low=1, high=4)
    share: float = setting(0.5, above=0, high=1)
    filled: int = setting(without_preset=3, low=0)
    other: int = setting(7, needs="size")
    last: str = setting("a", needs="filled")


@pytest.mark.parametrize(
    "values, message",
    {
        "size": ({"size": 5}, "--size must be >= 1 and <= 4, not 5"),
        "whole": ({"filled": 0.5}, "--filled must be a whole number, not 0.5"),
        "share": ({"share": 0.0}, "--share must be > 0 and <= 1, not 0.0"),
        "needs": ({"other": 8}, "--other does nothing without --size"),
        "off": ({"last": "b", "filled": 0}, "--last does nothing without --filled"),
    }.values(),
)
def test_values_are_checked_as_they_are_declared(values: dict[str, Any], message: str) -> None:
    check_declared(Declared(last="b"))  # a preset may fill in what it needs
    check_declared(Declared(size=2, other=8))
    with pytest.raises(ConfigError) as error:
        check_declared(Declared(**values))
    assert str(error.value.with_flags) == message
