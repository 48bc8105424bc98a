"""``--published`` against copies of the papers' tables, value by value, and of the authors'
code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_presets import task

from jaxrl_dist import cli
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.algorithms.published import TABLE
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import given
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.types import EnvSpec


def same(x: Any) -> Any:
    return x


def frames(x: float) -> float:
    """Four frames are a step."""
    return x / 4


# Name in the source, its value, the flag here and the conversion; a value without a flag has None.
Entry = tuple[str, Any, str | None, Callable[[Any], Any]]
DQN: list[Entry] = [  # Mnih et al. (2015), extended data table 1
    ("minibatch size", 32, "batch_size", same),
    ("replay memory size", 1_000_000, "replay_capacity", same),
    ("agent history length", 4, "frame_stack", same),
    ("target network update frequency", 10_000, "target_period", same),
    ("discount factor", 0.99, "discount", same),
    ("action repeat", 4, "atari_preset", lambda _: "baselines"),
    ("update frequency", 4, "replay_ratio", lambda x: 1 / x),
    ("learning rate", 0.00025, None, same),
    ("gradient momentum", 0.95, None, same),
    ("squared gradient momentum", 0.95, None, same),
    ("min squared gradient", 0.01, None, same),
    ("initial exploration", 1, "epsilon_start", same),
    ("final exploration", 0.1, "epsilon_end", same),
    ("final exploration frame", 1_000_000, "epsilon_steps", same),
    ("replay start size", 50_000, "learning_starts", same),
    ("no-op max", 30, "atari_preset", lambda _: "baselines"),
    # under Methods, Training algorithm
    ("error term of an update, clipped to", 1, "td_loss", lambda _: "huber"),
    ("limit of the gradient norm", None, "max_gradient_norm", lambda _: 1e9),
]
RAINBOW: list[Entry] = [  # Hessel et al. (2018), table 1, then the tables of the appendix
    ("min history to start learning", 80_000, "learning_starts", frames),
    ("Adam learning rate", 0.0000625, "learning_rate", same),
    ("exploration epsilon", 0.0, "epsilon_end", same),
    # an update each fourth step
    ("target network period", 32_000, "target_period", lambda x: frames(x) / 4),
    ("prioritization exponent", 0.5, "priority_exponent", same),
    ("prioritization importance sampling, first", 0.4, "importance_exponent", same),
    ("limit of the gradient norm", None, "max_gradient_norm", lambda _: 1e9),
    ("multi-step returns", 3, "n_step", same),
    ("distributional atoms", 51, "num_atoms", same),
    ("distributional min", -10, "value_min", same),
    ("distributional max", 10, "value_max", same),
    ("discount factor", 0.99, "discount", same),
    ("mini-batch size", 32, "batch_size", same),
    ("replay period every, agent steps", 4, "replay_ratio", lambda x: 1 / x),
    ("memory size", 1_000_000, "replay_capacity", same),
    ("observations down-sampling and stacked frames", 4, "frame_stack", same),
]
IMPALA: list[Entry] = [  # Espeholt et al. (2018), table G.1
    ("unroll length", 20, "rollout_length", same),
    ("batch size", 32, "num_envs", same),
    ("discount", 0.99, "discount", same),
    ("baseline loss scaling", 0.5, "value_coefficient", same),
    ("entropy regularizer", 0.01, "entropy_coefficient", same),
    ("learning rate", 0.0006, "learning_rate", same),
    ("clip global gradient norm", 40.0, "max_gradient_norm", lambda x: x / (20 * 32)),
    ("learning rate anneal, frames", 200_000_000, "learning_rate_steps", frames),
    ("frame stacking", 4, "frame_stack", same),
    ("RMSProp momentum", 0.0, None, same),
    ("RMSProp epsilon", 0.01, None, same),
]
PPO: list[Entry] = [  # Schulman et al. (2017), table 5; 40M frames, section 6.4
    ("horizon", 128, "rollout_length", same),
    ("Adam stepsize", 2.5e-4, "learning_rate", same),
    ("num epochs", 3, "num_epochs", same),
    ("minibatch size", 32 * 8, "num_minibatches", lambda x: 128 * 8 / x),
    ("discount", 0.99, "discount", same),
    ("GAE parameter", 0.95, "gae_lambda", same),
    ("number of actors", 8, "num_envs", same),
    ("clipping parameter", 0.1, "clip_epsilon", same),
    ("VF coeff", 1, "value_coefficient", lambda x: 2 * x),  # of half the squared error
    ("entropy coeff", 0.01, "entropy_coefficient", same),
    ("frames", 40_000_000, "learning_rate_steps", frames),
]
CRAFTAX: list[Entry] = [  # the arguments of Craftax_Baselines/ppo.py
    ("num_envs", 1024, "num_envs", same),
    ("total_timesteps", 1e9, "learning_rate_steps", same),
    ("lr", 2e-4, "learning_rate", same),
    ("num_steps", 64, "rollout_length", same),
    ("update_epochs", 4, "num_epochs", same),
    ("num_minibatches", 8, "num_minibatches", same),
    ("gamma", 0.99, "discount", same),
    ("gae_lambda", 0.8, "gae_lambda", same),
    ("clip_eps", 0.2, "clip_epsilon", same),
    ("clip_eps", 0.2, "value_clip_epsilon", same),
    ("ent_coef", 0.01, "entropy_coefficient", same),
    ("vf_coef", 0.5, "value_coefficient", same),
    ("max_grad_norm", 1.0, "max_gradient_norm", same),
    ("activation", "tanh", "activation", same),
    ("layer_size", 512, "hidden_sizes", lambda x: (x,) * 3),
]


def brax_ppo(
    batch_size: int, unroll: int, num_envs: int, epochs: int, discount: float, entropy: float
) -> list[Entry]:
    """The arguments of ppo.train in Brax's notebook;
    all have 32 minibatches and a learning rate of 3e-4.
    """
    return [
        ("batch_size", batch_size, "rollout_length", lambda x: x * 32 * unroll / num_envs),
        ("num_envs", num_envs, "num_envs", same),
        ("num_minibatches", 32, "num_minibatches", same),
        ("num_updates_per_batch", epochs, "num_epochs", same),
        ("discounting", discount, "discount", same),
        ("learning_rate", 3e-4, "learning_rate", same),
        ("entropy_cost", entropy, "entropy_coefficient", same),
        ("normalize_observations", True, "normalize_observations", same),
    ]


def brax_sac(batch_size: int, updates: int, action_size: int) -> list[Entry]:
    """The arguments of sac.train in Brax's notebook:
    ``updates`` follow a step of all 128 environments.
    """
    return [
        (
            "target_entropy, as a multiple of action_size",
            -0.5,
            "target_entropy",
            lambda x: x * action_size,
        ),
        ("num_envs", 128, "num_envs", same),
        ("batch_size", batch_size, "batch_size", same),
        ("grad_updates_per_step", updates, "replay_ratio", lambda x: x / 128),
        ("discounting", 0.997, "discount", same),
        ("learning_rate", 6e-4, "learning_rate", same),
        ("learning_rate", 6e-4, "actor_learning_rate", same),
        ("max_replay_size", 1048576, "replay_capacity", same),
        ("min_replay_size", 8192, "learning_starts", same),
        ("normalize_observations", True, "normalize_observations", same),
    ]


SOURCES: dict[tuple[str, str], list[Entry]] = {
    ("dqn", "atari"): DQN,
    ("rainbow", "atari"): RAINBOW,
    ("impala", "atari"): IMPALA,
    ("ppo", "atari"): PPO,
    ("ppo", "craftax:Craftax-Symbolic-v1"): CRAFTAX,
    ("ppo", "brax:ant"): brax_ppo(2048, 5, 4096, 4, 0.97, 1e-2),
    ("ppo", "brax:halfcheetah"): brax_ppo(512, 20, 2048, 8, 0.95, 1e-3),
    ("ppo", "brax:humanoid"): brax_ppo(1024, 10, 2048, 8, 0.97, 1e-3),
    ("sac", "brax:hopper"): brax_sac(512, 64, 3),
    ("sac", "brax:walker2d"): brax_sac(128, 32, 6),
}
FURTHER = {
    *(
        "double",
        "epsilon_start",
        "torso",
        "scale_rewards",
        "learning_rate_schedule",
        "value_clip_epsilon",
    ),
    *(
        "max_gradient_norm",
        "activation",
        "hidden_sizes",
        "initial_std",
        "clip_epsilon",
        "gae_lambda",
        "target_rate",
    ),
    *("value_coefficient", "rollout_length", "n_step", "atari_preset", "learning_rate"),
}
"""Flags that a row may have beside the table's: what the text of the paper says,
or defaults of the authors' code."""


def spec_of(where: str) -> EnvSpec:
    if where == "atari":
        return task("atari")
    backend, _, name = where.partition(":")
    kind = "unknown/continuous" if backend == "brax" else "unknown"
    return dataclasses.replace(task(kind), backend=backend, id=name, family=backend)


def test_every_row_has_a_source() -> None:
    assert {(name, where) for name, rows in TABLE.items() for where in rows} == SOURCES.keys()


@pytest.mark.parametrize("name, where", SOURCES)
def test_every_value_is_that_of_the_source(name: str, where: str) -> None:
    row, spec = TABLE[name][where], spec_of(where)
    for entry, value, flag, convert in SOURCES[name, where]:
        if flag is not None:
            assert row[flag] == convert(value), entry
    assert row.keys() - {flag for *_, flag, _ in SOURCES[name, where]} <= FURTHER
    source: Any = SimpleNamespace(spec=spec, is_pure=where != "atari")
    config, _ = given.filled(given.user_values(Train(name, env=where, published=True)), source)
    config.validate()
    for flag, value in row.items():
        owner = config if flag in given.RUN_FIELDS else config.algorithm
        assert getattr(owner, flag) == value, flag
    for devices in (1, 8):
        check_sizes(config, make_algorithm(config, spec), spec, devices)


def test_what_nobody_has_published_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "sac", "--env", "CartPole-v1", "--published"]) == 2
    assert "--published has no values for sac on gymnax:CartPole-v1; it has: dqn on atari" in (
        capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="published has no values for a2c"):
        given.filled(
            given.user_values(Train(config_class("a2c")(), env="x", published=True)),
            SimpleNamespace(spec=task("minatar"), is_pure=True),  # type: ignore[arg-type]
        )


def test_presets_print_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "rainbow", "--env", "envpool:Pong-v5", "--published"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert (
        "--published" in line
        and "--replay-capacity 1000000" in line
        and "--target-period 2000" in line
    )
    assert cli.main(["presets"]) == 0
    assert (
        "with --published, from papers and the environments' authors: dqn on atari"
        in capsys.readouterr().out
    )
