"""Policies that leave the library."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.algorithms import ALGORITHMS, PRESETS
from jaxrl_dist.config.named import data_of
from jaxrl_dist.play import onnx
from jaxrl_dist.play.export import export
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run.storage import replacing
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.settings.still import Random
from jaxrl_dist.training.algorithm import make_algorithm

WITHOUT_THE_PACKAGE = """
import pathlib, sys
sys.modules["jaxrl_dist"] = sys.modules["flax"] = sys.modules["gymnax"] = None
import jax, numpy as np
from jax import export
exported = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
found = np.load(sys.argv[2])
obs, (_, core, _) = found["obs"], jax.tree.unflatten(exported.in_tree, exported.in_avals)[0]
core = jax.tree.map(lambda x: np.full((len(obs[0]), *x.shape[1:]), 7, x.dtype), core)
actions = []
for now, start in zip(obs, found["start"]):
    action, core = exported.call(now, core, start)
    actions.append(np.asarray(action))
np.save(sys.argv[3], np.stack(actions))
"""


@pytest.mark.parametrize(
    "command",
    [runs.CARTPOLE, pytest.param(runs.RECURRENT, marks=pytest.mark.case)],
    ids=["feed-forward", "recurrent"],
)
def test_an_exported_policy_acts_the_same_without_this_package(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flatbuffers")
    run_dir, out = runs.finished(command), tmp_path / "policy.stablehlo"
    assert cli.main(["export", str(run_dir), "-o", str(out)]) == 0
    assert f"wrote {out}" in (said := capsys.readouterr().out) and "float32[b," in said
    assert ("the layout of core: (" in said) == (command == runs.RECURRENT)
    policy = jaxrl_dist.load_policy(run_dir)
    rng, shape = np.random.default_rng(0), policy.source.spec.observation.shape
    for count in (1, 5):  # any number of environments
        obs, start = (
            rng.normal(size=(6, count, *shape)).astype(np.float32),
            np.zeros((6, count), bool),
        )
        start[0], start[3, 0] = True, True
        np.savez(tmp_path / "in.npz", obs=obs, start=start)
        script = [
            sys.executable,
            "-c",
            WITHOUT_THE_PACKAGE,
            str(out),
            str(tmp_path / "in.npz"),
            str(tmp_path / "out.npy"),
        ]
        subprocess.run(script, check=True, cwd=tmp_path, timeout=120)
        core, expected = policy.initial_core(count), []
        for now, begins in zip(obs, start, strict=True):
            fresh = policy.initial_core(count)
            core = jax.tree.map(
                lambda a, b: np.where(begins.reshape(-1, *(1,) * (b.ndim - 1)), a, b), fresh, core
            )
            action, core = policy(now, core)
            expected.append(np.asarray(action))
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), np.stack(expected), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        runs.CARTPOLE,
        runs.RECURRENT,
        "sac --env Pendulum-v1 --hidden-sizes 8",
        "ppo --env Breakout-MinAtar",
    ],
    ids=["feed-forward", "recurrent", "continuous", "image"],
)
def test_an_onnx_file_acts_the_same_in_another_runtime(command: str, tmp_path: Path) -> None:
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    run_dir, out = tmp_path / "run", tmp_path / "policy.onnx"
    sizes = "--total-env-steps 512 --evaluation-episodes 0 --num-devices 1 --quiet --run-dir"
    if command in (runs.CARTPOLE, runs.RECURRENT):
        run_dir = runs.finished(command)
    else:
        assert cli.main(["train", *command.split(), *sizes.split(), str(run_dir)]) == 0
    assert cli.main(["export", str(run_dir), "--format", "onnx", "-o", str(out)]) == 0
    session = onnxruntime.InferenceSession(out.read_bytes())
    policy = jaxrl_dist.load_policy(run_dir)
    rng, shape = np.random.default_rng(0), policy.source.spec.observation.shape
    inputs = [x for x in session.get_inputs() if x.name.startswith("core/")]
    names = [x.name for x in inputs]
    for count in (1, 5):
        core = [np.zeros((count, *x.shape[1:]), np.float32) for x in inputs]
        mine = policy.initial_core(count)
        for step in range(4):
            obs = rng.normal(size=(count, *shape)).astype(np.float32)
            feeds = {
                "obs": obs,
                **dict(zip(names, core, strict=True)),
                "start": np.full(count, step == 0),
            }
            action, *core = session.run(["action", *(f"next_{name}" for name in names)], feeds)
            expected, mine = policy(obs, mine)
            np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-6)


def untrained(name: str, env: str, **options: Any) -> jaxrl_dist.Policy:
    config = jaxrl_dist.preset(name, env, hidden_sizes=(8,), **options)
    source = find_env(config)
    algorithm = source.spec.bare(make_algorithm(config, source.spec))
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    return jaxrl_dist.Policy(config, source, variables)


def check_exported(policy: jaxrl_dist.Policy, out: Path, format: str = "stablehlo") -> str:
    """Exports for any and for three environments; checks actions of the former;
    returns the layout of its core.
    """
    done = export(policy, out, format=format)
    rng = np.random.default_rng(0)
    obs = [
        rng.normal(size=(3, *policy.source.spec.observation.shape)).astype(np.float32)
        for _ in range(3)
    ]
    mine, expected, actions = policy.initial_core(3), [], []
    for now in obs:
        action, mine = policy(now, mine)
        expected.append(np.asarray(action))
    starts = [np.full(3, step == 0) for step in range(3)]
    if format == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(out.read_bytes())
        inputs = [x for x in session.get_inputs() if x.name.startswith("core/")]
        core = [np.zeros((3, *x.shape[1:]), np.float32) for x in inputs]
        names = ["action", *(f"next_{x.name}" for x in inputs)]
        for now, start in zip(obs, starts, strict=True):
            known = {x.name: value for x, value in zip(inputs, core, strict=True)}
            action, *core = session.run(names, {"obs": now, "start": start, **known})
            actions.append(action)
    else:
        read = jax.export.deserialize(bytearray(out.read_bytes()))
        core = jax.tree.unflatten(read.in_tree, read.in_avals)[0][1]
        core = jax.tree.map(lambda x: np.zeros((3, *x.shape[1:]), x.dtype), core)
        for now, start in zip(obs, starts, strict=True):
            action, core = read.call(now, core, start)
            actions.append(action)
    np.testing.assert_allclose(np.stack(actions), np.stack(expected), rtol=1e-4, atol=1e-5)
    assert export(policy, out, batch=3, format=format).core == done.core.replace("[b,", "[3,")
    return done.core


def test_what_only_exploration_keeps_is_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    policy = untrained("dqn", "CartPole-v1")
    assert policy.config.algorithm.ez_greedy and jax.tree.leaves(policy.initial_core(2))
    assert check_exported(policy, tmp_path / "policy") == ""


@pytest.mark.parametrize(
    "core", ["linear", "attention", pytest.param("lstm", marks=pytest.mark.case)]
)
def test_every_core_can_be_exported(core: str, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    assert check_exported(
        untrained("ppo", "CartPole-v1", core=core, core_size=8), tmp_path / "policy"
    )


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "lstm", "attention"])
def test_cores_can_be_exported_as_onnx(core: str, tmp_path: Path) -> None:
    pytest.importorskip("jax2onnx")
    policy = untrained("ppo", "CartPole-v1", core=core, core_size=8)
    assert check_exported(policy, tmp_path / "policy.onnx", format="onnx")


def test_complex_numbers_are_not_exported_as_onnx(tmp_path: Path) -> None:
    policy = untrained("ppo", "CartPole-v1", core="linear", core_size=8)
    with pytest.raises(jaxrl_dist.ConfigError, match="complex numbers, which ONNX lacks"):
        export(policy, tmp_path / "policy.onnx")


def test_a_search_with_the_simulator_stays_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flatbuffers")
    run_dir = runs.finished(f"alphazero --env CartPole-v1 {runs.TINY}")
    assert cli.main(["export", str(run_dir), "-o", str(tmp_path / "policy")]) == 0
    assert "without a search, like evaluate --num-simulations 0" in capsys.readouterr().out


@pytest.mark.case  # the test before it stands in for it
@pytest.mark.parametrize("format", ["stablehlo", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name for name in (*ALGORITHMS, *PRESETS) if data_of(name) is None]
)
def test_every_algorithm_can_be_exported(name: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers" if format == "stablehlo" else "jax2onnx")
    exported = 0
    for env in ("CartPole-v1", "Pendulum-v1"):
        for options in (
            {},
            {"core": "gru", "core_size": 8},
            {"cql_weight": 1.0, "cql_floor": True},
        ):
            try:
                policy = untrained(name, env, **options)
            except jaxrl_dist.ConfigError:
                assert options or exported or env == "CartPole-v1", (
                    "it trains in neither environment"
                )
                continue
            exported += 1
            core = check_exported(policy, tmp_path / "policy", format)
            recurrent = Traits.of(policy.config.algorithm).core != "none"
            assert bool(core) == recurrent, "nothing else is kept from step to step"
    assert exported


@pytest.mark.parametrize(
    "args, message",
    [
        ("", "which run? Name its directory"),
        ("{runs}/nothing", "is not a run directory"),
        ("{run} --platforms gpu", "--platforms must be one of cpu, cuda, rocm, tpu, not 'gpu'"),
        ("{run} --batch 0", "--batch must be >= 1"),
        ("{run} --format onnx --platforms cpu", "--platforms works with StableHLO only"),
        ("{run} --format tflite", "tflite"),
        # the ending names the format
        ("{run} -o x.onnx --platforms cpu", "--platforms works with StableHLO only"),
        (
            "{run} -o x.onnx --format stablehlo",
            "--format stablehlo contradicts the ending of x.onnx; remove it, or",
        ),
        ("{run} -o {runs}/nowhere/x", "nowhere/x cannot be written: there is no directory"),
    ],
)
def test_what_cannot_be_exported(
    args: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "nowhere" in args:
        pytest.importorskip("flatbuffers")
    command = ["export", *args.format(runs=tmp_path, run=runs.finished(runs.CARTPOLE)).split()]
    assert cli.main(command) == 2
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_a_link_in_a_run_directory_is_not_written_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (link := tmp_path / "policy.stablehlo").symlink_to(tmp_path / "victim")
    assert cli.main(["export", str(tmp_path)]) == 2
    assert f"{link} is a link, and links in a run directory are not" in capsys.readouterr().err


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flatbuffers")
    run_dir, out = runs.finished(runs.CARTPOLE), tmp_path / "policy.stablehlo"
    out.write_bytes(b"before")

    def full(self: Path, content: bytes) -> None:
        self.open("wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        assert cli.main(["export", str(run_dir), "-o", str(out)]) == 1
    assert capsys.readouterr().err == f"jaxrl-dist: error: {out}: No space left on device\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "policy.stablehlo": b"before"
    }
    (link := tmp_path / "link").symlink_to(out)
    assert cli.main(["export", str(run_dir), "-o", str(link)]) == 0
    assert link.is_symlink() and out.stat().st_size > 1000
    os.mkfifo(pipe := tmp_path / "pipe")
    with replacing(pipe) as place:
        assert place == pipe


@pytest.mark.parametrize(
    "policies, options, message",
    [
        ({"a": None, "b": None}, {}, "the run has a, b; name one, as in --policy a"),
        ({}, {"format": "tflite"}, "format must be one of stablehlo, onnx, not 'tflite'"),
        ({}, {"format": "onnx", "platforms": ("cpu",)}, "platforms works with StableHLO only"),
        ({}, {"out": "x.ONNX", "platforms": ("cpu",)}, "platforms works with StableHLO only"),
        (
            {},
            {"out": "x.stablehlo", "format": "onnx"},
            "onnx contradicts the ending of x.stablehlo",
        ),
    ],
)
def test_python_refuses_as_the_command_does(
    policies: Any, options: Any, message: str, tmp_path: Path
) -> None:
    policy: Any = SimpleNamespace(source=SimpleNamespace(spec=SimpleNamespace(policies=policies)))
    with pytest.raises(jaxrl_dist.ConfigError) as error:
        export(policy, **{"out": tmp_path / "policy", **options})
    assert message in error.value.with_flags and not (tmp_path / "policy").exists()


def test_a_policy_that_reads_rewards_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", core="gru", core_size=4, core_inputs="action,reward"
    )
    source = find_env(config)
    policy = jaxrl_dist.Policy(
        config, source, config.algorithm.make(source.spec).init(jax.random.key(0))
    )
    with pytest.raises(jaxrl_dist.ConfigError) as error:
        export(policy, tmp_path / "policy")
    message = error.value.with_flags
    assert (
        "exported function takes no reward" in message and "--core-inputs action,reward" in message
    )
    assert "--batch" not in message and "\n" not in message


def test_random_actions_need_a_key_and_are_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    config = jaxrl_dist.Train(Random(), env="Pendulum-v1")
    policy = jaxrl_dist.Policy(
        config, find_env(config), Random().make(find_env(config).spec).init(jax.random.key(0))
    )
    obs, message = (
        np.zeros((2, 3), np.float32),
        r"^this policy only samples actions;.*policy\(obs, core, key\)",
    )
    assert policy(obs, key=jax.random.key(0))[0].shape == (2, 1)
    with pytest.raises(ValueError, match=message):
        policy(obs)
    with pytest.raises(jaxrl_dist.ConfigError, match=message):
        export(policy, tmp_path / "policy", batch=2)


def test_missing_jax2onnx_names_its_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # as without what it needs
    (tmp_path / "jax2onnx.py").write_text("raise ModuleNotFoundError(name='onnx_ir')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax2onnx", raising=False)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for version, message in (
        (missing, f"format onnx needs jax2onnx, which is not installed: {onnx.INSTALL}"),
        (
            lambda name: "0.17.1",
            f"format onnx needs onnx_ir, which is not installed: {onnx.INSTALL}",
        ),
        (lambda name: "0.9.1", f"needs jax2onnx 0.17, and 0.9.1 is installed: {onnx.INSTALL}"),
    ):
        monkeypatch.setattr(onnx.importlib.metadata, "version", version)
        with pytest.raises(jaxrl_dist.ConfigError, match=re.escape(message)):
            onnx.converted(lambda: [], [], [], [])


def test_without_flatbuffers_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    assert cli.main(["export", str(runs.finished(runs.CARTPOLE))]) == 2
    assert (
        "an export needs a package that is not installed: pip install flatbuffers"
        in capsys.readouterr().err
    )


def test_policy_pickles_and_has_a_repr() -> None:
    policy = jaxrl_dist.load_policy(runs.finished(runs.CARTPOLE))
    assert repr(policy).startswith("Policy(ppo on gymnax:CartPole-v1, ") and repr(policy).endswith(
        " parameters)"
    )
    again = pickle.loads(pickle.dumps(policy))
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_array_equal(again(obs)[0], policy(obs)[0])
    assert repr(again) == repr(policy) and again.config == policy.config
