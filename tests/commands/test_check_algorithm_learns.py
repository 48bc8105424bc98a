"""``check-algorithm`` tells an algorithm that avoids rewards from one that seeks them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from test_check_algorithm import RIGHT, algorithm_of
from test_docs import blocks

import jaxrl_dist
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.commands.check_algorithm import check, learning, made_up
from jaxrl_dist.commands.check_env.findings import Check
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete
from jaxrl_dist.types import Rollout, TrainState, Variables


def judged(step: float, **traits: bool) -> list[str]:
    """What is said of an algorithm whose parameter is how large actions are,
    and follows the reward by ``step``.
    """

    def acting(variables: Any, actor: int, iteration: Any, env_step: Any, first: Any) -> Any:
        reward = np.full((16, 8), 2.0 * variables[""].params - 1.0)
        rollout = Rollout(
            (), (), reward, (), (), np.arange(16)[:, None] % 4 < np.full(8, 3), (), (), ()
        )  # type: ignore[arg-type]
        return (
            actor + 1,
            {"": rollout._replace(reward=np.where(rollout.valid, reward + 0.3, 9.0))},
            None,
        )

    def update(state: Any, experience: Any, key: Any) -> Any:
        went = state.variables[""].params + step * state.opt_state[""].learns * np.sign(
            experience[""].reward[0, 0]
        )
        variables = {"": Variables(np.clip(went, 0.4, 0.8), ())}
        return state._replace(variables=variables, updates={"": state.updates[""] + 1}), {}

    counts = {"": np.int32(0)}
    recorded = SimpleNamespace(_replace=lambda learns: SimpleNamespace(learns=learns))
    state = TrainState(
        {"": Variables(0.5, ())}, (), {"": recorded}, counts, counts, {"": np.float32(0)}, counts
    )  # type: ignore[arg-type]
    found = Check("mine")
    algorithm: Any = SimpleNamespace(**{"searches": False, "episodic": False, **traits})
    programs = learning.Programs(lambda: 0, acting, update, state, jax.random.key(0))
    learning.check_learns(found, algorithm, programs)
    return [*found.faults.values(), *found.notes]


def test_only_what_avoids_rewards_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert not judged(0.01)
    phase = "training with rewards that grow with the action, and with rewards that fall with it"
    assert capsys.readouterr() == ("", f"jaxrl-dist: {phase} ...\n")
    assert not judged(0.0) and not judged(np.nan)
    (told,) = judged(-0.01)
    start = "after 100 updates with rewards that grow with the action, actions are at "
    assert told.startswith(
        f"{start}55% of their range, and at 95% with rewards that fall with it; the sign of a loss"
    )
    (told,) = judged(-1e-5)
    assert told.startswith(
        f"{start}64% of their range, and at 66% with rewards that fall with it, so it learns little"
    )
    assert not judged(-0.01, searches=True) and not judged(-0.01, episodic=True)


def test_rewards_grow_with_the_action() -> None:
    low, high = np.float32([-2, -np.inf]), np.float32([2, np.inf])
    box = Box((2,), np.dtype(np.float32), low, high)
    actions = {
        "a": (Discrete(3), np.int32([0, 1, 2])),
        "b": (MultiDiscrete((2, 5)), np.int32([[0, 0], [1, 0], [1, 4]])),
        "c": (box, np.float32([[-2, -9], [2, -3], [2, 9]])),
        "d": (Discrete(1), np.int32([0, 0, 0])),
    }
    for name, paid in {
        "a": [-1, 0, 1],
        "b": [-1, 0, 1],
        "c": [-1, 0, 1],
        "d": [-1, -1, -1],
    }.items():
        np.testing.assert_allclose(made_up._pay(*actions[name]), paid, atol=1e-6)
    spaces, values = (
        {name: pair[i] for name, pair in actions.items() if name in "ab"} for i in (0, 1)
    )
    np.testing.assert_allclose(made_up._pay(spaces, values), [-1, 0, 1], atol=1e-6)


TURNED = {
    "ppo": ("policy_loss = -jnp.minimum", "policy_loss = jnp.minimum", "CartPole-v1"),
    "dqn": (
        'self.bellman(batch["reward"], batch',
        'self.bellman(-batch["reward"], batch',
        "CartPole-v1",
    ),
    "sac": ("actor_losses = -(new_q", "actor_losses = (new_q", "Pendulum-v1"),
    "td3": ("actor_loss = -climbed\n", "actor_loss = climbed\n", "Pendulum-v1"),
    "advantages": ("clip(advantage", "clip(-advantage", "CartPole-v1"),
    "target": ('"q_target": rollout', '"q_target": -rollout', "CartPole-v1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TURNED)
def test_a_turned_sign_is_told(name: str) -> None:
    old, new, env = TURNED[name]
    own = {"advantages": RIGHT, "target": blocks("docs/adding-an-off-policy-algorithm.md")[0]}
    text = own.get(name) or inspect.getsource(inspect.getmodule(config_class(name)))  # type: ignore[arg-type]
    assert old in text
    config, source = resolved(jaxrl_dist.preset(algorithm_of(text.replace(old, new)), env))
    lines = check(config, source.spec).lines("mine", "")
    # With its actor's sign turned, SAC also minimises entropy,
    # and may fix its actions before the critic has learned.
    told = (
        "a sign may be wrong"
        if name == "sac"
        else "the sign of a loss, advantage or target is wrong"
    )
    assert told in lines[0] and (name == "sac" or len(lines) == 1), lines
