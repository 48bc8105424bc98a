"""Runs on observations with parts: on any number of devices, after a resume,
and as a loaded policy.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import parts
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.play.export import export

SIZES: dict[str, Any] = {
    "num_envs": 8, "report_interval": 128, "evaluation_episodes": 2, "hidden_sizes": (8,), "num_devices": 1,
    "total_env_steps": 384, "normalize_observations": True,
}  # fmt: skip
ON_POLICY = {"rollout_length": 16, "num_minibatches": 2, "num_epochs": 2}
INFO = {"where": "info"}
REPLAY = {
    "replay_capacity": 512,
    "batch_size": 16,
    "learning_starts": 64,
    "replay_ratio": 1 / 16,
    "rollout_length": 8,
}


def train(name: str, env: Any, **fields: Any) -> list[Any]:
    return list(jaxrl_dist.train(jaxrl_dist.preset(name, env, **{**SIZES, **fields})))


@pytest.mark.parametrize(
    "name, fields",
    [
        pytest.param("ppo", ON_POLICY, marks=pytest.mark.case),
        pytest.param("dqn", REPLAY, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_give_what_one_gives(name: str, fields: dict[str, Any]) -> None:
    one, eight = (
        train(name, parts.Grid(), **fields, num_devices=count, total_env_steps=128)[-1].variables()
        for count in (1, 8)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), one, eight)


@pytest.mark.parametrize(
    "name, fields",
    [
        pytest.param(
            "dqn", {**REPLAY, "priority_exponent": 0.5, "env": "parts:Grid"}, marks=pytest.mark.case
        ),
        pytest.param(
            "ppo", {**ON_POLICY, "core": "gru", "env": "parts:Grid"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    env = fields.pop("env")
    here = jaxrl_dist.preset(name, env, **{**SIZES, **fields, "plan": "on_device"})
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    list(jaxrl_dist.train(dataclasses.replace(here, total_env_steps=160, run_dir=str(halves))))
    list(jaxrl_dist.resume(halves, total_env_steps=384, env=env))
    list(jaxrl_dist.train(dataclasses.replace(here, run_dir=str(whole))))
    assert runs.untimed(halves) == runs.untimed(whole)


@pytest.mark.case  # play/test_export.py::test_an_exported_policy_acts_the_same_without_this_package
def test_a_policy_is_loaded_and_exported_with_its_parts(tmp_path: Path) -> None:
    """Parts that only the critic sees may be missing then."""
    train("ppo", "parts:Secret", **ON_POLICY, critic_sees="state", run_dir=str(tmp_path / "run"))
    policy = jaxrl_dist.load_policy(tmp_path / "run", env="parts:Secret")
    hint = np.array([[1.0], [-1.0], [1.0]], np.float32)
    whole, _ = policy({"hint": hint, "state": np.full((3, 1), 0.9, np.float32)})
    action, _ = policy({"hint": hint})
    jax.tree.map(np.testing.assert_array_equal, action, whole)
    assert action["guess"].shape == (3, 1) and action["sign"].shape == (3,)
    with pytest.raises(ValueError, match="observations are dicts here, with hint; hint is missing"):
        policy(hint)
    with pytest.raises(ValueError, match=r"\[1\].*jax.tree.map\(lambda.*x\[None\]"):
        policy({"hint": hint[0]})
    with pytest.raises(ValueError, match=r"observations hint have shape \[B, 1\] here, not \[3\]"):
        policy({"hint": hint[:, 0]})
    with pytest.raises(
        ValueError, match="observations have no part speed here; their parts are hint, state"
    ):
        policy({"hint": hint, "speed": hint})
    export(policy, tmp_path / "policy.bin")
    loaded = jax.export.deserialize((tmp_path / "policy.bin").read_bytes())
    again, _ = loaded.call({"hint": hint}, (), np.ones(3, bool))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), again, action)


@pytest.mark.case  # play/test_export.py::test_an_exported_policy_acts_the_same_without_this_package
def test_an_exported_policy_takes_the_mask_that_gymnasium_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = "parts:HostGrid"
    train(
        "ppo",
        env,
        **ON_POLICY,
        env_options=INFO,
        total_env_steps=128,
        run_dir=str(tmp_path / "run"),
    )
    out = tmp_path / "policy.bin"
    assert cli.main(["export", str(tmp_path / "run"), "--env", env, "-o", str(out)]) == 0
    assert "the parts of obs: mask int8[b,4], observation float32[b,2]\n" in capsys.readouterr().out
    own = parts.HostGrid("info")
    shown, info = own.reset()
    assert info["action_mask"].dtype == np.int8
    obs = {
        "observation": np.float32([shown, shown]),
        "mask": np.stack([info["action_mask"], np.int8([0, 0, 0, 1])]),
    }
    action, _ = jax.export.deserialize(bytearray(out.read_bytes())).call(obs, (), np.ones(2, bool))
    assert action[0] in (0, 1) and action[1] == 3


PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "synchronous": ("ppo", "parts:HostGrid", {"env_workers": "processes", **ON_POLICY}),
    "asynchronous": (
        "impala",
        "parts:HostGrid",
        {"plan": "asynchronous", "env_options": INFO, "rollout_length": 16},
    ),
    "components": ("ppo", "parts:HostGrid", {"env_options": {"wide": "true"}, **ON_POLICY}),
    "replay": ("dqn", "parts:Grid", {"plan": "asynchronous", **REPLAY}),
}
SLOW_PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stacks-host": ("dqn", "parts:HostGrid", {"frame_stack": 2, "env_options": INFO, **REPLAY}),
    "gradients": (
        "a2c",
        "parts:HostGrid",
        {"plan": "gradients", "rollout_length": 16, "normalize_observations": False},
    ),
    "stacks": (
        "dqn",
        "parts:Grid",
        {"frame_stack": 2, "env_options": {"where": "state"}, **REPLAY},
    ),
    "appo": ("appo", "parts:Grid", ON_POLICY),
    **{name: (name, "parts:Grid", {"rollout_length": 16}) for name in ("a2c", "pg")},
    **{name: (name, "parts:Grid", {}) for name in ("es", "ars")},
    **{name: (name, "parts:Grid", REPLAY) for name in ("rainbow", "r2d2", "sac")},
}


@pytest.mark.parametrize(
    "case",
    [
        *runs.cases(PLANS, "asynchronous"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_PLANS),
    ],
)
def test_every_plan_takes_parts_and_masks(case: str) -> None:
    """The environments of ``parts`` fail, or pay -10, at the first illegal action."""
    name, env, fields = (PLANS | SLOW_PLANS)[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports = train(name, env, **fields)
    worst = [report.metrics["episode/return_min"] for report in reports]
    assert (
        min(x for x in worst if x is not None) > -9.0
        and reports[-1].evaluation["return_mean"] > -9.0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, env, fields",
    [
        ("ppo", "parts:Both", {}),
        ("ppo", "parts:HostBoth", {"env_workers": "threads"}),
        ("ppo", "parts:HostBoth", {"env_workers": "processes"}),
        ("impala", "parts:Both", {"plan": "asynchronous"}),
        ("impala", "parts:HostBoth", {"plan": "asynchronous"}),
    ],
)
def test_a_picture_and_a_number_that_say_it_together_are_learnt(
    name: str, env: str, fields: dict[str, Any]
) -> None:
    """The best return is 4. A policy that ignores either part gets 2 on average,
    whatever it does with the other.
    """
    sizes = {"num_devices": 1, "num_envs": 16, "total_env_steps": 60_000, "report_interval": 10_000}
    config = jaxrl_dist.preset(
        name, env, **sizes, **fields, learning_rate=1e-3, evaluation_episodes=100
    )
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation["return_mean"] > 3.9
