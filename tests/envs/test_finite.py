"""Observations and rewards that are no finite numbers: environment, step and field are named,
under every plan.
"""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
import runs
import team

import jaxrl_dist
from jaxrl_dist import cli, rng
from jaxrl_dist.actors import device
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers
from jaxrl_dist.envs.host import envpool
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import EnvError, EnvWarning
from jaxrl_dist.types import Rollout

SEED, NUM_ENVS, LENGTH = 0, 8, 4


@functools.cache
def first_fault() -> tuple[int, int]:
    """The step at which and the environment in which one of ``own.Spoilt`` is spoilt first,
    by stepping it unchecked.

    It is neither in the first rollout nor of the first actor.
    """
    pure, index, key = (
        find(own.Spoilt()).device(),
        jnp.arange(NUM_ENVS),
        rng.stream(SEED, rng.Stream.ENV),
    )
    state, _ = pure.reset(rng.per_index(key, index))
    step = jax.jit(pure.step)
    for number in range(1000):
        keys = rng.per_index(jax.random.fold_in(key, number), index)
        state, timestep, _ = step(state, jnp.zeros(NUM_ENVS, jnp.int32), keys)
        finite = np.isfinite(timestep.obs).all(1)
        if not finite.all():
            assert number >= 2 * LENGTH and finite[: NUM_ENVS // 2].all()
            return number, int(finite.argmin())
    raise AssertionError("never")


def config(env: Any, **values: Any) -> jaxrl_dist.Train[Any]:
    sizes = {
        "num_envs": NUM_ENVS,
        "rollout_length": LENGTH,
        "hidden_sizes": (8,),
        "report_interval": 64,
    }
    return jaxrl_dist.preset("a2c", env, seed=SEED, **sizes, **{"num_devices": 1, **values})


def failure(env: Any, **values: Any) -> str:
    """The line that a run ends with."""
    with pytest.raises(EnvError) as caught:
        list(jaxrl_dist.train(config(env, **values)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.case  # test_a_resumed_run_meets_it_as_the_uninterrupted_one
@pytest.mark.parametrize(
    "num_devices, field, value, kind",
    [(8, "observation", "nan", "an observation"), (1, "reward", "inf", "a reward")],
)
def test_in_a_compiled_program(
    num_devices: int,
    field: str,
    value: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The devices share the environments; what is spoilt later changes nothing."""
    command = f"train a2c --env own:Spoilt --env-options field={field} value={value} --num-devices {num_devices}"
    sizes = f"--num-envs {NUM_ENVS} --rollout-length {LENGTH} --hidden-sizes 8 --seed {SEED}"
    assert cli.main(f"{command} {sizes} --run-dir {tmp_path}/run --quiet".split()) == 1
    step, index = first_fault()
    line = f"own:Spoilt: environment {index} at step {step} gave {kind} that is not finite"
    saved, error = capsys.readouterr().err.splitlines()
    assert saved.startswith("the run is saved: ") and error == f"jaxrl-dist: error: {line}"


@pytest.mark.parametrize("plan", ["synchronous", pytest.param("gradients", marks=pytest.mark.slow)])
def test_under_other_plans(plan: str) -> None:
    step, index = first_fault()
    line = failure(own.Spoilt(), plan=plan, **({} if plan == "synchronous" else {"num_actors": 1}))
    line = line.removesuffix(": [nan]")  # which only the host has at hand
    assert line.endswith(
        f"Spoilt: environment {index} at step {step} gave an observation that is not finite"
    )


def test_second_actor_has_global_environment_indices() -> None:
    step, index = first_fault()
    line = failure(own.Spoilt(), plan="asynchronous", num_actors=2, lockstep=True, lag=0)
    assert f"environment {index} at step {step} " in line


def test_the_first_reset() -> None:
    """Of the compiled program, ``test_the_place_in_a_rollout`` looks at it."""
    with pytest.raises(
        EnvError, match="environment 0 at step 0 gave an observation that is not finite"
    ):
        find(own.SpoiltStart()).host(2, 0).reset()


def test_the_place_in_a_rollout() -> None:
    """The earliest step counts, there the first environment, and there the observation."""
    obs, reward = np.zeros((6, 3, 2), np.float32), np.zeros((5, 3), np.float32)
    spec = find("CartPole-v1").spec

    def found(iteration: int = 7) -> str:
        place = np.asarray(
            [device.fault_of({"": Rollout(obs, (), reward, (), (), (), (), (), ())})]
        )
        try:
            device.check_fault(spec, device.Fault(np.full(1, iteration), place), 3, 5)
        except EnvError as error:
            return re.sub(
                r".* environment (\d+) at step (\d+) gave an? (\w+) .*", r"\2 \1 \3", str(error)
            )
        return "nothing"

    assert found() == "nothing"
    reward[4, 0] = np.inf
    assert found() == "39 0 reward"
    obs[5, 2, 1] = -np.inf
    assert found() == "39 0 reward"
    obs[5, 0, 1] = np.nan
    assert found() == "39 0 observation"
    reward[2, 1] = np.nan
    assert found() == "37 1 reward"
    obs[0, 2] = np.nan  # of the step before
    assert found() == "34 2 observation"
    assert found(iteration=0) == "0 2 observation"
    obs = np.zeros((6, 3), np.uint8)
    assert found() == "37 1 reward"


def test_a_resumed_run_meets_it_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """At the step that counts from the start, and not before: no checkpoint holds what came of
    it.
    """
    env = own.Spoilt()
    step, index = first_fault()
    before = step // LENGTH * LENGTH * NUM_ENVS // 2
    list(
        jaxrl_dist.train(
            config(env, run_dir=str(tmp_path), total_env_steps=before, evaluation_episodes=0)
        )
    )
    with pytest.raises(EnvError, match=f"{index}.*{step}"):
        list(jaxrl_dist.resume(tmp_path, env=env, total_env_steps=10**6))


class SpoiltPoles(team.CartPoles):
    """The last agent of each environment sees nothing but NaN."""

    def split(self, made: Any) -> Any:
        obs = super().split(made)
        return {**obs, self.agents[-1]: obs[self.agents[-1]] * jnp.nan}


@pytest.mark.case  # the errors of single agents
def test_multi_agent_error_names_the_environment() -> None:
    name = "SpoiltPoles: environment 0 at step 0 gave an observation"
    env, two = SpoiltPoles(4), Wrappers(policies={"a": "pole_0", "b": "pole_[123]"})
    assert name in failure(env)
    whole, source = config(env), find(env)
    policy = jaxrl_dist.Policy(
        whole, source, whole.algorithm.make(source.spec).init(jax.random.key(0))
    )
    with pytest.raises(EnvError, match=name):
        policy.evaluate(2)
    for wrappers in (UNWRAPPED, two):
        with pytest.raises(EnvError, match=name):
            find(env, wrappers=wrappers).host(8, 0).reset()
    ones = np.array([1, 1, 1, 1, 1, 1, 1, 9])
    for wrappers, action in ((UNWRAPPED, ones), (two, {"a": ones[:2], "b": ones[2:]})):
        host = find(team.CartPoles(4), wrappers=wrappers).host(8, 0)
        host.reset()
        with pytest.raises(ValueError, match="action 9 of environment 1 at step 0"):
            host.step(action)


# --- EnvPool --------------------------------------------------------------------------------------


class SpoiltPool:
    """EnvPool's own object; ``values[call]`` of the field
    says which environment gives what else at that call.
    """

    def __init__(self, envs: Any, **values: dict[int, tuple[int, float]]) -> None:
        self._envs, self._values, self._calls = envs, values, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)

    def reset(self) -> Any:
        return self._spoilt("reset", *self._envs.reset())

    def step(self, *args: Any) -> Any:
        self._calls += 1
        obs, reward, *rest = self._envs.step(*args)
        (obs,), (reward,) = self._spoilt("observation", obs), self._spoilt("reward", reward)
        return obs, reward, *rest

    def _spoilt(self, field: str, x: np.ndarray, *rest: Any) -> Any:
        index, value = self._values.get(field, {}).get(self._calls, (None, 0.0))
        if index is not None:
            x = x.copy()
            x[index] = value
        return x, *rest


@pytest.mark.parametrize(
    "env_id, values, message",
    [
        (
            "CartPole-v1",
            {"observation": {5: (2, np.nan)}},
            "environment 2 at step 5 gave an observation that is not fi",
        ),
        (
            "CartPole-v1",
            {"observation": {0: (1, -np.inf)}},
            "environment 1 at step 0 gave an observation that is not f",
        ),
        (
            "CartPole-v1",
            {"reward": {7: (0, np.inf)}},
            "environment 0 at step 7 gave a reward that is not finite: inf",
        ),
        (
            "CartPole-v1",
            {"reset": {-1: (2, np.nan)}},
            "environment 2 at step 0 gave an observation that is not finite",
        ),
        (
            "Pong-v5",
            {"reward": {3: (1, np.nan)}},
            "environment 1 at step 3 gave a reward that is not finite: nan",
        ),
    ],
)
def test_envpool(env_id: str, values: Any, message: str) -> None:
    with contextlib.closing(envpool.EnvPool(env_id, [0, 1, 2], {})) as host:
        host._envs = SpoiltPool(host._envs, **values)
        with pytest.raises(EnvError, match=f"^envpool:{env_id}: {re.escape(message)}"):
            play(host, 10)


def play(host: envpool.EnvPool, num_steps: int) -> list[bool]:
    """Whether the steps of the first environment, from a reset on, are valid."""
    host.reset()
    return [
        bool(host.step(np.zeros(host.num_envs, np.int32))[0].valid[0]) for _ in range(num_steps)
    ]


def test_envpool_does_not_look_at_what_a_reset_pays() -> None:
    """Which counts as 0."""
    with contextlib.closing(envpool.EnvPool("CartPole-v1", [0], {"max_episode_steps": 2})) as host:
        host._envs = SpoiltPool(host._envs, reward={2: (0, np.nan)})
        assert play(host, 4) == [True, True, False, True]


def spoil(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """The environments made first give NaN at the first of these calls,
    those made next at the second, and so on.
    """
    make = envpool.EnvPool.__init__

    def spoilt(self: envpool.EnvPool, *args: Any, **kinds: Any) -> None:
        make(self, *args, **kinds)
        self._envs = SpoiltPool(
            self._envs, observation={calls.pop(0) if calls else 10**9: (1, np.nan)}
        )

    monkeypatch.setattr(envpool.EnvPool, "__init__", spoilt)


THREADED = (
    f"train impala --env envpool:CartPole-v1 --num-actors 1 {runs.TINY} --seed {SEED} --run-dir"
)


def test_envpool_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, [21])
    assert cli.main([*THREADED.split(), f"{tmp_path}/run", "--quiet"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    start = "jaxrl-dist: error: envpool:CartPole-v1: environment 1 at step 21 gave an observation that is not finite"
    assert line.startswith(start)


def test_environments_on_the_host_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, [21, 5])
    values = {
        "plan": "asynchronous",
        "num_actors": 1,
        "on_actor_error": "restart",
        "total_env_steps": 1000,
    }
    values |= {"lockstep": True, "lag": 0}
    with pytest.warns(
        EnvWarning, match=r"actor 0 continues .*environment 1 at step \d+ gave an obs"
    ) as warned:
        *_, last = jaxrl_dist.train(config("envpool:CartPole-v1", evaluation_episodes=2, **values))
    assert last.metrics["async/restarts"] == 2 and last.evaluation is not None
    found = re.findall(
        r"restart (\d) of .* at step (\d+) gave", "\n".join(str(w.message) for w in warned)
    )
    assert found == [("1", "21"), ("2", "5")]


def test_an_evaluation_looks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, [10**9, 3])
    command = f"train a2c --env envpool:CartPole-v1 {runs.TINY} --run-dir {tmp_path}/run"
    assert cli.main(command.split()) == 1
    assert (
        "environment 1 at step 3 gave an observation that is not finite" in capsys.readouterr().err
    )
