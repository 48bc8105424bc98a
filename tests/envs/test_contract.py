"""What JAX environments return is checked when they are made, by tracing alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import team

from jaxrl_dist import cli
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import EnvError

OBS, STATE, REWARD, TERMINATED, INFO = range(5)


class Changed(broken.RightJAX):
    """Changes one of the values that some of its methods return."""

    def __init__(self, place: int, change: Callable[[Any], Any], *calls: str) -> None:
        self._place, self._change, self._calls = place, change, calls or ("step_env",)

    def reset_env(self, *args: Any) -> Any:
        return self._changed("reset_env", super().reset_env(*args))

    def step_env(self, *args: Any) -> Any:
        return self._changed("step_env", super().step_env(*args))

    def is_truncated(self, *args: Any) -> Any:
        return self._changed("is_truncated", [super().is_truncated(*args)])[0]

    def _changed(self, call: str, out: Any) -> Any:
        return tuple(
            self._change(x) if call in self._calls and at == self._place else x
            for at, x in enumerate(out)
        )


BOTH = ("reset_env", "step_env")
ARRAY = "an array of shape"
FAULTS: dict[str, tuple[Any, str]] = {
    "reward [1]": (
        Changed(REWARD, lambda x: x[None]),
        f"the reward is {ARRAY} (1,) and dtype float32, not a number",
    ),
    "complex reward": (
        Changed(REWARD, lambda x: x * 1j),
        f"the reward is {ARRAY} () and dtype complex64, not a num",
    ),
    "text reward": (Changed(REWARD, lambda x: "1"), "the reward is a str, not a number"),
    "whole end": (
        Changed(TERMINATED, jnp.int32),
        f"terminated is {ARRAY} () and dtype int32, not a bool",
    ),
    "end [1]": (
        Changed(TERMINATED, lambda x: x[None]),
        f"terminated is {ARRAY} (1,) and dtype bool, not a bool",
    ),
    "time limit": (
        Changed(0, jnp.float32, "is_truncated"),
        f"what is_truncated returns is {ARRAY} () and dtype float32, not a bool",
    ),
    "longer observation": (
        Changed(OBS, lambda x: jnp.append(x, 0), *BOTH),
        "the observation of reset_env has shape (3,), its space (2,)",
    ),
    "later observation": (
        Changed(OBS, lambda x: x[:1]),
        "the observation of step_env has shape (1,), its space (2,)",
    ),
    "complex observation": (
        Changed(OBS, lambda x: x * 1j, *BOTH),
        f"the observation of reset_env is {ARRAY} (2,) and dtype complex64, not an array of real numbers",
    ),
    "whole observation": (
        Changed(OBS, jnp.int32),
        "the observation of step_env has dtype int32, its space float32",
    ),
    "state of floats": (
        Changed(STATE, lambda x: x._replace(time=x.time + 0.5)),
        "the state at .time has dtype float32 after step_env and int32 after reset_env",
    ),
    "state of bools": (
        Changed(STATE, lambda x: x._replace(time=x.time > 0)),
        "the state at .time has dtype bool after step_env and int32 after reset_env",
    ),
    "wider state": (
        Changed(STATE, lambda x: x._replace(place=x.place.astype(jnp.float16)), "reset_env"),
        "the state at .place has dtype float32 after step_env and float16 after reset_env",
    ),
    "text in a state": (
        Changed(STATE, lambda x: x._replace(time="0")),
        "its state holds a str at .time, not an array",
    ),
    "info": (Changed(INFO, lambda x: ()), "step_env's info is a tuple, not a dict"),
    "numpy": (Changed(OBS, np.sin), "and jax.numpy in place of numpy"),
    "error": (
        Changed(OBS, lambda x: {}["x"]),
        "step_env raises KeyError: 'x' (test_contract.py, line ",
    ),
}
TRACED = (
    *(
        "NoTimeLimitMethod",
        "NoParams",
        "NoState",
        "TextState",
        "Branches",
        "SixValues",
        "OtherStructure",
    ),
    *(
        "OtherStateShape",
        "OtherStateDtype",
        "OtherObservation",
        "WholeObservation",
        "VectorReward",
        "FloatEnd",
    ),
    "KeepsTracers",
)
"""Environments of which ``check-env`` says the same, each in its own test."""


@pytest.mark.parametrize("what", [*FAULTS, *TRACED])
def test_a_fault_is_named_in_one_line(what: str) -> None:
    made, line = FAULTS[what] if what in FAULTS else (f"broken:{what}", broken.BROKEN[what])
    with pytest.raises(EnvError) as error:
        find(made)
    text = str(error.value)
    assert text.startswith(f"{made if isinstance(made, str) else 'object:Changed'}: ")
    assert line in text and "\n" not in text
    for wrappers in (Wrappers(frame_stack=2), Wrappers(hide="0"), Wrappers(action_repeat=2)):
        with pytest.raises(EnvError) as wrapped:
            find(made, wrappers=wrappers)
        assert str(wrapped.value) == text


@pytest.mark.parametrize("repeat", [1, 2])
def test_dtypes_that_those_of_the_reset_hold_are_allowed(repeat: int) -> None:
    """As from Python's numbers, whose dtype depends on what they meet."""
    narrow = Changed(
        STATE, lambda x: x._replace(time=jnp.int8(x.time), place=x.place.astype(jnp.float16))
    )
    env = find(narrow, wrappers=Wrappers(action_repeat=repeat)).device()
    keys = jax.random.split(jax.random.key(0), 3)
    state = jax.eval_shape(lambda: env.reset(keys)[0])
    after = jax.eval_shape(env.step, state, np.zeros(3, np.int32), keys)[0]
    assert [x.dtype for x in jax.tree.leaves(after.env)] == [jnp.float32, jnp.int32]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


def test_an_environment_may_hold_what_no_tree_of_jax_can() -> None:
    env = broken.RightJAX()
    env.table = {1: "one", "two": 2}  # type: ignore[attr-defined]
    assert find(env).is_pure


@pytest.mark.parametrize(
    "env", ["gymnax:Catch-bsuite", "gymnax:FourRooms-misc", "gymnax:UmbrellaChain-bsuite"]
)
def test_library_spaces_may_differ_in_dtype(env: str) -> None:
    assert find(env).is_pure


# --- Several agents -------------------------------------------------------------------------------


class Meeting(team.Meeting):
    """Changes one of the values that a method returns: those of the agent ``left``, or the
    state.
    """

    def __init__(self, place: int, change: Callable[[Any], Any], call: str = "step_env") -> None:
        self._place, self._change, self._call = place, change, call

    def reset(self, *args: Any) -> Any:
        return self._changed("reset", super().reset(*args))

    def step_env(self, *args: Any) -> Any:
        return self._changed("step_env", super().step_env(*args))

    def _changed(self, call: str, out: Any) -> Any:
        return tuple(
            self._change(x) if call == self._call and at == self._place else x
            for at, x in enumerate(out)
        )


def left(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: {**values, "left": change(values["left"])}


def without(agent: str) -> Callable[[Any], Any]:
    return lambda values: {name: x for name, x in values.items() if name != agent}


@pytest.mark.parametrize(
    "env, line",
    [
        (Meeting(OBS, without("right"), "reset"), "reset returned no observation for agent right"),
        (
            Meeting(OBS, left(lambda x: x[None]), "reset"),
            "observation of left in reset has shape (1, 1), its space (1,)",
        ),
        (
            Meeting(OBS, left(jnp.int32)),
            "the observation of left in step_env has dtype int32, its space float32",
        ),
        (
            Meeting(STATE, lambda x: x._replace(time=x.time / 2)),
            "the state at .time has dtype float32 after step_env",
        ),
        (
            Meeting(STATE, lambda x: tuple(x)),
            "the state of step_env is PyTreeDef((*, *)), that of reset PyTreeDef(",
        ),
        (Meeting(REWARD, without("left")), "step_env returned no reward for agent left"),
        (
            Meeting(REWARD, left(lambda x: x[None])),
            f"the reward of left is {ARRAY} (1,) and dtype float32, not a number",
        ),
        (
            Meeting(TERMINATED, left(jnp.int32)),
            f"the done of left is {ARRAY} () and dtype int32, not a bool",
        ),
        (Meeting(TERMINATED, without("__all__")), "step_env returned no done for agent __all__"),
        (
            Meeting(INFO, lambda x: 1 if x else 1 / 0),
            "step_env raises ZeroDivisionError: division by zero",
        ),
        (
            Meeting(REWARD, left(lambda x: 1.0 if x > 0 else 0.0)),
            "use jnp.where or jax.lax.cond in place of if",
        ),
        (team.CartPoles(0), "it has no agents"),
    ],
)
def test_a_fault_of_a_team_is_named_in_one_line(env: Any, line: str) -> None:
    with pytest.raises(EnvError) as error:
        find(env)
    assert line in str(error.value) and "\n" not in str(error.value)


# --- The command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, lines", [("broken:OtherStateDtype", 1), ("broken:Branches", 1), ("own:Branching", 1)]
)
def test_train_says_so_before_it_has_a_directory(
    name: str, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert cli.main(f"train a2c --env {name} --run-dir {run_dir}".split()) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"jaxrl-dist: error: {name}: ") and err.count("\n") == lines
    assert not run_dir.exists() and not out
