"""The files that ``jaxrl-dist new`` writes compute what the algorithms do that they are made
from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from probes import spec

from jaxrl_dist import cli, preset, templates, train
from jaxrl_dist.algorithms import config_class, from_file
from jaxrl_dist.commands.new import ENVS, written
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete
from jaxrl_dist.types import Context

TEMPLATES = Path(templates.__file__).parent
BREAKOUT = "Breakout-MinAtar"
SIZES: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 8, "rollout_length": 16, "num_minibatches": 2, "num_epochs": 2},
    "dqn": {"learning_starts": 256, "batch_size": 16, "target_period": 7, "replay_capacity": 4096},
    "sac": {
        "learning_starts": 256,
        "batch_size": 16,
        "replay_ratio": 0.25,
        "replay_capacity": 4096,
    },
}
"""A few updates, some of which begin after an episode has ended."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


def written_kind(name: str, env: str, file: Path) -> Any:
    """The config class of the file that ``new`` writes."""
    file.write_text(written(name, env), encoding="utf-8")
    return from_file(str(file))


def trained(algorithm: Any, env: str, **fields: Any) -> list[np.ndarray]:
    """All variables after a short run."""
    config = preset(algorithm, env, num_devices=1, evaluation_episodes=0, **fields)
    *_, report = train(config)
    assert report.updates > 2
    return jax.tree.leaves(report.variables())


@pytest.mark.usefixtures("optimized")  # users compile like this, and rounding depends on it
@pytest.mark.parametrize(
    "name, env",
    [
        ("ppo", "CartPole-v1"),
        ("dqn", "CartPole-v1"),
        ("sac", "Pendulum-v1"),
        pytest.param("ppo", "Pendulum-v1", marks=pytest.mark.case),
        pytest.param("ppo", BREAKOUT, marks=pytest.mark.case),
        pytest.param("dqn", BREAKOUT, marks=pytest.mark.case),
    ],
)
def test_a_file_learns_as_its_original_to_the_bit(name: str, env: str, file: Path) -> None:
    kind = written_kind(name, env, file)
    fields = {**SIZES[name], "total_env_steps": 512, "report_interval": 512}
    original = trained(name, env, **fields)
    for theirs, ours in zip(original, trained(kind, env, **fields), strict=True):
        np.testing.assert_array_equal(theirs, ours)


DISCRETE = "CartPole-v1", BREAKOUT, "MemoryChain-bsuite", "envpool:Pong-v5"
CONTINUOUS = "Pendulum-v1", "Reacher-misc"
PAIRS = {"ppo": (*DISCRETE, *CONTINUOUS), "dqn": DISCRETE, "sac": CONTINUOUS}


@pytest.mark.parametrize("name, env", [(name, env) for name in ENVS for env in PAIRS[name]])
def test_a_file_has_the_values_of_the_preset(name: str, env: str, file: Path) -> None:
    kind = written_kind(name, env, file)
    mine = preset(kind, env)
    original = preset(name, env)
    assert dataclasses.replace(mine, algorithm=original.algorithm) == original
    for field, value in vars(mine.algorithm).items():
        expected = getattr(original.algorithm, field)
        assert value == expected or (value, expected) == (0.0, None), field
    assert max(map(len, file.read_text().splitlines())) <= 100


@pytest.mark.parametrize("name", ENVS)
def test_a_template_has_the_values_of_its_environment(name: str) -> None:
    source = (TEMPLATES / f"{name}.py").read_text(encoding="utf-8")
    assert written(name, ENVS[name]) == source
    assert source.count("\n") <= 285


def recorded(env: str, folder: Path) -> str:
    """A data set of one episode of random numbers."""
    spaces = find(env).spec
    rng = np.random.default_rng(0)
    if isinstance(spaces.action, Discrete):
        action = rng.integers(0, 2, 64, dtype=np.int32)
    else:
        action = rng.uniform(-1, 1, (64, 1)).astype(np.float32)
    obs = rng.normal(size=(65, *spaces.observation.shape)).astype(np.float32)
    episode = {"obs": obs, "action": action, "reward": np.ones(64), "terminated": False}
    Dataset.from_episodes([episode]).save(folder)
    return str(folder)


# own_pace trains several policies, each as asynchronous does
@pytest.mark.parametrize(
    "plan", runs.cases((plan for plan in PLANS if plan != "own_pace"), "synchronous")
)
@pytest.mark.parametrize("name", runs.cases(ENVS, "ppo"))
# of experience that is older than it should be
@pytest.mark.filterwarnings("ignore::jaxrl_dist.errors.ConfigWarning")
def test_a_file_runs_under_the_plans_of_its_original(name: str, plan: str, file: Path) -> None:
    env = ENVS[name]
    kind = written_kind(name, env, file)
    fields = {**SIZES[name], "total_env_steps": 512}
    if plan == "offline":
        fields = {"data": recorded(env, file.parent / "data"), "total_updates": 4}
    elif (name, plan) == ("ppo", "gradients"):
        fields |= {"num_epochs": 1, "num_minibatches": 1}  # as it needs
    if name == "ppo" and plan in ("gradients", "offline"):  # which have no rollouts to measure
        fields |= {"normalize_observations": False, "scale_rewards": False}
    fields |= {"hidden_sizes": (8,), "plan": plan, "report_interval": 512}
    if (name, plan) == ("ppo", "offline"):
        with pytest.raises(ConfigError, match="replay"):
            trained(kind, env, **fields)
    else:
        trained(kind, env, **fields)


@pytest.mark.parametrize("name", runs.cases(ENVS, "ppo"))
def test_check_algorithm_finds_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(TEMPLATES / f"{name}.py")
    assert cli.main(["check-algorithm", file, "--env", ENVS[name]]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert ": no fault found in " in line


@pytest.mark.parametrize(
    "shape", [pytest.param((3, 36, 40), marks=pytest.mark.case), (4, 6, 2)], ids=["large", "small"]
)
@pytest.mark.parametrize("name", ENVS)
def test_a_file_reads_images_as_its_original(name: str, shape: tuple[int, ...]) -> None:
    """Bytes with channels first, and a small image; without keys."""
    high = np.full(shape, 255, np.uint8)
    image = Box(shape, high.dtype, np.zeros_like(high), high)
    usual = Discrete(2) if name == "dqn" else VECTOR
    task = dataclasses.replace(spec(), observation=image, action=usual)
    obs = np.random.default_rng(0).integers(0, 256, (5, *shape), dtype=np.uint8)
    found = []
    for kind in (config_class(name), template(name)):
        algorithm = kind(hidden_sizes=(8,), activation="relu").make(task)
        variables = jax.jit(algorithm.init)(jax.random.key(1))
        acted = algorithm.policy(variables, obs, algorithm.initial_core(5), Context())
        found.append(jax.tree.leaves((variables, acted[0])))
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(theirs, ours)


VECTOR = Box((3,), np.dtype(np.float32), np.full(3, -1.0), np.full(3, 1.0))
MATRIX = Box((3, 3), np.dtype(np.float32), np.full((3, 3), -1.0), np.full((3, 3), 1.0))


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    "observation, action",
    [
        (Discrete(3), None),
        (MATRIX, None),
        ({"speed": VECTOR}, None),
        (VECTOR, MultiDiscrete((2, 2))),
        (VECTOR, MATRIX),
        (VECTOR, {"steer": VECTOR}),
    ],
)
def test_a_file_refuses_other_spaces(name: str, observation: Any, action: Any) -> None:
    usual = VECTOR if name == "sac" else Discrete(2)
    with pytest.raises(ConfigError, match=f"; use `jaxrl-dist train {name}`$"):
        template(name)().make(
            dataclasses.replace(spec(), observation=observation, action=action or usual)
        )


def template(name: str) -> Any:
    """The config class of a template."""
    return from_file(str(TEMPLATES / f"{name}.py"))


@pytest.mark.parametrize("name", ENVS)
def test_a_file_checks_the_bounds_of_its_fields(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^learning_rate must be > 0, not -1\.0$"):
        Train(template(name)(learning_rate=-1.0), env=ENVS[name]).checked()


@pytest.mark.parametrize("name", ENVS)
def test_a_file_has_fields_of_its_original(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(template(name))}
    assert fields <= {field.name for field in dataclasses.fields(config_class(name))}
