"""Acting: device and host give the same experience,
whatever the devices and the lengths of rollouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import scipy.special
from probes import assert_close, make_mesh, make_session

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.actors.host import HostActor
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.actors.step import ActorJob, Stages, count_steps, keys_of, step_numbers
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.es import ES
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.nn import networks, perturbation
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, Context, EpisodeStats, Rollout, Variables

NUM_ENVS, NUM_STEPS = 8, 16
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4}
CASES: dict[str, tuple[str, dict[str, str], Any]] = {
    "discrete": ("CartPole-v1", {}, PPO(**NET)),
    "continuous": ("Pendulum-v1", {"max_steps_in_episode": "9"}, PPO(**NET)),
    "recurrent": (
        "MemoryChain-bsuite",
        {"memory_length": "4"},
        PPO(**NET, core="gru", num_minibatches=1),
    ),
    "episodic": ("CartPole-v1", {}, ES(hidden_sizes=(8,), noise_std=1.0)),
    "perturbed": (
        "CartPole-v1",
        {"max_steps_in_episode": "11"},
        DQN(hidden_sizes=(8,), parameter_noise=True),
    ),
}


@functools.cache
def make(name: str) -> tuple[Algorithm, EnvSource]:
    env_id, options, config = CASES[name]
    source = find(f"gymnax:{env_id}", options)
    algorithm = config.make(source.spec)
    if name in ("recurrent", "perturbed"):
        algorithm = wrappers.scale_rewards(algorithm, config.discount)
    return algorithm, source


def place(tree: Any, num_devices: int, spec: Any = meshes.REPLICATED) -> Any:
    return meshes.put(tree, make_mesh(num_devices), spec)


@functools.cache
def variables(name: str) -> Any:
    """Those of the start, with a policy that cares for what it sees."""
    algorithm, _ = make(name)
    start = jax.tree.map(np.array, jax.jit(algorithm.init)(jax.random.key(3)))
    if "policy" in start.params or "head" in start.params:
        start.params["head" if algorithm.behaviour else "policy"]["params"]["kernel"] *= 100
    return start


@functools.cache
def begun(name: str) -> device.ActorState:
    """Environments that have been reset, as numpy arrays."""
    algorithm, source = make(name)
    begin = jax.jit(
        functools.partial(
            device.init, {"": algorithm}, source.device(), EnvSlice(0, NUM_ENVS, NUM_ENVS)
        )
    )
    return jax.device_get(begin(rng.stream(0, Stream.ENV)))


@functools.cache
def act_on_device(
    name: str, num_devices: int = 1, rollouts: int = 2, length: int = NUM_STEPS
) -> list[tuple[Rollout, EpisodeStats]]:
    """Consecutive rollouts, as numpy arrays, by the path of the plan ``on_device``."""
    algorithm, source = make(name)
    session = make_session(
        algorithm, source, num_devices=num_devices, num_envs=NUM_ENVS, rollout_length=length
    )
    job = session.job
    everywhere, batch = meshes.REPLICATED, meshes.BATCH
    env = source.device()
    rollout = device.make_rollout({"": algorithm}, env, length)

    def run(*args: Any) -> Any:
        actor, experience, episodes = rollout(*args)
        return actor, experience, jax.tree.map(lambda x: x[None], episodes)

    specs = (everywhere, batch, everywhere, everywhere, everywhere, everywhere)
    program = meshes.Program(
        run, job.mesh, specs, (batch, {"": meshes.ROLLOUT}, batch), mapped=meshes.acting
    )
    actor = meshes.put(begun(name), job.mesh, batch)
    results = []
    for iteration in range(rollouts):
        numbers = place((jnp.int32(iteration), {"": jnp.float32(0)}), num_devices)
        keys = session.key(Stream.ACT), session.key(Stream.ENV)
        actor, experience, episodes = program(
            place({"": variables(name)}, num_devices), actor, *keys, *numbers
        )
        experience, episodes = jax.device_get((experience, episodes))
        results.append((experience[""], episodes[""].merge()))
    return results


def act_on_host(
    algorithm: Algorithm, source: EnvSource, start: Any, num_devices: int, length: int = NUM_STEPS
) -> list[tuple[Rollout, EpisodeStats]]:
    """Two rollouts by the path of the plan ``synchronous``."""
    session = make_session(
        algorithm, source, num_devices=num_devices, num_envs=NUM_ENVS, rollout_length=length
    )
    job = session.job
    results = []
    with contextlib.closing(source.host(NUM_ENVS, job.config.seed)) as env:
        programs = compile_acting(
            {"": algorithm}, source.spec, job.mesh, length, session.key(Stream.ACT)
        )
        actor = HostActor({"": algorithm}, env, job.mesh, length, programs)
        for iteration in range(2):
            numbers = place((jnp.int32(iteration), {"": jnp.float32(0)}), num_devices)
            experience, episodes, steps = actor.rollout(place({"": start}, num_devices), *numbers)
            results.append(jax.device_get((experience[""], episodes[""])))
            assert steps.tolist() == [results[-1][0].valid.sum()] * 2
    return results


# --- The same experience --------------------------------------------------------------------------


@pytest.mark.parametrize("name", runs.cases(CASES, "episodic"))
def test_host_acts_as_device(name: str) -> None:
    """Keys, resets, policy state and feedback agree, over the seam between two rollouts;
    the meshes differ too.
    """
    algorithm, source = make(name)
    on_host = act_on_host(algorithm, source, variables(name), 2)
    on_device = act_on_device(name)
    assert any((~experience.valid).any() for experience, _ in on_device)
    assert (
        len(np.unique(np.concatenate([experience.action.ravel() for experience, _ in on_device])))
        > 1
    )
    assert_close(on_host, on_device, 1e-5)


@pytest.mark.parametrize(
    "name, num_devices",
    [
        pytest.param("recurrent", 2, marks=pytest.mark.case),
        ("recurrent", 8),
        pytest.param("continuous", 8, marks=pytest.mark.case),
        pytest.param("perturbed", 8, marks=pytest.mark.case),
    ],
)
def test_devices_do_not_matter(name: str, num_devices: int) -> None:
    assert_close(act_on_device(name, num_devices), act_on_device(name), 1e-5)


def test_rollout_length_does_not_matter() -> None:
    """While the variables stay, two rollouts of 16 steps are one of 32."""
    halves = [experience for experience, _ in act_on_device("recurrent")]
    ((whole, _),) = act_on_device("recurrent", 1, 1, 2 * NUM_STEPS)
    for name in ("action", "reward", "terminated", "truncated", "valid", "extras"):
        joined = jax.tree.map(
            lambda *x: np.concatenate(x), *(getattr(half, name) for half in halves)
        )
        assert_close(joined, getattr(whole, name))
    np.testing.assert_allclose(
        np.concatenate([halves[0].obs[:-1], halves[1].obs]), whole.obs, rtol=1e-5
    )
    assert_close([halves[0].core, halves[1].final_core], [whole.core, whole.final_core])


def test_rollouts_join() -> None:
    """A rollout begins with what the last one ended in, unless something happens between them."""
    for name in CASES:
        if make(name)[0].behaviour:
            continue
        (first, _), (second, _) = act_on_device(name)
        np.testing.assert_array_equal(first.obs[-1], second.obs[0])
        assert_close(second.core, first.final_core)
        ended = first.terminated[-1] | first.truncated[-1]
        np.testing.assert_array_equal(second.valid[0], ~ended)


def test_environments_differ() -> None:
    (experience, _), _ = act_on_device("continuous")
    assert (
        len(np.unique(experience.obs[0], axis=0))
        == len(np.unique(experience.action[0]))
        == NUM_ENVS
    )


@pytest.mark.parametrize("kind", ["device", "host"])
def test_several_actors_act_as_one(kind: str) -> None:
    algorithm, source = make("discrete")
    env, mesh, half = source.device(), make_mesh(1), NUM_ENVS // 2
    act_key, env_key = (rng.stream(0, name) for name in (Stream.ACT, Stream.ENV))
    shares = [EnvSlice(first, half, NUM_ENVS) for first in (0, half)]
    actors: list[Any]
    if kind == "device":
        program = device.compile_rollout({"": algorithm}, env, mesh, NUM_STEPS, act_key, env_key)
        job = ActorJob(
            {"": algorithm}, source, NUM_ENVS, NUM_STEPS, 0, lambda: False, lambda key, make: make()
        )
        actors = [device.DeviceActor(job, mesh, program, share, Stages()) for share in shares]
    else:
        programs = compile_acting({"": algorithm}, source.spec, mesh, NUM_STEPS, act_key)
        actors = [
            HostActor({"": algorithm}, source.host(x, 0), mesh, NUM_STEPS, programs, x)
            for x in shares
        ]
    given = place(({"": variables("discrete")}, jnp.int32(0), {"": jnp.float32(0)}), 1)
    found = [jax.device_get(actor.rollout(*given)[0][""]) for actor in actors]
    expected, _ = act_on_device("discrete")[0]
    for name in ("obs", "action", "reward", "valid"):
        assert_close(
            np.concatenate([getattr(x, name) for x in found], axis=1), getattr(expected, name)
        )


def test_policies_of_one_environment_have_different_keys() -> None:
    """That of the first is the one that it has alone."""
    algorithm, key = make("discrete")[0], rng.stream(0, Stream.ACT)
    keys = keys_of({"b": algorithm, "a": algorithm, "c": algorithm}, key)
    assert (
        keys["b"] == key
        and len({tuple(jax.random.key_data(x).tolist()) for x in keys.values()}) == 3
    )


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("agents", [{"": 3}, {"b": 2, "a": 1, "c": 2}])
def test_steps_are_those_of_a_loop_over_environments(xp: Any, agents: dict[str, int]) -> None:
    """Of two members with four environments each."""
    rng, spec = np.random.default_rng(0), make("discrete")[1].spec
    own = {name: dataclasses.replace(spec, num_agents=size) for name, size in agents.items()}
    valid = {name: rng.random((5, 2, 4 * size)) < 0.2 for name, size in agents.items()}
    expected = np.zeros((5, 2, 2), int)
    for at in np.ndindex(5, 2):
        for env in range(4):
            there = sum(
                int(valid[name][at][env * size + agent])
                for name, size in agents.items()
                for agent in range(size)
            )
            expected[at] += [there > 0, there]
    whole = own[""] if "" in own else dataclasses.replace(spec, num_agents=5, policies=own)
    given = {name: xp.asarray(x) for name, x in valid.items()}
    np.testing.assert_array_equal(count_steps(whole, given), expected)


# --- Separate parameters --------------------------------------------------------------------------


def test_episodic_rollouts_begin_with_new_episodes() -> None:
    """And each environment acts with its own parameters, which differ from rollout to rollout."""
    algorithm, _ = make("episodic")
    (first, _), (second, _) = act_on_device("episodic")
    assert not (first.terminated[-1] | first.truncated[-1]).all()  # some episodes go on
    for rollout in (first, second):
        assert rollout.valid[0].all()
        assert (np.abs(rollout.obs[0]) <= 0.05).all()  # where CartPole starts
        np.testing.assert_array_equal(rollout.core["pair"], [0, 0, 1, 1, 2, 2, 3, 3])
        np.testing.assert_array_equal(rollout.core["noise"][::2], rollout.core["noise"][1::2])
    noise = np.concatenate([first.core["noise"][::2], second.core["noise"][::2]])
    assert len(np.unique(noise, axis=0)) == NUM_ENVS
    assert (first.obs[0] != second.obs[0]).all()
    # What each has done is what its parameters do.
    for rollout in (first, second):
        for b in range(NUM_ENVS):
            key = jax.random.wrap_key_data(rollout.core["noise"][b])
            own = perturbation.perturbed(variables("episodic").params, key, 1.0 - 2.0 * (b % 2))
            action, _, _ = algorithm.policy(Variables(own, ()), rollout.obs[:-1, b], (), Context())
            np.testing.assert_array_equal(action, rollout.action[:, b])
    assert len({tuple(actions) for actions in first.action.T}) > 1


@pytest.mark.case  # test_host_acts_as_device
def test_noise_on_parameters_lasts_until_the_episode_ends() -> None:
    """Each environment draws it for itself, and again before the first rollout of a later
    episode.
    """
    algorithm, _ = make("perturbed")
    rollouts = [rollout for rollout, _ in act_on_device("perturbed", 1, 8, 4)]
    noise = np.stack([rollout.core[1][0]["noise"] for rollout in rollouts])
    assert len(np.unique(noise[0], axis=0)) == NUM_ENVS
    for before, after, rollout in zip(noise[:-1], noise[1:], rollouts, strict=False):
        np.testing.assert_array_equal((before == after).all(axis=1), rollout.valid.all(axis=0))
    ended = np.stack([~rollout.valid.all(axis=0) for rollout in rollouts])
    assert ended.any() and not ended.all()
    for rollout in rollouts:  # what each has done is the best by its own parameters
        for b in range(NUM_ENVS):
            start = variables("perturbed")
            std, key = start.stats[1][0], jax.random.wrap_key_data(rollout.core[1][0]["noise"][b])
            own = start._replace(params=perturbation.perturbed(start.params, key, std))
            core = algorithm.initial_core(4)
            action, _, _ = algorithm.policy(own, rollout.obs[:-1, b], core, Context())
            np.testing.assert_array_equal(action, rollout.action[:, b])


def test_parameters_that_do_not_fit_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device the environments act by parts,
    on the host the parameters are made again at each step.
    """
    algorithm, source = make("episodic")
    expected = act_on_device("episodic")
    size = sum(x.nbytes for x in jax.tree.leaves(variables("episodic").params))
    monkeypatch.setattr(perturbation, "MAX_BYTES", 2 * size)
    assert_close(act_on_device.__wrapped__("episodic", 2), expected)
    assert_close(act_on_host(algorithm, source, variables("episodic"), 1), expected)


# --- Policy state ---------------------------------------------------------------------------------


def test_core_is_set_back_with_each_episode() -> None:
    """What the policy met each observation with, followed by hand,
    one environment and one step at a time.
    """
    algorithm, _ = make("recurrent")
    seen = 0
    policy = jax.jit(algorithm.policy)
    zeros = jax.device_get(algorithm.initial_core(NUM_ENVS))
    core = zeros
    for experience, _ in act_on_device("recurrent"):
        assert_close(core, experience.core)
        for t in range(NUM_STEPS):
            keys = jax.random.split(jax.random.key(0), NUM_ENVS)
            _, (_, inner), extras = policy(
                variables("recurrent"), experience.obs[t], core, Context(keys)
            )
            np.testing.assert_allclose(
                extras["value"], experience.extras["value"][t], rtol=1e-4, atol=1e-5
            )
            discounted = 0.99 * core[0] + experience.reward[t]
            valid = experience.valid[t]
            core = np.where(valid, discounted, 0), np.where(valid[:, None], inner, 0)
            seen += (~valid).sum()
        assert_close(core, jax.tree.map(np.asarray, experience.final_core))
    assert seen >= NUM_ENVS


def test_unroll_finds_what_acting_found() -> None:
    """So the first update of PPO with a recurrent core starts from probability ratios of 1."""
    _, source = make("recurrent")
    config = CASES["recurrent"][2]
    start = variables("recurrent")
    net = networks.actor_critic(config, source.spec.observation, source.spec.action.n, False)
    unroll = jax.jit(net.unroll)
    for experience, _ in act_on_device("recurrent"):
        outputs, value, core = unroll(
            start.params, experience.obs[:-1], experience.core[1], experience.valid
        )
        log_probs = scipy.special.log_softmax(outputs, -1)
        log_prob = np.take_along_axis(log_probs, experience.action[..., None], -1)[..., 0]
        np.testing.assert_allclose(log_prob, experience.extras["log_prob"], atol=1e-5)
        np.testing.assert_allclose(value, experience.extras["value"], atol=1e-5)
        np.testing.assert_allclose(core, experience.final_core[1], atol=1e-5)


# --- Backends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_id, options", [("CartPole-v1", {}), ("Pendulum-v1", {"max_episode_steps": "9"})]
)
def test_backends_give_rollouts_of_one_structure(env_id: str, options: dict[str, str]) -> None:
    name = "discrete" if env_id == "CartPole-v1" else "continuous"
    algorithm, gymnax = make(name)
    source = find(f"envpool:{env_id}", options)
    assert source.spec.observation.shape == gymnax.spec.observation.shape
    results = act_on_host(algorithm, source, variables(name), 2)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, np.asarray(x).dtype), tree)  # noqa: E731
    assert shapes(results) == shapes(act_on_device(name))
    (first, _), (second, _) = results
    np.testing.assert_array_equal(first.obs[-1], second.obs[0])
    np.testing.assert_array_equal(second.valid[1:], ~(second.terminated | second.truncated)[:-1])
    np.testing.assert_array_equal(second.valid[0], ~(first.terminated | first.truncated)[-1])
    assert (~first.valid).any() or (~second.valid).any()
    # What was stored is what the environments answered: here they are again,
    # given the same actions.
    with contextlib.closing(source.host(NUM_ENVS, 0)) as env:
        obs = env.reset()
        for experience, episodes in results:
            count = 0.0
            for t in range(NUM_STEPS):
                np.testing.assert_array_equal(experience.obs[t], obs)
                step, ended = env.step(experience.action[t])
                obs, count = step.obs, count + ended.episodes.sum()
                for field in ("reward", "terminated", "truncated", "valid"):
                    np.testing.assert_array_equal(
                        getattr(experience, field)[t], getattr(step, field)
                    )
            assert count == episodes.episodes


@pytest.mark.parametrize("name", ["discrete", pytest.param("recurrent", marks=pytest.mark.case)])
def test_evaluation_plays_what_it_was_asked_for(name: str) -> None:
    """Whole episodes, their number by environment fixed beforehand;
    with a policy state of one array or none.
    """
    config = CASES[name][2]
    source = find("gymnax:CartPole-v1", {"max_steps_in_episode": "12"})
    algorithm = config.make(source.spec)
    start = jax.jit(algorithm.init)(jax.random.key(0))
    heard: list[int] = []
    one = Evaluator({"": algorithm}, source, 5, 0).play({"": start}, heard.append)
    assert (
        heard[0] == 0
        and heard[-1] == 5
        and heard == sorted(heard)
        and one.returns.shape == one.lengths.shape == (5,)
    )
    np.testing.assert_array_equal(one.returns, one.lengths)
    assert (one.lengths >= 8).all() and (one.lengths <= 12).all()
    np.testing.assert_array_equal(
        Evaluator({"": algorithm}, source, 5, 0).play({"": start}).returns, one.returns
    )


def test_rollouts_of_one_step() -> None:
    algorithm, source = make("recurrent")
    one = act_on_host(algorithm, source, variables("recurrent"), 1, 1)
    whole, _ = act_on_device("recurrent")[0]
    for t, (experience, _) in enumerate(one):
        expected = jax.tree.map(lambda x: x[t : t + 1], whole._replace(core=(), final_core=()))
        assert_close(
            experience._replace(core=(), final_core=()), expected._replace(obs=whole.obs[t : t + 2])
        )


def test_step_numbers_pass_two_to_the_31() -> None:
    iteration = jnp.int32(2**31 // 128 + 5)
    numbers = jax.jit(step_numbers, static_argnums=1)(iteration, 128)
    np.testing.assert_array_equal(
        np.asarray(numbers, np.int64), (2**31 // 128 + 5) * 128 + np.arange(128)
    )


@pytest.mark.parametrize(
    "name, max_steps",
    [("discrete", None), ("discrete", 7), pytest.param("recurrent", None, marks=pytest.mark.case)],
)
def test_the_compiled_evaluation_plays_the_episodes_of_the_host(
    name: str, max_steps: int | None
) -> None:
    """Someone who watches makes the environments step from the host; 7 steps cut every episode."""
    config = CASES[name][2]
    source = find("gymnax:CartPole-v1", {"max_steps_in_episode": "30"})
    algorithm = config.make(source.spec)
    variables = {"": jax.jit(algorithm.init)(jax.random.key(1))}
    played = Evaluator({"": algorithm}, source, 9, 0, max_steps, num_envs=4)
    compiled, watched = (
        played.play(variables),
        played.play(variables, watch=lambda env, first: None),
    )
    assert (
        compiled is not None
        and watched is not None
        and compiled.cut == watched.cut == (9 if max_steps else 0)
    )
    np.testing.assert_array_equal(compiled.returns, watched.returns)
    np.testing.assert_array_equal(compiled.lengths, watched.lengths)
