"""MuZero: its loss against a loop in float64 over windows with every kind of end,
and what its policy plans.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
from probes import assert_close, box, perturbed, random_rollout, spec, squash

import jaxrl_dist
from jaxrl_dist import mesh, returns
from jaxrl_dist.algorithms import searching
from jaxrl_dist.algorithms.muzero import MuZero
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import models
from jaxrl_dist.types import Context, Rollout, Variables

K, N_STEP, DISCOUNT = 3, 2, 0.9
TINY: dict[str, Any] = {"hidden_sizes": (4,), "state_size": 4, "num_atoms": 9, "value_limit": 3.0}
TINY |= {"unroll_steps": K, "n_step": N_STEP, "discount": DISCOUNT, "num_simulations": 2}
ENV = spec()
ENDS = "terminated", "truncated", "both", "lost"
"""Kinds of ends: the task's, a time limit's, both in one step,
and that of an environment that had to be made again."""


@functools.cache
def algorithm(bootstrap: str = "stored") -> Any:
    return MuZero(**TINY, bootstrap=bootstrap).make(ENV)


def every_end(algorithm: Any) -> Rollout:
    """Windows with no end, with each kind of end at each step,
    and with a second episode that ends later.
    """
    steps = algorithm.window
    plans: list[list[tuple[int, str]]] = [[]]
    for kind in ENDS:
        for first in range(steps):
            plans.append([(first, kind)])
            plans += [[(first, kind), (second, "terminated")] for second in range(first + 2, steps)]
    rollout = random_rollout(algorithm, ENV, steps, len(plans) + 1, end_chance=0.0)
    terminated, truncated, valid = (np.zeros_like(rollout.valid) for _ in range(3))
    valid |= True
    for i, plan in enumerate(plans):
        for step, kind in plan:
            terminated[step, i] = kind in ("terminated", "both")
            truncated[step, i] = kind in ("truncated", "both")
            if step + 1 < steps:
                valid[step + 1, i] = False
    valid[0, -1] = False  # a window that begins on a reset counts for nothing
    reward = np.where(valid, np.random.default_rng(1).normal(size=valid.shape), 0.0).astype(
        np.float32
    )
    return rollout._replace(reward=reward, terminated=terminated, truncated=truncated, valid=valid)


class Steps:
    """What one window says of each state of its unroll, by a walk through it in float64."""

    def __init__(self, x: Rollout, values: np.ndarray, i: int) -> None:
        self.acts, self.ended = np.zeros(K + 1, bool), np.zeros(K + 1, bool)
        self.value, self.reward = np.zeros(K + 1), np.zeros(K + 1)
        state = "going"
        for k in range(K + 1):
            if state == "going" and not x.valid[k, i]:
                state = "unknown"
            self.acts[k], self.ended[k] = state == "going", state == "ended"
            if state == "going":
                self.reward[k] = x.reward[k, i]
                self.value[k] = self._return(x, values, i, k)
                if x.terminated[k, i]:
                    state = "ended"
                elif x.truncated[k, i]:
                    state = "unknown"

    def _return(self, x: Rollout, values: np.ndarray, i: int, start: int) -> float:
        total, factor = 0.0, 1.0
        for t in range(start, start + N_STEP):
            if not x.valid[t, i]:
                break
            total += factor * float(x.reward[t, i])
            factor *= DISCOUNT
            if x.terminated[t, i]:
                return total
            if x.truncated[t, i]:
                return total + factor * float(values[t + 1, i])
        else:
            t += 1
        return total + factor * float(values[t, i])


@functools.cache
def problem(bootstrap: str) -> tuple[Any, ...]:
    """Parameters away from their start, the windows, their batch and the loss of parameters."""
    made = algorithm(bootstrap)
    params, target = (perturbed(made.init(jax.random.key(0)).params, seed) for seed in (1, 2))
    rollout = every_end(made)
    keys = jax.random.split(jax.random.key(3), rollout.valid.shape[1])
    context = Context(keys, target=target)
    batch = jax.jit(made.postprocess)(Variables(params, ()), rollout, context)
    loss = jax.jit(lambda params, batch: made.loss(Variables(params, ()), batch, context))
    values = rollout.extras["value"]
    if bootstrap == "current":
        model = models.make_model(MuZero(**TINY), ENV.observation, 3, 4, 9)
        logits = jax.vmap(lambda obs: model.predict(target, model.represent(target, obs))[1])(
            rollout.obs
        )
        values = np.vectorize(unscaled)(np.float64(jax.nn.softmax(logits)) @ ATOMS)
    return (
        params,
        rollout,
        jax.device_get(batch),
        loss,
        [Steps(rollout, values, i) for i in range(len(keys))],
    )


@pytest.mark.case  # test_losses; a flag
def test_reanalysis_searches_a_share_of_the_windows_anew() -> None:
    """With the newest parameters; the other windows keep the policies of the searches that
    acted.
    """
    made = MuZero(**TINY, reanalyse=0.5).make(ENV)
    params = perturbed(made.init(jax.random.key(0)).params, 1)
    rollout = random_rollout(made, ENV, made.window, 6, end_chance=0.2)
    old, chosen = np.moveaxis(rollout.extras["weights"][: K + 1], 0, 1), []
    postprocess, policy = jax.jit(mesh.by_hand(made.postprocess)), jax.jit(made.policy)
    for seed in range(8):
        keys = jax.random.split(jax.random.key(seed), 6)
        batch = postprocess(Variables(params, ()), rollout, Context(keys, target=params))
        new = np.asarray(batch["weights"])
        chosen.append(np.flatnonzero((new != old).any(axis=(1, 2))))
        assert len(chosen[-1]) == 3
    assert {*np.concatenate(chosen)} == {*range(6)}, "each window at times"
    again = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, 1), K + 2))(keys)
    for window, step in itertools.product(chosen[-1], range(K + 1)):
        context = Context(again[window, 1 + step][None], jnp.float32(0))
        acted = policy(Variables(params, ()), rollout.obs[step, window][None], (), context)
        np.testing.assert_allclose(new[window, step], acted[2]["weights"][0], atol=1e-5)


ATOMS = np.linspace(-squash(3.0), squash(3.0), 9)


def unscaled(x: float) -> float:
    """The inverse of ``squash`` by bisection."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if squash(middle) < x else (low, middle)
    return low


def two_hot(x: float) -> np.ndarray:
    """Shares of the atoms around a value, found by a walk along them."""
    y, shares = min(max(squash(x), ATOMS[0]), ATOMS[-1]), np.zeros(len(ATOMS))
    for j in range(len(ATOMS) - 1):
        if ATOMS[j] <= y <= ATOMS[j + 1]:
            high = (y - ATOMS[j]) / (ATOMS[j + 1] - ATOMS[j])
            shares[j], shares[j + 1] = 1 - high, high
            return shares
    raise AssertionError(x)


@pytest.mark.parametrize("bootstrap", ["stored", pytest.param("current", marks=pytest.mark.case)])
def test_targets_of_every_end(bootstrap: str) -> None:
    _, rollout, batch, _, expected = problem(bootstrap)
    assert rollout.valid.shape == (K + N_STEP + (bootstrap == "stored"), len(expected))
    for name, of_step in {"acts": "acts", "value": "value", "reward": "reward"}.items():
        wanted = np.stack([getattr(steps, of_step) for steps in expected])[
            :, : batch[name].shape[1]
        ]
        np.testing.assert_allclose(batch[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    known = np.stack([steps.acts | steps.ended for steps in expected])
    np.testing.assert_array_equal(batch["known"], known)
    assert {*batch["valid"]} == {True, False} and not batch["valid"][-1]
    # An episode's last step is learnt from; after a time limit nothing is,
    # and after an end that nothing comes.
    first = next(
        i for i in range(len(expected)) if rollout.terminated[0, i] and not rollout.truncated[0, i]
    )
    assert (
        batch["acts"][first].tolist() == [True, False, False, False] and batch["known"][first].all()
    )
    assert batch["reward"][first, 0] == batch["value"][first, 0] == rollout.reward[0, first] != 0
    cut = next(
        i for i in range(len(expected)) if rollout.truncated[0, i] and not rollout.terminated[0, i]
    )
    assert batch["known"][cut].tolist() == [True, False, False, False]


def test_actions_after_an_end_are_random() -> None:
    _, rollout, batch, _, expected = problem("stored")
    ended = np.stack([steps.ended for steps in expected])[:, :K]
    np.testing.assert_array_equal(batch["action"][~ended], rollout.action[:K].T[~ended])
    assert {*batch["action"][ended]} == {0, 1, 2} and (
        batch["action"] != rollout.action[:K].T
    ).any()


def test_losses() -> None:
    params, _, batch, loss, expected = problem("stored")
    model = models.make_model(MuZero(**TINY), ENV.observation, 3, 4, 9)
    logits = []  # of each step: policy, value and reward
    state = model.represent(params, batch["obs"])
    for k in range(K + 1):
        policy, value = model.predict(params, state)
        if k < K:
            state, reward = model.advance(params, state, batch["action"][:, k])
        logits.append([np.asarray(x, np.float64) for x in (policy, value, reward)])

    def cross(target: np.ndarray, logits: np.ndarray) -> float:
        return float(-(target * (logits - np.log(np.exp(logits).sum()))).sum())

    sums: dict[str, list[float]] = {"policy": [], "value": [], "reward": []}
    for i, steps in enumerate(expected):
        total = dict.fromkeys(sums, 0.0)
        for k in range(K + 1):
            policy, value, reward = (x[i] for x in logits[k])
            share = 1.0 if k == 0 else 1 / K
            if steps.acts[k]:
                total["policy"] += share * cross(batch["weights"][i, k], policy)
            if steps.acts[k] or steps.ended[k]:
                total["value"] += share * cross(two_hot(steps.value[k]), value)
                if k < K:
                    total["reward"] += cross(two_hot(steps.reward[k]), reward) / K
        for name in sums:
            sums[name].append(total[name])
    losses, mask, aux = loss(params, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    for name, wanted in sums.items():
        close(aux.metrics[f"loss/{name}"], wanted, err_msg=name)
    close(losses, np.array(sums["policy"]) + 0.25 * np.array(sums["value"]) + sums["reward"])
    np.testing.assert_array_equal(mask, batch["valid"])
    root = [unscaled(float(np.exp(v) @ ATOMS / np.exp(v).sum())) for v in logits[0][1]]
    close(aux.metrics["value/mean"], root)
    close(aux.priority, np.abs(np.array(root) - [steps.value[0] for steps in expected]))


@pytest.mark.case  # test_losses
def test_the_dynamics_get_half_of_the_gradient_of_their_state() -> None:
    """The first window's state before the unroll gets all of the gradient of its own step,
    and half of the others'.
    """
    params, _, batch, loss, _ = problem("stored")
    one = {name: x[:1] for name, x in batch.items()}
    model = models.make_model(MuZero(**TINY), ENV.observation, 3, 4, 9)

    def parts(encoder: Any, half: float) -> jax.Array:
        """Only the policy's losses, of which each later one passes the dynamics once more."""
        state, total = model.represent({**params, "encode": encoder}, one["obs"]), 0.0
        for k in range(K + 1):
            cross = -jnp.sum(
                one["weights"][:, k] * jax.nn.log_softmax(model.predict(params, state)[0])
            )
            total += (1.0 if k == 0 else 1 / K) * cross
            state = half * state + (1 - half) * jax.lax.stop_gradient(state)
            if k < K:
                state, _ = model.advance(params, state, one["action"][:, k])
        return total

    found = jax.grad(lambda x: loss({**params, "encode": x}, one)[2].metrics["loss/policy"].sum())(
        params["encode"]
    )
    near = functools.partial(
        jax.tree.map, lambda a, b: bool(np.allclose(a, b, rtol=1e-3, atol=1e-6))
    )
    assert all(jax.tree.leaves(near(found, jax.grad(parts)(params["encode"], 0.5))))
    assert not all(jax.tree.leaves(near(found, jax.grad(parts)(params["encode"], 1.0))))


def test_values_survive_the_way_to_atoms_and_back() -> None:
    """Two-hot shares have the value as their mean, beyond the outermost atoms its bound."""
    atoms = jnp.asarray(ATOMS, jnp.float32)
    x = np.float32([-9, -3, -2.9, -0.7, 0, 1e-3, 0.2, 1, 2.5, 3, 40])
    shares = jax.vmap(lambda y: returns.project(returns.rescale(y)[None], jnp.ones(1), atoms))(x)
    np.testing.assert_allclose(shares, [two_hot(float(y)) for y in x], atol=1e-5)
    assert ((np.asarray(shares) > 1e-6).sum(axis=1) <= 2).all()
    np.testing.assert_allclose(
        returns.unscale(shares @ atoms), np.clip(x, -3, 3), rtol=1e-4, atol=1e-5
    )


# --- Planning -------------------------------------------------------------------------------------


def acting(config: MuZero, env: Any = ENV, rows: int = 6, seed: int = 1) -> Any:
    made = config.make(env)
    params = perturbed(made.init(jax.random.key(0)).params, seed)
    obs = random_rollout(made, env, 1, rows).obs
    obs = jax.tree.map(lambda x: x[0], obs)
    policy = jax.jit(made.policy)
    return lambda keys, rows=slice(None), env_step=0.0: policy(
        Variables(params, ()),
        jax.tree.map(lambda x: x[rows], obs),
        (),
        Context(keys, jnp.float32(env_step)),
    )


@pytest.mark.case  # test_searching.py::test_a_row_finds_the_same_whatever_the_others_are
@pytest.mark.parametrize("search", ["gumbel", "puct"])
def test_a_row_plans_by_itself(search: str) -> None:
    """What it finds depends on its key alone, not on the rows beside it; greedily on nothing."""
    act = acting(MuZero(**{**TINY, "num_simulations": 6}, search=search))
    keys = jax.random.split(jax.random.key(4), 6)
    for whole, part in (
        (act(keys), act(keys[2:5], slice(2, 5))),
        (act(None), act(None, slice(2, 5))),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[2:5], b, rtol=1e-5, atol=1e-6), whole, part
        )
    action, _, extras = act(keys)
    np.testing.assert_allclose(extras["weights"].sum(axis=1), 1.0, rtol=1e-5)
    assert action.dtype == np.int32 and extras["value"].shape == (6,)
    drawn = np.stack([act(jax.random.split(jax.random.key(seed), 6))[0] for seed in range(20)])
    assert (drawn != drawn[:1]).any() and len(
        {*map(tuple, [np.asarray(act(None)[0]) for _ in range(3)])}
    ) == 1


@pytest.mark.case  # test_actions_after_an_end_are_random
def test_the_temperature_falls() -> None:
    flags = {"temperature_end": 0.0, "temperature_steps": 100, "num_simulations": 6}
    act = acting(MuZero(**{**TINY, **flags}))
    drawn = {
        step: np.stack(
            [act(jax.random.split(jax.random.key(seed), 6), env_step=step)[0] for seed in range(20)]
        )
        for step in (0.0, 100.0, 200.0)
    }
    assert (drawn[0.0] != drawn[0.0][:1]).any()
    assert (drawn[100.0] == drawn[200.0]).all() and (drawn[100.0] == np.asarray(act(None)[0])).all()


def test_a_new_model_plans_uniformly() -> None:
    """Its values and rewards are all 0: nothing is preferred before something is learnt."""
    made = algorithm()
    variables = made.init(jax.random.key(5))
    obs = jnp.ones((4, 3))
    _, _, extras = jax.jit(made.policy)(
        variables, obs, (), Context(jax.random.split(jax.random.key(0), 4))
    )
    np.testing.assert_allclose(extras["weights"], 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(extras["value"], 0.0, atol=1e-6)


def own_torso() -> tuple[Any, Any]:
    """A torso of the user's: a pair of functions."""
    return lambda key, x: {"w": jax.random.normal(key, (3, 5))}, lambda params, x: x @ params["w"]


READ: dict[str, tuple[Any, dict[str, Any]]] = {
    "a table": (box(6, 5), {}),
    "an image": (box(12, 12, 4), {}),
    "parts and a mask": (
        {"board": box(12, 12, 2), "clock": box(1), "legal": box(3, dtype=np.int8, bound=1)},
        {},
    ),
    "own torso": (None, {"torso": own_torso()}),
}


@pytest.mark.parametrize("name", READ)
def test_a_model_reads_every_kind_of_observation(name: str) -> None:
    observation, flags = READ[name]
    env = dataclasses.replace(
        spec(observation), mask="legal" if isinstance(observation, dict) else None
    )
    made = MuZero(**{**TINY, **flags}).make(env)
    rollout, keys = (
        random_rollout(made, env, made.window, 2),
        jax.random.split(jax.random.key(0), 2),
    )

    def learnt() -> Any:
        variables = made.init(keys[0])
        context = Context(keys, target=made.initial_target(variables.params))
        return made.loss(variables, made.postprocess(variables, rollout, context), context)[0]

    assert jax.eval_shape(learnt).shape == (2,)


def test_states_are_scaled() -> None:
    state = models.scaled(jnp.float32([[-3, 0, 5], [2, 2, 2]]))
    np.testing.assert_allclose(state, [[0, 3 / 8, 1], [0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"core": "gru"}, "core does not work with muzero"),
        (
            {"target_period": 9, "bootstrap": "stored"},
            "target_period does nothing without bootstrap",
        ),
        ({"temperature_steps": 9}, "temperature_steps does nothing without temperature_end"),
        ({"dirichlet_alpha": 0.1}, "dirichlet_alpha does nothing without search"),
        (
            {"search": "puct", "max_considered_actions": 4},
            "max_considered_actions does nothing without search",
        ),
    ],
)
def test_flags_that_do_nothing_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MuZero(**flags).validate()


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="muzero needs discrete actions"):
        MuZero().make(spec(action=box(2, bound=1.0)))


def test_both_sides_of_a_game_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="muzero cannot play both sides of Test-v0; use alphazero",
    ):
        MuZero().make(dataclasses.replace(spec(), both_sides=True))


# --- Values scaled by the whole tree --------------------------------------------------------------


@pytest.mark.case  # a flag
def test_small_differences_count_little_on_the_scale_of_the_tree() -> None:
    """Actions whose values differ by 0.1 where later ones differ by 10."""

    def step(params: Any, keys: Any, action: Any, state: Any) -> Any:
        reward = jnp.where(state == 0, 0.1 * action, 10.0 * (action == 1))
        return (
            reward,
            jnp.ones(len(state)),
            jnp.zeros((len(state), 2)),
            jnp.zeros(len(state)),
            state + 1.0,
        )

    def weights(bounds: str) -> Any:
        config = MuZero(num_simulations=16, value_bounds=bounds, discount=1.0)  # type: ignore[arg-type]
        roots = jnp.zeros((1, 2)), jnp.zeros(1), jnp.zeros(1), None
        return jax.jit(lambda: searching.search(config, step, {}, *roots, None).weights[0])()

    node, tree = weights("node"), weights("tree")
    assert node[1] > tree[1] >= 0.5


# --- Runs -----------------------------------------------------------------------------------------


@pytest.mark.case  # as above
def test_reanalysis_runs_on_one_device_and_is_refused_on_more() -> None:
    fields = {**RUN, "total_env_steps": 128, "reanalyse": 0.5}
    *_, last = jaxrl_dist.train(jaxrl_dist.preset("muzero", own.Walk(), **fields))
    assert last.updates > 0 and np.isfinite(last.metrics["loss/policy"])
    with pytest.raises(ConfigError, match="reanalyse searches on one device"):
        list(
            jaxrl_dist.train(
                jaxrl_dist.preset("muzero", own.Walk(), **{**fields, "num_devices": 2})
            )
        )


RUN: dict[str, Any] = {
    **TINY,
    "num_envs": 8,
    "rollout_length": 4,
    "num_devices": 1,
    "report_interval": 32,
}
RUN |= {"learning_starts": 32, "batch_size": 8, "replay_ratio": 1 / 16, "replay_capacity": 512}
RUN |= {
    "evaluation_episodes": 0,
    "normalize_observations": True,
    "ema_steps": 100,
    "priority_exponent": 0.5,
}


@pytest.mark.case  # plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs
def test_a_member_is_its_lone_run_and_resuming_changes_nothing(tmp_path: Path) -> None:
    """With other values of floats, observations that are scaled, priorities, and averages that
    act.
    """
    vary: dict[str, Any] = {"value_limit": [2.0, 4.0], "temperature_start": [1.0, 0.5]}
    flags = {"temperature_end": 0.25, "temperature_steps": 100, "total_env_steps": 256}
    config = jaxrl_dist.preset("muzero", own.Walk(), **RUN, **flags)
    *_, last = jaxrl_dist.train(dataclasses.replace(config, vary=vary, zip=True))
    algorithm = dataclasses.replace(config.algorithm, value_limit=4.0, temperature_start=0.5)
    alone = dataclasses.replace(config, algorithm=algorithm, run_dir=str(tmp_path / "whole"))
    *_, whole = jaxrl_dist.train(alone)
    assert whole.updates == last.members[1].updates > 0
    assert_close(last.members[1].variables(), whole.variables(), 1e-4)
    parts = str(tmp_path / "parts")
    list(jaxrl_dist.train(dataclasses.replace(alone, run_dir=parts, total_env_steps=128)))
    *_, resumed = jaxrl_dist.resume(parts, env=own.Walk(), total_env_steps=256)
    for x, y in zip(
        *(jax.tree.leaves(report.checkpoint().state) for report in (whole, resumed)), strict=True
    ):
        np.testing.assert_array_equal(x, y)
