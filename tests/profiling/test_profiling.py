"""Where the time of a run goes: each stage is found by what it costs, and stages sum to the
whole.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import runpy
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
import team
from probes import with_job

import jaxrl_dist
from jaxrl_dist import cli, mesh
from jaxrl_dist.commands import profile
from jaxrl_dist.config.train import Train
from jaxrl_dist.nn import cores
from jaxrl_dist.profiling import stages, timing
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import Algorithm

NAP = 0.2
SCRIPT = types.SimpleNamespace(**runpy.run_path(str(runs.ROOT / "scripts" / "what_binds.py")))
SMALL = "--num-envs 8 --hidden-sizes 4 --num-devices 1 --report-interval 64 --seconds 0.2"


@pytest.mark.parametrize(
    "name, own",
    [
        ("ppo", {"num_epochs": 1, "num_minibatches": 2}),
        pytest.param("dqn", {"replay_ratio": 1 / 32}, marks=pytest.mark.case),
    ],
)
def test_a_stage_that_sleeps_is_the_one_that_takes_longer(name: str, own: dict[str, Any]) -> None:
    naps = dict.fromkeys(("environment", "policy", "postprocess", "gradient", "optimizer"), 0.0)

    def nap(stage: str, x: jax.Array) -> jax.Array:
        """Returns ``x`` after the stage's nap."""

        def sleep(x: np.ndarray) -> np.ndarray:
            time.sleep(naps[stage])
            return x

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sizes = {"num_envs": 8, "rollout_length": 4, "num_devices": 1, "hidden_sizes": (4,)}
    run = setup.prepare(*resolved(Train(name, env="gymnax:CartPole-v1"), {**sizes, **own}))
    job = run.job
    algorithm = {"": drowsy(job.algorithm[""], nap)}
    made = stages.make_stages(
        with_job(run.session, algorithm=algorithm, source=DrowsySource(job.source, nap))
    )
    for part in made.values():
        jax.block_until_ready(part.run())
    for stage in naps:
        naps[stage] = NAP
        seconds = {}
        for other, part in made.items():
            began = time.perf_counter()
            jax.block_until_ready(part.run())
            seconds[other] = time.perf_counter() - began
        naps[stage] = 0.0
        assert seconds.pop(stage) >= NAP
        assert max(seconds.values()) < NAP, f"only {stage} sleeps: {seconds}"


@pytest.mark.case  # test_a_run_is_profiled
def test_the_parts_of_a_team_have_a_row_for_each_agent() -> None:
    sizes = {
        "num_envs": 8,
        "rollout_length": 4,
        "num_devices": 1,
        "hidden_sizes": (4,),
        "num_minibatches": 2,
    }
    run = setup.prepare(*resolved(Train("ppo", env=team.CartPoles(3)), sizes))
    made = stages.make_stages(run.session)
    shuffled = jax.tree.leaves(made["shuffle"].run())
    assert {len(x) for x in shuffled} == {8 * 3 * 4 // 2}


def several(policies: str, plan: str) -> str:
    sizes = "--num-envs 8 --rollout-length 8 --num-devices 1 --report-interval 64"
    return f"{policies} --env team:CartPoles --plan {plan} {sizes}"


@pytest.mark.parametrize(
    "plan, policies, expected",
    [
        pytest.param(
            "on_device",
            "--policy a=ppo:pole_0 --policy b=dqn:pole_1",
            {"environment", "policy", "a/shuffle", "b/replay"},
            marks=pytest.mark.case,
        ),
        pytest.param(
            "on_device",
            "--policy a=ppo:pole_0 --policy b=random:pole_1",
            {"environment", "policy", "a/shuffle"},
            marks=pytest.mark.case,
        ),
        pytest.param(
            "synchronous",
            "--policy a=ppo:pole_0 --policy b=dqn:pole_1",
            {"environment", "a/shuffle", "b/replay"},
            marks=pytest.mark.case,
        ),
    ],
    ids=["on_device", "random", "synchronous"],
)
def test_stages_of_several_policies_belong_to_one_each(
    plan: str, policies: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    assert cli.main(f"profile {several(policies, plan)} --seconds 0.02 --json {file}".split()) == 0
    found = runs.read_json(file)
    (spent,) = found["threads"].values()
    trained = {stage.partition("/")[0] for stage in expected if "/" in stage}
    expected |= {
        f"{name}/{stage}" for name in trained for stage in ("postprocess", "gradient", "optimizer")
    }
    assert expected <= spent.keys() and not any(
        stage.startswith("b/") for stage in spent.keys() - expected
    )
    assert sum(spent.values()) == pytest.approx(found["iteration_seconds"], rel=1e-6)
    printed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert expected <= printed


def drowsy(algorithm: Algorithm, nap: Any) -> Algorithm:
    """The algorithm whose functions take naps first."""

    def policy(variables: Any, obs: jax.Array, core: Any, context: Any) -> Any:
        return algorithm.policy(variables, nap("policy", obs), core, context)

    def postprocess(variables: Any, rollout: Any, context: Any) -> Any:
        return algorithm.postprocess(
            variables, rollout._replace(reward=nap("postprocess", rollout.reward)), context
        )

    def loss(variables: Any, batch: Any, context: Any) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        leaves[0] = nap("gradient", jax.lax.stop_gradient(leaves[0]))
        return algorithm.loss(variables, structure.unflatten(leaves), context)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        leaves[0] = nap("optimizer", leaves[0])
        inner = optax.with_extra_args_support(algorithm.optimizer)
        return inner.update(structure.unflatten(leaves), state, params, **extra)

    optimizer = optax.GradientTransformationExtraArgs(algorithm.optimizer.init, update)
    return dataclasses.replace(
        algorithm, policy=policy, postprocess=postprocess, loss=loss, optimizer=optimizer
    )


class DrowsySource:
    """An environment's source whose compiled environment takes a nap before each step."""

    def __init__(self, source: Any, nap: Any) -> None:
        self._source, self._nap = source, nap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def device(self) -> Any:
        env = self._source.device()
        return env._replace(
            step=lambda state, action, keys: env.step(state, self._nap("environment", action), keys)
        )


def test_the_operations_of_matrix_products_are_counted() -> None:
    def layers(x: jax.Array, w: jax.Array, kernel: jax.Array) -> Any:
        x, _ = jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)
        larger = jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)
        images = jax.lax.conv_general_dilated(
            jnp.ones((2, 8, 8, 3)),
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return larger, images

    def named(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("update"), jax.named_scope("torso"):
            x = jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, w), None), x, length=3)[0]
        with jax.named_scope("head"):
            return jnp.sum(x @ w)

    product, pixels = 2 * 5 * 7 * 7, 2 * 6 * 6
    args = jnp.ones((5, 7)), jnp.ones((7, 7)), jnp.ones((3, 3, 3, 4))
    jaxpr = jax.make_jaxpr(layers)(*args).jaxpr
    assert SCRIPT.of_products(jaxpr) == {"other": (3 + 2) * product + 2 * pixels * 4 * (3 * 3 * 3)}
    backward = jax.make_jaxpr(jax.grad(named, argnums=(0, 1)))(*args[:2]).jaxpr
    assert SCRIPT.of_products(backward) == {"torso": 3 * 3 * product, "head": 3 * product}, (
        "forward, and two gradients"
    )
    over = mesh.acting(
        lambda x, w: x @ w,
        mesh.make_mesh(jax.devices()[:2]),
        (mesh.BATCH, mesh.REPLICATED),
        mesh.BATCH,
    )
    assert SCRIPT.of_products(jax.make_jaxpr(over)(jnp.ones((10, 7)), args[1]).jaxpr) == {
        "other": 2 * product
    }


def test_the_bytes_that_a_program_moves_are_counted() -> None:
    """Elementwise operations are fused into what reads and writes."""
    x, w, row = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32), np.int32(0)

    def moved(function: Any, *args: Any) -> int:
        return SCRIPT.of_memory(jax.make_jaxpr(function)(*args).jaxpr)

    assert moved(lambda x: jnp.tanh(x + 1) * 2, x) == 2 * x.nbytes
    product, out = x.nbytes + w.nbytes, 8 * 4 * 4
    assert moved(lambda x, w: x @ w, x, w) == product + out
    assert moved(lambda x, w: jnp.tanh(jnp.exp(x @ w)), x, w) == product + 2 * out, (
        "XLA fuses nothing into a product"
    )
    assert moved(lambda x: x.sum(), x) == x.nbytes + 4
    taken, index = 16 * 4, 4
    assert (
        moved(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 1)[0], x, row) < 2 * taken + 5 * index
    )
    put = moved(lambda x, y, i: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0), x, x[:1], row)
    assert 2 * taken <= put < 2 * taken + 5 * index, "the rest stays where it is"

    def loop(x: jax.Array, rows: jax.Array, scale: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, row: (carry * scale, row + carry), x, rows)

    rows = np.ones((5, 8, 16), np.float32)
    assert moved(loop, x, rows, x) == 5 * 5 * x.nbytes, (
        "in each pass three are read and two written"
    )

    def ring(memory: jax.Array, rows: jax.Array) -> Any:
        def add(memory: jax.Array, row: jax.Array) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(
                memory, row[None], 3, 0
            ), jax.lax.slice_in_dim(memory, 0, 1)

        return jax.lax.scan(jax.jit(add), memory, rows)

    memory = np.ones((1000, 16), np.float32)
    assert moved(ring, memory, memory[:5]) <= 5 * (5 * taken + 4 * index), (
        "memory that is written in place"
    )
    branches = moved(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x.T, lambda: x[:, :8] * 2), x)
    least = 2 * x.nbytes + 8 * 8 * 4
    assert least <= branches <= least + x.nbytes + 8 * 8 * 4 + 100
    two = mesh.make_mesh(jax.devices()[:2])
    over = mesh.acting(lambda x, w: x @ w, two, (mesh.BATCH, mesh.REPLICATED), mesh.BATCH)
    assert moved(over, x, w) == product + out + w.nbytes, "each of two devices reads all of w"


def test_a_profiled_run_writes_no_data_set_and_no_film() -> None:
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", record="x", wandb=True, video_interval=1000, run_dir="y"
    )
    config = timing._learning_only(config)
    assert (config.record, config.video_interval, config.run_dir, config.wandb) == (
        None,
        None,
        None,
        False,
    )


def test_profile_parts_are_scaled_to_the_whole() -> None:
    alone = {"postprocess": 1.0, "gradient": 3.0}
    stages = timing._divided({"environment": 2.0, "update": 2.0, "closing": 0.0}, alone, 5.0)
    assert stages == {"environment": 2.0, "postprocess": 0.5, "gradient": 1.5, "rest": 1.0}
    stages = timing._divided({"update": 5.0}, alone, 5.0)
    assert stages == {"postprocess": 1.0, "gradient": 3.0, "rest": 1.0}
    thirds = {name: 0.1 / 3 for name in ("policy", "postprocess", "gradient")}
    assert [
        timing._divided({"update": 0.1 * k}, thirds, 0.1 * k)["rest"] for k in (0.1, 0.3, 0.7)
    ] == [0.0] * 3


@pytest.mark.parametrize("running, busy", [(0.6, True), (1.0, False), (1.7, False)])
def test_profile_names_no_stage_on_a_busy_machine(
    running: float, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()

    def seconds() -> float:
        return 0.01 * next(now)

    clocks = types.SimpleNamespace(perf_counter=seconds, process_time=lambda: running * seconds())
    monkeypatch.setattr(timing, "time", clocks)
    reports: Any = (types.SimpleNamespace(updates=1) for _ in itertools.count())
    stage: Any = types.SimpleNamespace(run=lambda: np.zeros(()))
    times = timing._timed(reports, {"gradient": stage}, 0.1, lambda text: None, in_turn=True)
    assert times.alone["gradient"] > 0
    assert times.running == pytest.approx(min(running, 1.0), abs=0.1)
    found = profiled({"device": {"gradient": 1.0}})._replace(running=times.running)
    last = profile.lines(found)[-1]
    assert found.busy == busy == last.startswith("the machine is busy: the stages had a core for")
    assert busy or last.split()[:3] == ["gradient", "1e+03", "50.0%"]


def profiled(threads: dict[str, dict[str, float]], alone: Any = None) -> timing.Profile:
    """A profile of some run, of 2 s an iteration."""
    names = ("algorithm", "env", "plan", "num_envs", "rollout_length", "devices", "kind")
    return timing.Profile(dict.fromkeys(names, 1), 1.0, 2.0, threads, alone or {})


def test_shares_of_a_peak_that_a_stage_surpasses_are_not_shown() -> None:
    """Its arrays stay in caches: how fast these are is not measured."""
    found = profiled({}, {"gradient": 1.0, "optimizer": 2.0})
    work = {
        "gradient": SCRIPT.Work({"MLP/Dense_1": 3, "MLP/Dense_0": 1}, 12),
        "optimizer": SCRIPT.Work({}, 4),
    }
    _, gradient, optimizer = SCRIPT.table(found, work, SCRIPT.Peaks(matmul=16.0, memory=4.0))
    assert gradient.split() == ["gradient", "25%", "MLP/Dense_1", "75%,", "MLP/Dense_0", "25%"]
    assert optimizer.split() == ["optimizer", "50%"]


def test_advice_names_flags_that_the_run_has() -> None:
    advice = (
        "a lower --replay-ratio computes less; --precision bfloat16 computes faster on accelerators"
    )
    bound = SCRIPT.bound({"device": {"gradient": 1.0}}, 2.0, ["--replay-ratio", "--precision"])
    assert bound.advice == f"the loss and its gradient bind: {advice}"


@pytest.mark.parametrize(
    "algorithm, plan, epochs, missing",
    [
        ("appo", "asynchronous", 2, "--plan"),
        ("appo", "synchronous", 1, "--num-epochs"),
        ("ppo", "on_device", 2, "--plan"),
    ],
)
def test_advice_names_no_flag_that_the_run_follows(
    algorithm: str, plan: str, epochs: int, missing: str
) -> None:
    """Nor a plan whose experience is older than the loss of PPO allows for."""
    config, source = resolved(
        jaxrl_dist.preset(algorithm, "CartPole-v1", plan=plan, num_epochs=epochs)
    )
    flags = SCRIPT.changeable(config, make_algorithm(config, source.spec))
    assert {"--plan", "--num-epochs", "--num-envs"} - {*flags} == {missing}


def test_the_last_sentence_names_the_thread_that_binds() -> None:
    """Its share is that of no stage in which a thread waits, though these may be the largest."""
    threads = {
        "learner": {"waiting for actors": 1.6, "gradient": 0.4},
        "actor": {"environment": 1.2, "policy": 0.8},
    }
    sentence = SCRIPT.sentence(profiled(threads), SCRIPT.bound(threads, 2.0, []))
    assert sentence.startswith(
        "60% of the time of the actor, which waits least: the environments bind"
    )


def test_an_actor_with_long_rollouts_has_no_negative_rest() -> None:
    divided = timing._divided({"environment": 3.0, "policy": 1.0, "idle": 0.0}, {}, 2.0)
    assert divided == {"environment": 1.5, "policy": 0.5, "rest": 0.0}
    assert timing._divided({"environment": 1.5}, {}, 2.0) == {"environment": 1.5, "rest": 0.5}


@pytest.mark.parametrize("name", ["gru", "lstm", "linear"])
def test_products_of_a_core_belong_to_its_layers(name: str) -> None:
    core = getattr(cores, name)(8, jnp.float32)
    features, state, valid = jnp.ones((5, 3, 4)), core.initial(3), jnp.ones((5, 3), bool)
    params = core.init(jax.random.key(0), features[0])[0]
    module = {"gru": "GRUCell", "lstm": "OptimizedLSTMCell", "linear": "LinearRecurrence"}[name]
    for function in (
        lambda params: core.unroll(params, features, state, valid)[0].sum(),
        lambda params: core.step(params, features[0], state)[0].sum(),
    ):
        layers = SCRIPT.of_products(jax.make_jaxpr(jax.grad(function))(params).jaxpr)
        assert layers and {layer.split("/")[0] for layer in layers} == {module}
        assert not any(layer.endswith(f"/{module}") for layer in layers)


@pytest.mark.case  # test_a_stage_that_sleeps_is_the_one_that_takes_longer
@pytest.mark.parametrize(
    "command, threads",
    [
        ("ppo --env CartPole-v1 --rollout-length 8 --num-epochs 1", {"device"}),
        (
            "r2d2 --env CartPole-v1 --rollout-length 8 --sequence-length 4 --burn-in 2 --core-size 4",
            {"device"},
        ),
        ("ppo --env envpool:CartPole-v1 --rollout-length 8 --num-epochs 1", {"main"}),
        (
            "impala --env envpool:CartPole-v1 --rollout-length 8 --num-actors 2",
            {"learner", "actor"},
        ),
        (
            "a2c --env envpool:CartPole-v1 --plan gradients --rollout-length 8 --num-actors 2",
            {"learner", "actor"},
        ),
    ],
    ids=["on_device", "replay", "synchronous", "asynchronous", "gradients"],
)
def test_a_run_is_profiled(
    command: str, threads: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture, trace = (
        tmp_path / "profile.json",
        tmp_path / "profile.png",
        tmp_path / "trace.json.gz",
    )
    traced = "" if "gradients" in command else f"--trace {trace}"
    assert (
        cli.main(f"profile {command} {SMALL} --json {file} --picture {picture} {traced}".split())
        == 0
    )
    found = runs.read_json(file)
    assert found["threads"].keys() == threads and picture.stat().st_size > 1000
    for spent in found["threads"].values():
        assert sum(spent.values()) == pytest.approx(found["iteration_seconds"], rel=1e-6)
        assert all(seconds >= 0 for stage, seconds in spent.items() if stage != "rest")
    if traced:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert {"postprocess", "gradient", "optimizer"} < {event.get("name") for event in events}
    if "device" in threads:
        assert {"environment", "policy", "postprocess", "gradient", "optimizer"} < found["threads"][
            "device"
        ].keys()
    steps = found["run"]["num_envs"] * found["run"]["rollout_length"]
    if "gradients" not in command:  # there an iteration is one actor's rollout
        assert found["env_steps_per_second"] == pytest.approx(
            steps / found["iteration_seconds"], rel=0.3
        )
    assert doing(capsys.readouterr().err) == ["compiling the run and its stages", "timing the run"]
    assert not list(tmp_path.glob("runs*"))


def doing(said: str) -> list[str]:
    """What a profile says that it does."""
    lines = [line for line in said.splitlines() if line.startswith("jaxrl-dist: ")]
    return [line.removeprefix("jaxrl-dist: ").split(" for ")[0] for line in lines]


@pytest.mark.parametrize(
    "command",
    [
        "ppo --env CartPole-v1 --rollout-length 8 --num-epochs 1",
        pytest.param(
            "dqn --env envpool:CartPole-v1 --rollout-length 8 --batch-size 8",
            marks=pytest.mark.case,
        ),
    ],
)
def test_the_script_says_what_binds(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bottleneck.json"
    SCRIPT.main(f"{command} {SMALL} --json {file}".split())
    found = runs.read_json(file)
    assert found["memory_ceiling"] > 1e8 and found["matmul_ceiling"] > 1e8
    assert all(rate > 0 for rate in found["memory_rates"].values())
    assert found["layers"].keys() == found["matmul_rates"].keys() >= {"gradient"}
    for layers in found["layers"].values():
        assert sum(layers.values()) > 0 and "other" not in layers
    out, err = capsys.readouterr()
    assert doing(err)[-1] == "timing the peaks of the device"
    assert f"{found['bound']['advice']}\n" in out or "profile again" in out


def test_the_picture_names_each_stage_once(tmp_path: Path) -> None:
    threads = {"learner": {"gradient": 1.0, "rest": 1.0}, "actor": {"policy": 1.0, "rest": 1.0}}
    profile._draw(profiled(threads), tmp_path / "profile.svg")
    drawn = (tmp_path / "profile.svg").read_text()
    assert [drawn.count(f">{stage}<") for stage in ("gradient", "policy", "rest")] == [1, 1, 1]


@pytest.mark.case  # test_a_run_is_profiled
def test_the_config_of_a_run_is_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of one that had trackers, sampled evaluations and step sizes that end,
    none of which a profile has.
    """
    run_dir = tmp_path / "run"
    (run_dir).mkdir()
    own = {"hidden_sizes": [4], "learning_rate_schedule": "linear", "learning_rate_steps": 1000}
    config = {"format": 1, "algorithm": "pg", "hyperparameters": own}
    config["run"] = {
        "env": "gymnax:CartPole-v1",
        "num_envs": 8,
        "rollout_length": 4,
        "report_interval": 32,
    }
    config["run"] |= {"tensorboard": True, "wandb": True, "evaluation_policy": "sampled"}
    (run_dir / "config.json").write_text(json.dumps(config))
    assert cli.main(["profile", str(run_dir), "--seconds", "0.1", "--num-devices", "1"]) == 0
    out, err = capsys.readouterr()
    assert "pg on gymnax:CartPole-v1 under on_device, 8 environments x 4 steps" in out
    assert all(line.startswith("jaxrl-dist: ") for line in err.splitlines())
    assert [path.name for path in run_dir.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    "args, message",
    [
        ("", "which run? Such as: jaxrl-dist profile ppo --env CartPole-v1"),
        ("ppo --env CartPole-v1 --seconds soon", "--seconds: 'soon' is not a number"),
        ("ppo --env CartPole-v1 --seconds 0", "--seconds must be > 0 and <= 1000000, not 0.0"),
        (
            "ppo --env CartPole-v1 --json no/x.json",
            "no/x.json cannot be written: there is no directory no",
        ),
        (
            "ppo --env CartPole-v1 --picture x.txt",
            "--picture x.txt needs the extension .png or .svg or .pdf",
        ),
        ("ppo --env CartPole-v1 --trace x.txt", "--trace x.txt needs the extension .json.gz"),
        (
            "a2c --env envpool:CartPole-v1 --plan gradients --trace x.json.gz",
            "--trace needs a plan that runs on devices, not --plan gradients; remove it",
        ),
        ("ppo --env CartPole-v1 --seeds 2", "profile measures one run; remove --seeds and --vary"),
        (
            "ppo --env CartPole-v1 --coordinator 127.0.0.1:9876 --processes 2 --process 0",
            "profile measures one process; remove --coordinator",
        ),
        (".", ". is not a run directory: it has no config.json"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_one_line(
    args: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", *args.split()]) == 2
    assert capsys.readouterr().err == f"jaxrl-dist: error: {message}\n"


@pytest.mark.parametrize("largest, binds", [(0.34, False), (0.5, True)])
def test_a_stage_binds_only_if_it_takes_clearly_the_most(largest: float, binds: bool) -> None:
    threads = {"main": {"policy": 0.305, "environment": largest, "gradient": 0.306, "rest": 0.05}}
    flags = ["--num-envs", "--hidden-sizes"]
    thread, stage, share, advice = SCRIPT.bound(threads, 1.0, flags)
    assert (thread, stage, share) == ("main", "environment", largest)
    near = "no stage binds: environment takes the most, and gradient 31%, policy 30% nearly as much"
    assert advice.startswith("the environments bind: ") if binds else advice == near
    two = {"main": {"policy": 0.45, "environment": 0.45, "rest": 0.1}}
    advice = SCRIPT.bound(two, 1.0, flags).advice
    assert advice.endswith("environment 45% nearly as much; more --num-envs would help all of them")
