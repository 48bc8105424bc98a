"""The table of presets: rows name flags that exist,
and every kind of task gets sizes that fit eight devices.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from probes import box

import jaxrl_dist
from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.presets import KINDS, TABLE, kind_of, row
from jaxrl_dist.algorithms.sac import SAC
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.config.named import data_of
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import given, resolve
from jaxrl_dist.settings.members import members
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.types import EnvSpec

FRAMES = Box(
    (4, 84, 84),
    np.dtype(np.uint8),
    np.zeros((4, 84, 84), np.uint8),
    np.full((4, 84, 84), 255, np.uint8),
)
OBSERVATIONS = {
    "table": Discrete(16),
    "image": FRAMES,
    "atari": FRAMES,
    "minatar": box(10, 10, 4, bound=1),
}
FAMILIES = {"table": "toy_text", "image": "procgen", "unknown": "other"}


def task(kind: str) -> EnvSpec:
    family, *continuous = kind.split("/")
    action: Any = box(2, bound=1) if continuous else Discrete(3)
    backend = "envpool" if kind == "atari" else "gymnax"
    return EnvSpec(
        "Test-v0",
        backend,
        FAMILIES.get(family, family),
        OBSERVATIONS.get(kind, box(3)),
        action,
        None,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    assert kind_of(task(kind)) == kind


def test_an_image_is_no_vector_of_its_family() -> None:
    """CarRacing is Box2D, and has images."""
    assert kind_of(dataclasses.replace(task("box2d/continuous"), observation=FRAMES)) == "image"


def test_atari_without_envpools_wrappers_is_no_atari() -> None:
    """Gymnasium's has colours, and rewards of any size."""
    atari = dataclasses.replace(task("atari"), backend="gymnasium")
    assert kind_of(atari) == "image"
    assert kind_of(dataclasses.replace(atari, observation=box(128, bound=255))) == "unknown"


@pytest.mark.parametrize("name", TABLE)
def test_rows_are_of_kinds_and_hold_flags(name: str) -> None:
    flags = {
        field.name for kind in (Train, config_class(name)) for field in dataclasses.fields(kind)
    }
    assert config_class(name).presets == name
    assert TABLE[name].keys() <= {*KINDS, "any", "continuous", "discrete"}
    assert not {flag for values in TABLE[name].values() for flag in values} - flags


def test_later_rows_override_earlier_ones() -> None:
    mujoco, atari = TABLE["ppo"]["continuous"] | TABLE["ppo"]["mujoco/continuous"], TABLE["impala"]
    assert row("ppo", task("mujoco/continuous")) == mujoco and mujoco["learning_rate"] == 3e-4
    assert row("impala", task("atari")) == atari["any"] | atari["atari"]
    assert (
        row("impala", task("atari"))["num_envs"] == 32
        and row("impala", task("bsuite"))["num_envs"] == 16
    )


@pytest.mark.parametrize(
    "algorithm, env, fields, scaled",
    [
        ("a2c", "CartPole-v1", {}, False),
        ("ppo", "CartPole-v1", {"core": "gru"}, True),
        ("a2c", "CartPole-v1", {"core": "lstm"}, True),
        ("ppo", "CartPole-v1", {"core": "gru", "scale_rewards": False}, False),
        ("ppo", "MemoryChain-bsuite", {"core": "gru"}, False),  # the environment's preset says so
        (PPO(core="gru"), "CartPole-v1", {}, True),
        ("r2d2", "CartPole-v1", {}, False),  # no policy shares its core
    ],
)
def test_shared_core_reads_scaled_rewards(
    algorithm: Any, env: str, fields: dict[str, Any], scaled: bool
) -> None:
    config, _ = resolve.resolved(Train(algorithm, env=env), fields)
    assert config.scale_rewards is scaled


@pytest.mark.parametrize(
    "algorithm, env", [("td3", "Pendulum-v1"), ("sac", "Pendulum-v1"), ("dqn", "CartPole-v1")]
)
def test_env_steps_are_used_as_often_with_a_core(algorithm: str, env: str) -> None:
    def sizes(**fields: Any) -> tuple[int, float]:
        hyperparameters = resolve.resolved(Train(algorithm, env=env), fields)[0].algorithm
        return hyperparameters.batch_size, hyperparameters.replay_ratio

    (batch, ratio), (windows, slower) = sizes(), sizes(core="gru")
    assert windows * TD3().sequence_length * slower == batch * ratio
    assert sizes(core="gru", batch_size=8) == (8, slower)


def test_an_algorithm_with_a_core_keeps_its_sizes_with_another() -> None:
    own, other = (
        resolve.resolved(Train("r2d2", env="CartPole-v1"), fields)[0].algorithm
        for fields in ({}, {"core": "lstm"})
    )
    assert (own.batch_size, own.replay_ratio) == (
        other.batch_size,
        other.replay_ratio,
    ) and other.core == "lstm"


@pytest.mark.parametrize("cores", ["gru,lstm", "none,gru"])
def test_members_with_cores_have_the_sizes_of_a_run_with_one(cores: str) -> None:
    alone = jaxrl_dist.preset("ppo", "CartPole-v1", core="gru")
    population = members(jaxrl_dist.preset("ppo", "CartPole-v1", vary={"core": cores}))
    for core, member in zip(cores.split(","), population, strict=True):
        config = dataclasses.replace(
            member.config, algorithm=dataclasses.replace(member.config.algorithm, core="gru")
        )
        assert member.config.algorithm.core == core
        assert config.algorithm == alone.algorithm
        assert (config.num_envs, config.rollout_length) == (alone.num_envs, alone.rollout_length)


def test_preset_values_without_effect_are_dropped() -> None:
    """The preset for classic control has a last epsilon, and Rainbow's a range of returns."""
    config, _ = resolve.resolved(Train("dqn", env="CartPole-v1"), {"epsilon_ladder": True})
    assert config.algorithm.epsilon_ladder and config.algorithm.epsilon_end == DQN().epsilon_end
    assert row("dqn", task("classic_control"))["epsilon_end"] != DQN().epsilon_end
    config, _ = resolve.resolved(Train("rainbow", env="CartPole-v1"), {"num_atoms": 1})
    assert (config.algorithm.value_min, config.algorithm.value_max) == (
        DQN().value_min,
        DQN().value_max,
    )
    with pytest.raises(ConfigError, match=r"epsilon_end does nothing without"):
        resolve.resolved(
            Train("dqn", env="CartPole-v1"), {"epsilon_ladder": True, "epsilon_end": 0.1}
        )


def test_user_value_without_effect_is_refused() -> None:
    assert row("a2c", task("minatar"))["optimizer"] != A2C().optimizer
    with pytest.raises(ConfigError, match=r"rms_decay.*A2C's.*RMSProp"):
        resolve.resolved(Train("a2c", env="Breakout-MinAtar"), {"rms_decay": 0.9})


USELESS = {
    ("ddpg", "Pendulum-v1"): {"target_noise_clip": 0.3},
    ("iql", "Pendulum-v1"): {"beta": 0.0, "max_weight": 10.0},
    ("ppo", "CartPole-v1"): {"initial_std": 0.5},
}


@pytest.mark.parametrize("name, env", USELESS)
def test_what_would_change_nothing_is_refused(name: str, env: str) -> None:
    changes = USELESS[name, env]

    def make() -> None:
        config, source = resolve.resolved(Train(name, env=env), changes)
        make_algorithm(config, source.spec)

    with pytest.raises(ConfigError, match=f"{[*changes][-1]} does nothing without"):
        make()


def test_values_are_checked_with_and_without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[float]()
    monkeypatch.setattr(PPO, "validate", lambda self: checked.append(self.learning_rate))
    config, _ = resolve.resolved(Train("ppo", env="Pendulum-v1"), {"seed": 3})
    assert (
        checked == [PPO().learning_rate, config.algorithm.learning_rate]
        and checked[0] != checked[1]
    )


def test_each_value_has_a_source() -> None:
    changes = {"discount": 0.9, "epsilon_end": 0.2, "num_envs": 16, "seed": 0}
    *_, sources = resolve.resolved_with_sources(
        Train("dqn", env="CartPole-v1"), changes, ["num_envs", "discount"]
    )
    assert [sources[name] for name in changes] == ["stored", "yours", "stored", "yours"]
    assert (sources["replay_capacity"], sources["rollout_length"], sources.get("gather")) == (
        "preset",
        "preset",
        None,
    )


def test_config_values_without_effect_are_dropped() -> None:
    kept = Train(DQN(ez_greedy=True, epsilon_end=0.2), env="CartPole-v1")
    config, _ = resolve.resolved(kept, {"parameter_noise": True})
    assert (config.algorithm.parameter_noise, config.algorithm.ez_greedy) == (True, False)
    assert config.algorithm.epsilon_end == 0.2
    with pytest.raises(ConfigError, match=r"ez_greedy does nothing without"):
        resolve.resolved(kept, {"parameter_noise": True, "ez_greedy": True})
    with pytest.raises(ConfigError, match=r"ez_greedy does nothing without"):
        resolve.resolved(Train(DQN(ez_greedy=True, parameter_noise=True), env="CartPole-v1"))
    with pytest.raises(ConfigError, match=r"discount must be a number, not 'x'"):
        resolve.resolved(kept, {"discount": "x"})
    varied = Train("dqn", env="CartPole-v1", vary={"learning_rate_schedule": "constant,linear"})
    with pytest.raises(
        ConfigError,
        match="or cosine; for some of the members, set it in vary, as learning-rate-s",
    ):
        resolve.resolved(varied, {"learning_rate_steps": 9})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ppo", "appo"])
def test_minibatches_hold_four_rollouts_or_more_with_a_core(name: str, kind: str) -> None:
    kept = config_class(name)
    preset = kept.recurrent_preset(kept.preset(task(kind)))
    assert preset["num_envs"] >= 32 and preset["num_envs"] // preset["num_minibatches"] >= 4


CONTINUOUS = "td3", "ddpg", "apex-ddpg", "d4pg"
ANY = "ppo", "a2c", "a3c", "pg", "impala", "appo", "sac", "iql", "marwil", "bc"


def acts_in(name: str, kind: str) -> bool:
    return name in ANY or (name in CONTINUOUS) is kind.endswith("continuous")


def filled_in(spec: EnvSpec, config: Train[Any]) -> Train[Any]:
    source: Any = SimpleNamespace(spec=spec, is_pure=True)
    return given.rounded(*given.filled(given.user_values(config), source), spec)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_kind_of_task_fits_eight_devices(name: str) -> None:
    for spec in (task(kind) for kind in KINDS if acts_in(name, kind)):
        config = filled_in(spec, Train(name, env="Test-v0"))
        config.validate()
        check_sizes(config, make_algorithm(config, spec), spec, 8)


@pytest.mark.parametrize("agents", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "name", [*ALGORITHMS, *(name for name in PRESETS if data_of(name) is None)]
)
def test_defaults_divide_over_devices_and_the_rows_of_a_game(name: str, agents: int) -> None:
    """Also where the user's numbers, of environments and of steps of a rollout,
    do not suit those of the presets.
    """
    kind = "unknown/continuous" if name in CONTINUOUS else "unknown"
    spec = dataclasses.replace(task(kind), num_agents=agents)
    for sizes in ({}, {"num_envs": 24, "rollout_length": 5}, {"num_envs": 6, "rollout_length": 5}):
        config = filled_in(spec, Train(name, env="Test-v0", **sizes))
        for devices in (1, 2) if config.num_envs == 6 else (1, 8):
            check_sizes(config, make_algorithm(config, spec), spec, devices)
        assert config.num_actors is None or config.num_envs % config.num_actors == 0
        assert filled_in(spec, config) == config  # as a resumed run's


def test_defaults_are_rounded_down_and_given_values_stay() -> None:
    spec = dataclasses.replace(task("unknown"), num_agents=3)
    dqn = filled_in(spec, Train("dqn", env="Test-v0", num_envs=6, rollout_length=5)).algorithm
    # 45 updates are whole
    assert (dqn.replay_capacity, dqn.replay_ratio) == (100_000 // 18 * 18, 0.5)
    sac = filled_in(spec, Train("sac", env="Test-v0", num_envs=6, rollout_length=5)).algorithm
    assert sac.replay_ratio == 22 / 90  # 0.25 makes 22.5
    ppo = filled_in(spec, Train("ppo", env="Test-v0", num_envs=24, rollout_length=5)).algorithm
    assert ppo.num_minibatches == 3  # of 45 examples of a device
    for algorithm in (SAC(replay_ratio=0.26), DQN(replay_capacity=99_999), PPO(num_minibatches=7)):
        config = Train(algorithm, env="Test-v0", num_envs=6, rollout_length=5)
        with pytest.raises(ConfigError, match="nearest that work"):
            check_sizes(config := filled_in(spec, config), make_algorithm(config, spec), spec, 1)
    config = filled_in(task("atari"), Train("dqn", env="Test-v0", num_envs=7, published=True))
    with pytest.raises(
        ConfigError,
        match=r"replay_capacity.*1000000.*7",
    ):
        check_sizes(config, make_algorithm(config, task("atari")), task("atari"), 1)


def test_ppo_with_a_core_has_environments_for_its_minibatches() -> None:
    """They hold whole rollouts."""
    sizes = {
        core: jaxrl_dist.preset("ppo", "CartPole-v1", core=core).num_envs
        for core in ("none", "gru", "attention")
    }
    assert sizes == {"none": 16, "gru": 32, "attention": 32}
    pendulum = jaxrl_dist.preset("ppo", "Pendulum-v1", core="gru")
    assert (pendulum.num_envs, pendulum.algorithm.num_minibatches) == (32, 8)
    assert jaxrl_dist.preset("appo", "CartPole-v1", core="gru").num_envs == 32
    assert jaxrl_dist.preset("ppo", "CartPole-v1", core="gru", num_envs=4).num_envs == 4


@pytest.mark.parametrize(
    "name, kind, total",
    [
        ("ppo", "classic_control", 150_000),
        ("dqn", "classic_control", 150_000),
        ("sac", "classic_control/continuous", 25_000),
        ("td3", "classic_control/continuous", 25_000),
        ("ppo", "minatar", 1_000_000),
        ("sac", "minatar", 1_000_000),
        ("ppo", "mujoco/continuous", 200_000),
        ("sac", "mujoco/continuous", 200_000),
        *((name, "atari", 10_000_000) for name in ("ppo", "dqn", "impala", "sac", "r2d2")),
    ],
)
def test_a_usual_run_has_some_fifty_reports(name: str, kind: str, total: int) -> None:
    config = filled_in(task(kind), Train(name, env="Test-v0", total_env_steps=total))
    steps = config.num_envs * config.rollout_length
    assert 40 <= total / (max(1, config.report_interval // steps) * steps) <= 102
    assert (
        config.report_interval == filled_in(task(kind), Train(name, env="Test-v0")).report_interval
    )
    assert filled_in(task(kind), Train(name, env="Test-v0", report_interval=7)).report_interval == 7


@dataclasses.dataclass(frozen=True)
class Replaying:
    """One of a user's file."""

    replay_capacity: int = 10_000


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """One that keeps nothing."""


@pytest.mark.parametrize(
    "kind", ["classic_control/continuous", "mujoco/continuous", "unknown/continuous"]
)
def test_a_users_algorithm_that_replays_reports_as_ours_do(kind: str) -> None:
    def reports(algorithm: Any) -> tuple[int, int]:
        config = filled_in(task(kind), Train(algorithm, env="Test-v0"))
        return config.report_interval, config.return_window

    assert reports(Replaying()) == reports("sac") == reports("td3") == reports("iql")
    assert reports(OnPolicy()) == reports("ppo")


def test_by_default_no_interval_of_the_users_waits_for_a_report() -> None:
    def every(**intervals: Any) -> int:
        return filled_in(task("atari"), Train("ppo", env="Test-v0", **intervals)).report_interval

    assert every() == every(evaluation_interval=10**6) == every(checkpoint_interval=0) == 100_000
    assert (
        every(evaluation_interval=20_000)
        == every(checkpoint_interval=20_000, video_interval=30_000)
        == 20_000
    )
    assert every(evaluation_interval=20_000, report_interval=50_000) == 50_000
