"""Tiny environments with known answers, and what tests build runs from.

``Probe-v0`` and ``ContinuousProbe-v0`` are the probe environments of Andy L. Jones ("Debugging RL,
Without the Agonizing Pain", 2021) in one: each episode draws one of ``KINDS``, and the observation
says which, so a single run asks all the questions. ``Clock-v0`` pays 1 a step until its time limit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from gymnax.environments import environment, spaces

from jaxrl_dist import mesh as meshes
from jaxrl_dist import spaces as spaces_of
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.actors.step import after_step
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.learners.policies import combined_learner
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.memory import ring
from jaxrl_dist.memory.ring import Memory
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.session import Session
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete
from jaxrl_dist.training.learner import make_learner
from jaxrl_dist.types import Algorithm, Context, EnvSpec, PyTree, Rollout, Timestep, Variables

# --- Environments ---------------------------------------------------------------------------------

KINDS = ("constant", "from_observation", "two_steps", "from_action", "from_both")
"""What the reward depends on: nothing; the observation; it comes after two steps; the action;
both."""


@struct.dataclass
class ProbeState:
    kind: jax.Array  # int32, index into KINDS
    x: jax.Array  # float32, 1 or -1
    time: jax.Array  # int32


@struct.dataclass
class ProbeParams:
    max_steps_in_episode: int = 10


class Probe(environment.Environment):
    """Episodes of one step, or two for ``two_steps``; observations ``[6]``:
    the kind as a one-hot, then ``x``.

    The right action for ``from_action`` is 1,
    for ``from_both`` it is 1 where ``x`` is 1 and 0 where it is -1.
    """

    @property
    def default_params(self) -> ProbeParams:
        return ProbeParams()

    def reset_env(self, key: jax.Array, params: ProbeParams) -> tuple[jax.Array, ProbeState]:
        kind_key, x_key = jax.random.split(key)
        kind = jax.random.randint(kind_key, (), 0, len(KINDS))
        x = jnp.where(
            kind == KINDS.index("two_steps"), -1.0, jax.random.rademacher(x_key, (), jnp.float32)
        )
        state = ProbeState(kind, x, jnp.int32(0))
        return self.observation(state), state

    def step_env(
        self, key: jax.Array, state: ProbeState, action: jax.Array, params: ProbeParams
    ) -> Any:
        rewards = {
            "constant": 1.0,
            "from_observation": state.x,
            "two_steps": jnp.where(state.time == 0, 0.0, 1.0),
            "from_action": self.payoff(action, 1.0),
            "from_both": self.payoff(action, state.x),
        }
        reward = jnp.stack([jnp.asarray(rewards[kind], jnp.float32) for kind in KINDS])[state.kind]
        terminated = (state.kind != KINDS.index("two_steps")) | (state.time == 1)
        state = ProbeState(state.kind, jnp.where(terminated, state.x, 1.0), state.time + 1)
        return self.observation(state), state, reward, terminated, {}

    def observation(self, state: ProbeState) -> jax.Array:
        return jnp.append(jax.nn.one_hot(state.kind, len(KINDS)), state.x)

    def payoff(self, action: jax.Array, wanted: jax.Array | float) -> jax.Array:
        return jnp.where((action == 1) == (wanted > 0), 1.0, -1.0)

    def observation_space(self, params: ProbeParams) -> spaces.Box:
        return spaces.Box(-1, 1, (len(KINDS) + 1,), jnp.float32)

    def action_space(self, params: ProbeParams) -> Any:
        return spaces.Discrete(2)


class ContinuousProbe(Probe):
    """As ``Probe``; the right action is 0.5, or for ``from_both`` half of ``x``."""

    def payoff(self, action: jax.Array, wanted: jax.Array | float) -> jax.Array:
        return 1.0 - jnp.square(action[0] - 0.5 * wanted)

    def action_space(self, params: ProbeParams) -> Any:
        return spaces.Box(-1, 1, (1,), jnp.float32)


class Clock(environment.Environment):
    """Observes 1 and pays 1 a step, whatever it does; only the time limit ends it.

    ``dead`` makes it say so as a termination, with the time limit out of reach:
    the mistake to tell apart.
    """

    def __init__(self, dead: bool = False) -> None:
        super().__init__()
        self.dead = dead

    @property
    def default_params(self) -> ProbeParams:
        return ProbeParams()

    def reset_env(
        self, key: jax.Array, params: ProbeParams
    ) -> tuple[jax.Array, environment.EnvState]:
        return jnp.ones(1), environment.EnvState(time=jnp.int32(0))

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: ProbeParams) -> Any:
        state = environment.EnvState(time=state.time + 1)
        return jnp.ones(1), state, jnp.float32(1), jnp.bool_(self.dead) & (state.time >= 10), {}

    def observation_space(self, params: ProbeParams) -> spaces.Box:
        return spaces.Box(0, 1, (1,), jnp.float32)

    def action_space(self, params: ProbeParams) -> Any:
        return spaces.Discrete(2)


for _id, _env in {
    "Probe-v0": Probe,
    "ContinuousProbe-v0": ContinuousProbe,
    "Clock-v0": Clock,
}.items():
    gymnax.register(_id, _env)


# --- Replay ---------------------------------------------------------------------------------------


def sample_uniform(
    memory: Memory, key: jax.Array, size: int, window: int, frame_stack: int = 1
) -> tuple[Any, ...]:
    """Draws windows, and returns them and where they start."""
    index = ring.draw_uniform(memory, key, size, window, frame_stack)
    return ring.gather(memory.steps, index, window, frame_stack), index


def sample_prioritized(
    memory: Memory, key: jax.Array, size: int, window: int, frame_stack: int = 1
) -> tuple[Any, ...]:
    """Draws windows, and returns them, where they start and their probabilities."""
    index, probability = ring.draw_prioritized(memory, key, size)
    return ring.gather(memory.steps, index, window, frame_stack), index, probability


# --- Runs -----------------------------------------------------------------------------------------


def make_session(
    algorithm: Algorithm,
    source: EnvSource | str,
    *,
    num_devices: int = 1,
    num_envs: int = 8,
    rollout_length: int = 8,
    total_env_steps: int = 1,
    report_interval: int = 1,
    seed: int = 0,
    pool: PoolOptions | None = None,
) -> Session:
    """A session for a plan; by default it ends with its first rollout."""
    source = find(source) if isinstance(source, str) else source
    sizes = {"num_envs": num_envs, "rollout_length": rollout_length}
    steps = {"total_env_steps": total_env_steps, "report_interval": report_interval}
    config: Train[Any] = Train(PPO(), plan="on_device", **sizes, **steps, seed=seed)
    job = Job(
        config=config,
        algorithm={"": algorithm},
        learner=combined_learner(
            {"": learner_of(algorithm, source.spec, num_envs, rollout_length, num_devices)}
        ),
        source=source,
        mesh=make_mesh(num_devices),
        pool=pool or PoolOptions(),
    )
    return Session(config, job)


def with_job(session: Session, **fields: Any) -> Session:
    """The session with other fields of its job."""
    return session._replace(job=session.job._replace(**fields))


def learner_of(
    algorithm: Algorithm, env: EnvSpec, num_envs: int, rollout_length: int, num_devices: int = 1
) -> Learner:
    """The learner that the algorithm asks for."""
    config: Train[Any] = Train(
        "ppo", plan="on_device", num_envs=num_envs, rollout_length=rollout_length
    )
    return dict(
        make_learner(config, {"": algorithm}, env, jax.local_devices()[:num_devices]).parts
    )[""]


def make_mesh(num_devices: int) -> jax.sharding.Mesh:
    return meshes.make_mesh(jax.devices()[:num_devices])


def with_sgd(algorithm: Algorithm, learning_rate: float = 0.1) -> Algorithm:
    """The algorithm with plain SGD: Adam would hide a
    gradient that is too large by a constant factor.
    """
    return dataclasses.replace(algorithm, optimizer=optax.sgd(learning_rate))


def box(*shape: int, dtype: Any = np.float32, bound: float = np.inf) -> Box:
    return Box(shape, np.dtype(dtype), np.full(shape, -bound, dtype), np.full(shape, bound, dtype))


def spec(observation: Any = None, action: Any = None) -> EnvSpec:
    """An environment with vectors of 3 for observations and 3 actions,
    unless other spaces are given.
    """
    return EnvSpec("Test-v0", "gymnax", "other", observation or box(3), action or Discrete(3), None)


def random_rollout(
    algorithm: Algorithm,
    env: EnvSpec,
    num_steps: int,
    num_envs: int,
    seed: int = 0,
    end_chance: Any = 0.2,
) -> Rollout:
    """A rollout of random numbers, of the structure that acting with ``algorithm`` gives,
    as numpy arrays.

    Every end is followed by a reset step, and some environments begin on one.
    ``end_chance`` may differ by environment.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    terminated, truncated, valid = np.zeros((3, *shape), bool)
    resetting = rng.random(num_envs) < 0.3
    for t in range(num_steps):
        valid[t] = ~resetting
        resetting = valid[t] & (rng.random(num_envs) < end_chance)
        terminated[t] = resetting & (rng.random(num_envs) < 0.5)
        truncated[t] = resetting & ~terminated[t]

    def normal(x: jax.ShapeDtypeStruct, *leading: int) -> np.ndarray:
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(100, size=(*leading, *x.shape), dtype=x.dtype)
        return (0.3 * rng.standard_normal((*leading, *x.shape))).astype(x.dtype)

    key = jax.ShapeDtypeStruct((num_envs,), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    zeros = spaces_of.zeros(env.observation, num_envs)
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), zeros)
    variables = jax.eval_shape(algorithm.init, jax.ShapeDtypeStruct((), key.dtype))
    core = jax.eval_shape(lambda: algorithm.initial_core(num_envs))
    action, _, extras = jax.eval_shape(
        algorithm.policy, variables, obs, core, Context(key, jax.ShapeDtypeStruct((), np.float32))
    )
    if isinstance(env.action, Discrete):
        actions = rng.integers(env.action.n, size=shape, dtype=np.int32)
    elif isinstance(env.action, MultiDiscrete):
        actions = rng.integers(env.action.nvec, size=(*shape, len(env.action.nvec)), dtype=np.int32)
    else:
        actions = normal(action, num_steps)
    extras = jax.tree.map(lambda x: normal(x, num_steps), extras)
    if "log_prob" in extras:
        extras["log_prob"] -= 1.0  # about that of a policy that has just begun
    cores: list[PyTree] = [jax.tree.map(normal, core) for _ in range(2)]
    return Rollout(
        obs=jax.tree.map(
            lambda x: rng.standard_normal((num_steps + 1, *x.shape)).astype(x.dtype), obs
        ),
        action=actions,
        reward=np.where(valid, rng.normal(size=shape), 0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        extras=extras,
        core=cores[0],
        final_core=cores[1],
    )


def acted(algorithm: Algorithm, variables: Variables, rollout: Rollout, seed: int = 0) -> Rollout:
    """The rollout as if the algorithm's own policy had acted on its observations."""
    num_envs = rollout.reward.shape[1]
    core = initial = algorithm.initial_core(num_envs)
    policy = jax.jit(algorithm.policy)
    steps = []
    for t, obs in enumerate(rollout.obs[:-1]):
        keys = jax.random.split(jax.random.key(1000 * seed + t), num_envs)
        action, core, extras = policy(variables, obs, core, Context(keys))
        outcomes = (
            x[t] for x in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid)
        )
        core = after_step(algorithm, core, initial, action, Timestep(rollout.obs[t + 1], *outcomes))
        steps.append((action, extras))
    action, extras = jax.tree.map(lambda *x: np.stack(x), *steps)
    return rollout._replace(action=action, extras=extras, core=initial, final_core=core)


def naive_gru(cell: PyTree, x: np.ndarray, core: np.ndarray) -> np.ndarray:
    """The next core, by Cho et al. (2014), equations 5 to 8, in the form of cuDNN."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ cell[name]["kernel"] + cell[name].get("bias", 0)

    r, z = (1 / (1 + np.exp(-linear(f"i{gate}", x) - linear(f"h{gate}", core))) for gate in "rz")
    return (1 - z) * np.tanh(linear("in", x) + r * linear("hn", core)) + z * core


def squash(x: float) -> float:
    return float(np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x)


def unsquash(x: float) -> float:
    """The inverse, equation in proposition A.2 of Pohlen et al. (2018)."""
    return float(np.sign(x) * (((np.sqrt(1 + 4e-3 * (np.abs(x) + 1 + 1e-3)) - 1) / 2e-3) ** 2 - 1))


def window_return(windows: Rollout, env: int, discount: float) -> tuple[float, float, int]:
    """Of one window's first step: rewards summed, discount of the bootstrap, last step;
    a loop in float64.
    """
    total, factor, last = 0.0, 1.0, len(windows.reward) - 1
    for t in range(len(windows.reward)):
        total += factor * windows.reward[t, env]
        factor *= discount
        if windows.terminated[t, env]:
            factor = 0.0
        if windows.terminated[t, env] or windows.truncated[t, env]:
            last = t
            break
    return total, factor, last


def perturbed(params: PyTree, seed: int = 0) -> PyTree:
    """Parameters away from their start, where heads put out nearly nothing; as numpy arrays."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.asarray(x + 0.3 * rng.standard_normal(x.shape), x.dtype), params
    )


def assert_close(actual: PyTree, expected: PyTree, tolerance: float = 1e-5) -> None:
    """Trees of equal structure, dtypes and shapes,
    whose arrays differ by no more than ``tolerance``.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )
