"""What the documents show runs as it stands there."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import html
import json
import os
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import tomllib
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
import pytest
import runs
from PIL import Image
from probes import random_rollout, spec
from scipy import stats

import jaxrl_dist
from jaxrl_dist import cli, commands, lazy, mesh
from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class, from_file
from jaxrl_dist.algorithms.presets import KINDS, kind_of
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import compile_for, help, profile, resume, sweep
from jaxrl_dist.envs.source import find
from jaxrl_dist.learners.on_policy import on_policy
from jaxrl_dist.nn import networks
from jaxrl_dist.run import table
from jaxrl_dist.run.version import RELEASE
from jaxrl_dist.templates import ppo as ppo_template
from jaxrl_dist.types import Context, Report


def blocks(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(
        r"```python\n(.*?)```", (runs.ROOT / name).read_text(encoding="utf-8"), re.DOTALL
    )


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    module = types.ModuleType("documented_algorithm")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(
        compile(blocks("docs/adding-an-algorithm.md")[0], "docs/adding-an-algorithm.md", "exec"),
        module.__dict__,
    )
    return module


def imports(text: str) -> set[str]:
    """What a file imports of the package, ``from a import b`` as ``a.b``."""
    nodes = [*ast.walk(ast.parse(text))]
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {
        f"{node.module}.{x.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for x in node.names
    }
    return {name for name in whole | parts if name.split(".")[0] == "jaxrl_dist"}


def test_documents_list_what_users_import() -> None:
    pages = [*(runs.ROOT / "docs").rglob("*.md"), runs.ROOT / "README.md"]
    texts = [block for page in pages for block in blocks(str(page.relative_to(runs.ROOT)))]
    texts += [
        path.read_text(encoding="utf-8")
        for path in (runs.ROOT / "jaxrl_dist" / "templates").glob("*.py")
    ]
    for path in (runs.ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    texts += [
        (runs.ROOT / "jaxrl_dist/algorithms" / f"{name}.py").read_text(encoding="utf-8")
        for name in ALGORITHMS
    ]
    page = (runs.ROOT / "docs/adding-an-algorithm.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"`(jaxrl_dist(?:\.\w+)+)`", page.partition("## What to import")[2].partition("\n## ")[0]
    )
    taken = (
        set().union(*map(imports, texts))
        - {f"jaxrl_dist.{name}" for name in jaxrl_dist.__all__}
        - {"jaxrl_dist"}
    )
    late = {name.removeprefix("jaxrl_dist.lazy.") for name in taken} & vars(lazy).keys()
    taken |= {module for module in listed if module.rpartition(".")[2] in late}
    homes = {
        name: [module for module in listed if f"{name}.".startswith(f"{module}.")] for name in taken
    }
    assert not [name for name, modules in homes.items() if not modules]
    assert late - {"jax", "jnp", "np", "optax"} <= {module.rpartition(".")[2] for module in listed}
    assert {*listed} - {module for modules in homes.values() for module in modules} == {
        "jaxrl_dist.protocols"
    }


def test_what_documents_import_has_a_page() -> None:
    """In the reference, or as an algorithm."""
    texts = [
        block
        for page in (runs.ROOT / "docs").rglob("*.md")
        for block in blocks(str(page.relative_to(runs.ROOT)))
    ]
    pages = [path.read_text(encoding="utf-8") for path in (runs.ROOT / "docs" / "api").glob("*.md")]
    shown = {name for text in pages for name in re.findall(r"^::: (\S+)", text, re.M)}
    shown |= {f"jaxrl_dist.algorithms.{name}" for name in ALGORITHMS} | {"jaxrl_dist"}
    shown |= {f"jaxrl_dist.{name}" for name in jaxrl_dist.__all__}
    taken = set().union(*map(imports, texts))
    assert not [name for name in taken if not {name, name.rpartition(".")[0]} & shown]
    nav = (runs.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"api/{path.name}" in nav for path in (runs.ROOT / "docs" / "api").glob("*.md"))


def test_the_documented_algorithm_is_short() -> None:
    assert len(blocks("docs/adding-an-algorithm.md")[0].splitlines()) <= 60


@pytest.mark.case  # algorithms/test_own_algorithm.py
def test_the_documented_algorithm_can_be_tried_by_hand(example: types.ModuleType) -> None:
    algorithm = example.RWR(hidden_sizes=(4,)).make(spec())
    variables = algorithm.init(jax.random.key(0))
    rollout = random_rollout(algorithm, spec(), 5, 3)
    names: dict[str, Any] = {
        "mesh": mesh,
        "algorithm": algorithm,
        "variables": variables,
        "rollout": rollout,
    }
    names["context"] = Context()
    exec(
        next(block for block in blocks("docs/adding-an-algorithm.md") if "by_hand" in block), names
    )
    assert names["batch"]["weight"].shape == (15,)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_the_documented_file_lets_the_entropy_bonus_fall(core: str) -> None:
    module = types.ModuleType("documented_fading")
    sys.modules[module.__name__] = module
    exec(
        next(block for block in blocks("docs/adding-an-algorithm.md") if "FadingPPO" in block),
        module.__dict__,
    )
    fields = {"hidden_sizes": (4,), "core": core, "entropy_coefficient": 0.5}
    algorithm = module.FadingPPO(**fields, entropy_steps=200).make(spec())
    base = config_class("ppo")(**fields).make(spec())
    variables = algorithm.init(jax.random.key(0))
    rollout = random_rollout(base, spec(), 5, 3)
    batch = mesh.by_hand(algorithm.postprocess)(variables, rollout, Context())
    whole, _, aux = base.loss(variables, batch, Context())
    for step, left in ((0.0, 1.0), (50.0, 0.75), (300.0, 0.0)):
        losses, _, faded = algorithm.loss(variables, batch, Context(env_step=step))
        bonus = 0.5 * (1 - left) * aux.metrics["policy/entropy"]
        np.testing.assert_allclose(losses, whole + bonus, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(faded.metrics["entropy/weight"], 0.5 * left, rtol=1e-6)


def test_the_documented_frame_of_pandas_has_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for member in range(2):
        folder = tmp_path / "runs/ppo/members" / f"{member:03d}"
        folder.mkdir(parents=True)
        lines = [
            {"env_steps": 100 * i + member, "iteration": i, "episode/return": i + member}
            for i in (1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    exec(next(block for block in blocks("docs/metrics.md") if "pandas" in block), {})
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["1", "1.5", "0.707107", "2"],
        ["2", "2.5", "0.707107", "2"],
    ]


@pytest.mark.case  # test_the_readme_s_python_runs
def test_the_documented_change_of_ppo_adds_its_penalty() -> None:
    module = types.ModuleType("documented_change")
    sys.modules[module.__name__] = module
    exec(
        next(block for block in blocks("docs/adding-an-algorithm.md") if "PenalisedPPO" in block),
        module.__dict__,
    )
    algorithm = module.PenalisedPPO(hidden_sizes=(4,), weight_penalty=0.5).make(spec())
    base = config_class("ppo")(hidden_sizes=(4,)).make(spec())
    variables = algorithm.init(jax.random.key(0))
    rollout = random_rollout(base, spec(), 5, 3)
    batch = mesh.by_hand(algorithm.postprocess)(variables, rollout, Context())
    losses, _, aux = algorithm.loss(variables, batch, Context())
    before, _, _ = base.loss(variables, batch, Context())
    penalty = 0.5 * sum(float((x**2).sum()) for x in jax.tree.leaves(variables.params))
    np.testing.assert_allclose(losses, before + 0.5 * penalty, rtol=1e-5)
    np.testing.assert_allclose(aux.metrics["loss/penalty"], penalty, rtol=1e-5)
    assert {"loss/policy", "loss/value"} <= aux.metrics.keys()
    task = dataclasses.replace(spec(), family="bsuite")
    assert module.PenalisedPPO.preset(task) == config_class("ppo").preset(task) != {}


def test_the_documented_change_lets_the_entropy_bonus_fall() -> None:
    page = (runs.ROOT / "docs" / "adding-an-algorithm.md").read_text(encoding="utf-8")
    [change] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    source = Path(ppo_template.__file__).read_text(encoding="utf-8")
    for part in change.split("@@\n"):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        assert source.count(before) == 1
        source = source.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    module = types.ModuleType("my_ppo")
    sys.modules[module.__name__] = module
    exec(compile(source, "my_ppo.py", "exec"), module.__dict__)
    algorithm = module.PPO(hidden_sizes=(4,), entropy_steps=200).make(spec())
    variables = algorithm.init(jax.random.key(0))
    rollout = random_rollout(algorithm, spec(), 5, 3)
    batch = mesh.by_hand(algorithm.postprocess)(variables, rollout, Context())
    first, half, last = (
        algorithm.loss(variables, batch, Context(env_step=step))[0] for step in (0.0, 100.0, 300.0)
    )
    bonus = 0.01 * algorithm.loss(variables, batch, Context())[2].metrics["policy/entropy"]
    np.testing.assert_allclose(half - first, 0.5 * bonus, rtol=1e-3)
    np.testing.assert_allclose(last - first, bonus, rtol=1e-3)


@pytest.mark.parametrize(
    "page, name", [("your-environment", "RandomGravity"), ("goals", "BitFlip")]
)
def test_the_documented_environment_has_no_fault(
    page: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = next(block for block in blocks(f"docs/{page}.md") if name in block)
    (tmp_path / f"documented_{page[:4]}.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check-env", f"documented_{page[:4]}:{name}"]) == 0
    printed = capsys.readouterr().out
    assert "no fault found" in printed
    assert ("--her 0.8" in printed) == (page == "goals")


def test_the_documented_relative_of_dqn_refuses_unused_flags() -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(blocks("docs/adding-an-off-policy-algorithm.md")[1], names)
    names["AdvantageDQN"]().validate()
    for fields in ({"double": False}, {"core": "gru"}):
        with pytest.raises(jaxrl_dist.ConfigError, match="does nothing without DQN's own loss"):
            names["AdvantageDQN"](**fields).validate()


@pytest.mark.case  # test_the_documented_algorithm_can_be_tried_by_hand
def test_the_documented_algorithm_learns_and_loads(
    example: types.ModuleType, tmp_path: Path
) -> None:
    sizes = {
        "total_env_steps": 60_000,
        "evaluation_episodes": 20,
        "num_devices": 1,
        "run_dir": str(tmp_path / "run"),
    }
    config = jaxrl_dist.Train(example.RWR(), env="CartPole-v1", **sizes)
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] > 150  # a random policy gets 20
    policy = jaxrl_dist.load_policy(tmp_path / "run", example.RWR)
    played = policy.evaluate(20, seed=0)
    assert played.summary() == last.evaluation
    with pytest.raises(jaxrl_dist.ConfigError, match="unknown algorithm 'RWR'"):
        jaxrl_dist.load_policy(tmp_path / "run")


def curious(folder: Path, **fields: Any) -> list[Report]:
    """The reports of the documented bonus on DeepSea."""
    file = folder / "curious_ppo.py"
    file.write_text(blocks("docs/exploration.md")[0], encoding="utf-8")
    return list(
        jaxrl_dist.train(
            jaxrl_dist.preset(from_file(str(file)), "DeepSea-bsuite", num_devices=1, **fields)
        )
    )


def test_the_documented_auxiliary_loss_trains_the_torso() -> None:
    module = types.ModuleType("documented_auxiliary")
    sys.modules[module.__name__] = module
    block = next(
        block for block in blocks("docs/adding-an-algorithm.md") if "PredictingPPO" in block
    )
    exec(block, module.__dict__)
    algorithm = module.PredictingPPO(hidden_sizes=(4,), prediction_weight=0.5).make(spec())
    base = config_class("ppo")(hidden_sizes=(4,)).make(spec())
    variables = algorithm.init(jax.random.key(0))
    obs = np.random.default_rng(0).normal(size=(6, *spec().observation.shape)).astype(np.float32)
    torso = jax.tree.map(np.float64, variables.params["policy_torso"]["params"])
    (layer,) = torso.values()
    head = jax.tree.map(np.float64, variables.params["reward_head"]["params"])
    hidden = np.tanh(obs @ layer["kernel"] + layer["bias"])
    predicted = (hidden @ head["kernel"] + head["bias"])[:, 0]
    reward = np.arange(6, dtype=np.float32)
    zeros = np.zeros(6, np.float32)
    batch = {
        "obs": obs,
        "action": np.zeros(6, np.int32),
        "valid": np.ones(6, bool),
        "core": (),
        "log_prob": zeros,
        "value": zeros,
        "advantage": zeros,
        "value_target": zeros,
        "explained": zeros,
        "reward": reward,
    }
    losses, _, aux = algorithm.loss(variables, batch, Context())
    before, _, _ = base.loss(variables, batch, Context())
    np.testing.assert_allclose(aux.metrics["loss/prediction"], (predicted - reward) ** 2, rtol=1e-4)
    np.testing.assert_allclose(losses, before + 0.5 * (predicted - reward) ** 2, rtol=1e-4)


@pytest.mark.case  # test_the_documented_change_of_ppo_adds_its_penalty
def test_the_documented_bonus_falls_where_the_policy_has_been(tmp_path: Path) -> None:
    sizes = {"hidden_sizes": (16,), "evaluation_episodes": 0}
    reports = curious(tmp_path, total_env_steps=10_000, report_interval=1_000, **sizes)
    surprise = [report.metrics["loss/surprise"] or 0 for report in reports]
    # the first rollout's observations are not normalised yet
    assert 0 < surprise[-1] < 0.5 * surprise[1]


@pytest.mark.case  # test_the_readme_s_python_runs
def test_the_documented_bonus_falls_at_the_ends_of_episodes_too(tmp_path: Path) -> None:
    (file := tmp_path / "curious_ppo.py").write_text(
        blocks("docs/exploration.md")[0], encoding="utf-8"
    )
    sizes = {"hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 1, "learning_rate": 0.01}
    config = from_file(str(file))(**sizes)
    algorithm, t = config.make(spec()), np.arange(12)
    rollout = random_rollout(algorithm, spec(), 12, 2)
    # an episode has three observations
    at = {"valid": t % 3 != 2, "terminated": t % 3 == 1, "truncated": t < 0}
    at |= {"obs": np.eye(3, dtype=np.float32)[np.arange(13) % 3]}
    rollout = rollout._replace(**{name: np.repeat(x[:, None], 2, axis=1) for name, x in at.items()})
    learner = on_policy(algorithm)
    network = networks.q_network(
        config, spec().observation, 32, num_atoms=1, dueling=False, noisy=False
    )

    def surprise(variables: Any) -> Any:
        learned, fixed = (
            network.apply(x, np.eye(3), None)
            for x in (variables.params["learned"], variables.stats)
        )
        return np.square(learned - fixed).mean(axis=(1, 2))

    def learn(state: Any) -> Any:
        return jax.lax.fori_loop(
            0, 100, lambda _, state: learner.update(state, rollout, jax.random.key(1))[0], state
        )

    before = learner.init(jax.random.key(0))
    after = jax.jit(mesh.by_hand(learn))(before)
    _, middle, last = surprise(after.variables) / surprise(before.variables)
    assert middle < 0.1 and last < 0.1


@pytest.mark.slow
def test_the_documented_bonus_finds_the_treasure(tmp_path: Path) -> None:
    """Greedy episodes of DeepSea end at the treasure, worth 0.99."""
    last = curious(tmp_path, total_env_steps=60_000, evaluation_episodes=10)[-1]
    assert last.evaluation is not None and last.evaluation["return_mean"] > 0.9


@pytest.mark.case  # test_the_documented_algorithm_learns_and_loads
def test_the_documented_algorithm_runs_everywhere(example: types.ModuleType) -> None:
    kinds = [
        {"env": "envpool:CartPole-v1"},
        {
            "env": "Pendulum-v1",
            "scale_rewards": True,
            "normalize_observations": True,
            "plan": "synchronous",
        },
    ]
    for kind in kinds:
        sizes = {"num_envs": 32, "total_env_steps": 1024, "evaluation_episodes": 0}
        config = jaxrl_dist.Train(example.RWR(core="gru"), **sizes, **kind)
        *_, last = jaxrl_dist.train(config)
        assert last.env_steps >= 1024


FEWER = "num_devices=1, evaluation_episodes=5"
"""What the blocks of Python that train get besides fewer steps: all of them,
so that their programs are the same."""


def test_the_readme_s_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, use, *_ = blocks("README.md")
    train = train.replace("total_env_steps=150_000", f"total_env_steps=2_000, {FEWER}")
    use = use.replace("episodes=100", "episodes=5")
    import numpy as np

    names = {"num_envs": 3, "obs": np.zeros((3, 4), np.float32)}
    exec(train, names)
    exec(use, names)
    assert "return_mean" in capsys.readouterr().out
    assert names["action"].shape == (3,)


HOW_TO = (
    *(
        "README.md",
        "docs/index.md",
        "docs/environments.md",
        "docs/runs.md",
        "docs/python.md",
        "docs/coming-from.md",
    ),
    *(
        "docs/hosts.md",
        "docs/glossary.md",
        "docs/releasing.md",
        "docs/tutorial.md",
        "docs/results.md",
        "docs/adding-an-algorithm.md",
    ),
    *("docs/adding-an-off-policy-algorithm.md",),
    *(
        "docs/which-algorithm.md",
        "docs/troubleshooting.md",
        "docs/idle-gpu.md",
        "docs/ppo-in-one-page.md",
    ),
    *("docs/agents.md", "docs/games.md", "docs/evidence/agents.md", "docs/records.md"),
    *("docs/evidence/records.md", "docs/evidence/runs.md", "docs/metrics.md", "docs/plots.md"),
    *("docs/devices.md", "docs/populations.md", "docs/tuning.md", "docs/evidence/populations.md"),
    *("docs/evidence/environments.md", "docs/your-environment.md", "docs/remote.md"),
    *("docs/profiling.md", "docs/speed.md", "docs/scale.md", "docs/accelerators.md"),
    *("docs/learning.md",),
)
"""Pages that are read first: short sentences only."""


def sentences(text: str) -> list[str]:
    """The sentences of a document, of its lists and of the cells of its tables, without its
    code.
    """
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^    .*$|^#.*$|^\|[-:| ]+\|$", "\n\n", text, flags=re.MULTILINE).replace(
        "|", "\n\n"
    )
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^- |^!.*$", "\n", text, flags=re.MULTILINE))
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [sentence for part in parts for sentence in re.split(r"(?<=[.;:!?]) ", part) if sentence]


@pytest.mark.parametrize("name", HOW_TO)
def test_sentences_are_short(name: str) -> None:
    found = sentences((runs.ROOT / name).read_text(encoding="utf-8"))
    assert len(found) > 5
    assert not [sentence for sentence in found if len(sentence.split()) > 35]
    banned = re.compile(r"\b(anew|of (its|their) own|but for|What \w+ is)\b")
    assert not [sentence for sentence in found if banned.search(sentence)]
    assert sentences("a b. c\n\n```\nd\n```\n- e | f g\n") == ["a b.", "c", "e", "f g"]


def test_readme_is_short_and_has_the_measured_numbers() -> None:
    text = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    script = runpy.run_path(str(runs.ROOT / "scripts" / "learning.py"))
    results = script["load"](runs.ROOT / "docs" / "learning" / script["RESULTS"])
    rows = re.findall(
        r"^\| `(\w+) --env (?:(\w+):)?([\w-]+)` \| ([\d,]+) \| (\S+) \| (\d+) \|$", text, re.M
    )
    assert len(rows) == 4
    for algorithm, backend, env, steps, iqm, seeds in rows:
        command = f"train {algorithm} --env {backend or 'gymnax'}:{env} --total-env-steps {steps.replace(',', '')}"
        (entry,) = [
            entry for entry in results.values() if entry["command"] == f"jaxrl-dist {command}"
        ]
        middle = stats.trim_mean(entry["returns"], 0.25)
        assert f"{middle:.4g}".startswith(iqm) or f"{middle:.1f}" == iqm, (command, middle)
        assert int(seeds) == len(entry["returns"])
    speeds = re.findall(r"^\| [A-Z].* against .* \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    measured = measured_speeds()
    assert len(speeds) == 5
    for ours, other in speeds:
        assert any({ours, other} <= set(of_run) for of_run in measured), (ours, other)


def test_measured_numbers_come_from_files_that_say_how_and_when() -> None:
    """``python scripts/recorded.py`` writes the file again, after a commit of new measurements."""
    script = runpy.run_path(str(runs.ROOT / "scripts" / "recorded.py"))
    recorded = json.loads(script["FILE"].read_text(encoding="utf-8"))
    for file in script["DATA"]:
        entries, stored = recorded["data"][file]["entries"], runs.read_json(runs.ROOT / file)
        assert entries.keys() == script["entries_of"](stored).keys(), (
            f"{file}: {script['FILE']} is older"
        )
        assert recorded["data"][file]["command"] == script["DATA"][file]
    entries = [entry for data in recorded["data"].values() for entry in data["entries"].values()]
    for entry in (*entries, *recorded["tables"]):
        assert re.fullmatch("[0-9a-f]{7,}", entry["recorded_at"]) and datetime.date.fromisoformat(
            entry["date"]
        )
    by_hand = [(table["page"], table["section"], table["rows"]) for table in recorded["tables"]]
    found = [(page, *table) for page in script["pages"]() for table in script["tables"](page)]
    assert [
        table for table in found if table[1] not in script["WRITTEN"].get(table[0], ())
    ] == by_hand
    sides = {
        side
        for row in runs.read_json(runs.ROOT / "docs/speed/results.json")["rows"].values()
        for side in row[0]
    }
    names = {
        name.lower().replace(" ", "") for name, version in recorded["peers"].items() if version
    }
    assert {side.lower().replace("_", "").replace(" ", "") for side in sides} - {
        "jaxrldist"
    } <= names


def measured_speeds() -> list[list[str]]:
    """The medians of all sides of each run of the benchmark."""
    rows = json.loads((runs.ROOT / "docs" / "speed" / "results.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    return [
        [f"{statistics.median(sides[side]['rate'] for sides in rounds):,.0f}" for side in rounds[0]]
        for rounds in rows.values()
    ]


def test_the_page_on_speed_has_the_table_of_the_benchmark(tmp_path: Path) -> None:
    text = (runs.ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(runs.ROOT / "scripts" / "benchmark.py"))
    shutil.copy(runs.ROOT / "docs" / "speed" / "results.json", tmp_path)
    script["draw"](tmp_path)
    rows = [
        line
        for line in (tmp_path / "results.md").read_text(encoding="utf-8").splitlines()
        if line[:1] == "|"
    ]
    assert len(rows) > 20 and all(row in text for row in rows)


def test_pictures_are_those_of_the_measurements(tmp_path: Path) -> None:
    script = runpy.run_path(str(runs.ROOT / "scripts" / "picture.py"))
    names = {
        "draw": "overview",
        "draw_ppo_es": "learning/ppo-es",
        "draw_connect_four": "learning/connect-four",
        "draw_muzero_dqn": "learning/muzero-dqn",
    }
    for draw, name in names.items():
        script[draw](tmp_path / "now.png")
        now, kept = (
            np.asarray(Image.open(path).convert("L").resize((230, 57), Image.Resampling.BOX), float)
            for path in (tmp_path / "now.png", runs.ROOT / "docs" / f"{name}.png")
        )
        # fonts differ a little between versions of matplotlib
        assert np.sqrt(np.mean((now - kept) ** 2)) < 4, name
    speeds = script["rates"](
        json.loads((runs.ROOT / "docs" / "speed" / "results.json").read_text(encoding="utf-8"))[
            "rows"
        ]
    )
    assert len(speeds) == len(script["PEERS"]) and all(0.5 < ratio < 5 for ratio in speeds.values())


def test_the_page_on_metrics_names_each_metric() -> None:
    text = (runs.ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", text[text.index("## Metrics") :], re.MULTILINE)
    named = {name: titles for names, titles in rows for name in re.findall(r"`([^`]+)`", names)}
    for name, title in table.COLUMNS.items():
        assert title in named[name], name
    replays = f"dqn --env CartPole-v1 {runs.TINY} --learning-starts 64 --replay-capacity 256"
    for command in (runs.CARTPOLE, runs.ENVPOOL, replays):
        written = {name for line in runs.read_metrics(runs.finished(command)) for name in line}
        # of algorithms
        own = {name for name in written if name == "env_steps" or name.startswith("loss/")}
        assert written - own <= named.keys()


def test_the_glossary_explains_the_words_of_our_own() -> None:
    text = (runs.ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z ]+) \| .{20,} \|$", text, re.M)
    assert words[1:] == sorted(words[1:], key=str.lower) or words == sorted(words)
    assert {
        "triple",
        "plan",
        "torso",
        "core",
        "env step",
        "update",
        "iteration",
        "rollout",
        "lag",
    } <= set(words)


def test_the_files_of_a_release_agree() -> None:
    texts = {
        name: (runs.ROOT / name).read_text(encoding="utf-8")
        for name in ("CHANGELOG.md", "CITATION.cff")
    }
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", texts["CHANGELOG.md"], re.M)
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", texts["CITATION.cff"], re.M)
    assert cited is not None and released[0] == cited.groups() and cited[1] == RELEASE
    assert [author["name"] for author in project["authors"]] == re.findall(
        r"- name: (.*)", texts["CITATION.cff"]
    )
    assert "## [Unreleased]" in texts["CHANGELOG.md"] and (runs.ROOT / project["readme"]).is_file()


def test_a_release_writes_its_version_everywhere(tmp_path: Path) -> None:
    (tmp_path / "jaxrl_dist" / "run").mkdir(parents=True)
    for name in ("jaxrl_dist/run/version.py", "CITATION.cff"):
        (tmp_path / name).write_text((runs.ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A.\n")
    script = runpy.run_path(str(runs.ROOT / "scripts" / "release.py"))
    script["release"](tmp_path, "7.1.0", datetime.date(2030, 1, 2))
    assert runpy.run_path(str(tmp_path / "jaxrl_dist" / "run" / "version.py"))["RELEASE"] == "7.1.0"
    assert "version: 7.1.0\ndate-released: 2030-01-02\n" in (tmp_path / "CITATION.cff").read_text()
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    assert changelog.startswith(
        "# Changelog\n\n## [Unreleased]\n\n## [7.1.0] - 2030-01-02\n\n### Added\n\n- A."
    )
    for version, message in (
        ("7.2", "is no version"),
        ("7.1.0", "not above 7.1.0"),
        ("8.0.0", "no unreleased changes"),
    ):
        with pytest.raises(ValueError, match=message):
            script["release"](tmp_path, version, datetime.date(2030, 1, 3))


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*runs.ROOT.glob("*.md"), *runs.ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(\s*([^)#\s]+)", document.read_text(encoding="utf-8")):
            assert link.startswith("http") or (document.parent / link).exists(), (
                f"{document.name}: {link}"
            )


def test_the_page_of_what_was_learnt_is_that_of_the_results() -> None:
    """``python scripts/learning.py --draw`` writes it again."""
    script = runpy.run_path(str(runs.ROOT / "scripts" / "learning.py"))
    results = script["load"](runs.ROOT / "docs" / "learning" / script["RESULTS"])
    assert (runs.ROOT / "docs" / "learning.md").read_text(encoding="utf-8") == script["page"](
        results
    )


# --- The tutorial ---------------------------------------------------------------------------------


PATH = ("tutorial.md", "results.md")
"""What a new user reads one after the other."""


@pytest.mark.case  # test_the_readme_s_python_runs
def test_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first line to the result, with fewer steps on one device."""
    monkeypatch.chdir(tmp_path)
    text = "".join((runs.ROOT / "docs" / page).read_text("utf-8") for page in PATH)
    names: dict[str, Any] = {}
    ran = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "python":
            exec(block.replace("150_000", f"2_000, {FEWER}"), names)
            continue
        for line in block.splitlines():
            program, command, *rest = shlex.split(line)
            assert program == "jaxrl-dist"
            if command == "train":
                rest += ["--num-devices", "1", "--evaluation-episodes", "5"]
            capsys.readouterr()
            assert cli.main([command, *(arg.replace("150000", "2000") for arg in rest)]) == 0
            ran.append((command, capsys.readouterr().out))
    commands = "train train train evaluate plot train train plot plot"
    assert [command for command, _ in ran] == commands.split()
    assert "100 greedy episodes" in ran[3][1]
    assert "IQM" in ran[7][1]
    for name in ("curves.png", "improvement.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    folders = {"first", "second", "envpool", "ppo-10", "a2c-10"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == folders
    assert names["action"].shape == (1,) and names["report"].env_steps > 0


# --- The site -------------------------------------------------------------------------------------


_EXTRAS = tomllib.loads((runs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
_TEST_PACKAGES = {
    re.match(r"[\w-]+", need)[0].removeprefix("pytest-")  # xdist
    for need in set(_EXTRAS["test"]) - set(_EXTRAS["docs"])
} - {"jaxrl-dist", "psutil"} | {"envpool"}  # orbax needs psutil
WITHOUT_TEST_PACKAGES = f"""
import sys
for package in {sorted(_TEST_PACKAGES)}:
    sys.modules[package] = None  # as if it were not installed
from mkdocs.__main__ import cli
cli()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built with what the extra ``docs`` installs; a warning fails the build,
    as of a dead link.
    """
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_TEST_PACKAGES,
            "build",
            "--strict",
            "--site-dir",
            str(folder),
        ],
        cwd=runs.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rows(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, as text."""
    found = re.findall(r"<tr>(.*?)</tr>", page.read_text(encoding="utf-8"), re.DOTALL)
    cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL) for row in found]
    return [[html.unescape(re.sub("<[^>]+>", "", cell)).strip() for cell in row] for row in cells]


@pytest.mark.case  # `make docs` builds the site
def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]*)\"", text)
        loaded += re.findall(
            r"<link[^>]*\srel=\"(?:stylesheet|icon|preconnect)\"[^>]*\shref=\"([^\"]*)\"", text
        )
        loaded += re.findall(
            r"<link[^>]*\shref=\"([^\"]*)\"[^>]*\srel=\"(?:stylesheet|icon|preconnect)\"", text
        )
        # a client of remote environments, all in one file
        assert loaded or page.name == "cartpole.html"
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
        assert not re.search(r"\{\{ \w", text), page


@pytest.mark.case  # `make docs` builds the site
def test_the_reference_has_every_field_of_every_record(site: Path) -> None:
    page = (site / "api" / "types.html").read_text(encoding="utf-8")
    for kind in (jaxrl_dist.types.Aux, jaxrl_dist.types.Variables, jaxrl_dist.types.TrainState):
        for field in kind._fields:
            assert f'id="jaxrl_dist.types.{kind.__name__}.{field}"' in page
    public = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert all(
        f'.{name}"' in public
        for name in ("train", "resume", "preset", "display", "Policy", "CheckpointError")
    )


@pytest.mark.case  # `make docs` builds the site
def test_each_notebook_is_a_page_with_its_pictures(site: Path) -> None:
    for notebook in (runs.ROOT / "notebooks").glob("*.ipynb"):
        page = site / "notebooks" / f"{notebook.stem}.html"
        shown = re.findall(r'<img alt="" src="([^"]+)"', page.read_text(encoding="utf-8"))
        assert len(shown) == notebook.read_text(encoding="utf-8").count('"image/png"')
        assert all((page.parent / name).read_bytes().startswith(b"\x89PNG") for name in shown)


@pytest.mark.parametrize("name", [*ALGORITHMS, *PRESETS])
def test_each_algorithm_has_a_page(name: str) -> None:
    """With all flags, their defaults, and the paper."""
    text = (runs.ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    flags = text.partition("\n## Flags\n")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| `?(.*?)`? \|", flags, re.M))
    for line in re.findall(r"^\| \[.*\]\(.*\) \| (.*) \|$", flags, re.M):
        found |= dict(re.findall(r"`(--[a-z0-9-]+)` `?(.*?)`?(?:, |$)", line))
    kind = config_class(name)
    values = (
        PRESETS[name][1]
        if name in PRESETS
        else {f.name: f.default for f in dataclasses.fields(kind)}
    )
    assert set(found) == {flag(field) for field in values}
    for field, value in values.items():
        if type(value) in (float, str):
            assert found[flag(field)] == str(value)
    assert re.search(r"\]\(https://(arxiv|doi|openreview)\.", text)
    for heading in (
        "What it computes",
        "What differs from the paper",
        "Flags",
        "Presets",
        "Measured",
    ):
        assert f"\n## {heading}" in text, heading


def test_presets_are_shown_by_an_environment_of_each_kind() -> None:
    text = (runs.ROOT / "docs" / "algorithms" / "ppo.md").read_text(encoding="utf-8")
    table = text.partition("\n## Presets\n")[2].partition("\n## ")[0]
    shown = {
        kind: env
        for row in re.findall(r"^\| (.*?) \| .* \|$", table, re.M)
        for kind, env in re.findall(r"(?:^|; )(.*?) \(`(.*?)`\)", row)
    }
    assert shown.keys() == {*KINDS.values()}
    # whose library is not installed here, like the next one's
    assert shown.pop(KINDS["game"]) == "pgx:tic_tac_toe"
    assert shown.pop(KINDS["craftax"]) == "craftax:Craftax-Symbolic-v1"
    assert [KINDS[kind_of(find(env).spec)] for env in shown.values()] == list(shown)


def test_the_table_of_what_is_tested_is_that_of_the_tests() -> None:
    """Read once more, from the text of the tests."""
    tree = ast.parse((runs.ROOT / "tests" / "plans" / "test_plans.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROBED"
    ]
    assert isinstance(table, ast.Dict)
    probed = {(ast.literal_eval(name), "on_device") for name in table.keys if name}
    (test,) = [
        node
        for node in tree.body
        if getattr(node, "name", "") == "test_probes_under_the_other_plans"
    ]
    assert isinstance(test, ast.FunctionDef)
    (parameters,) = [node.args[1] for node in test.decorator_list if isinstance(node, ast.Call)]
    probed |= set(ast.literal_eval(parameters))

    page = (runs.ROOT / "docs" / "tested.md").read_text(encoding="utf-8")
    cells_of = [line.strip("|").split("|") for line in re.findall(r"^\| .*", page, re.M)]
    head, _, *lines = [
        [re.sub(r"\[`(.*)`\].*", r"\1", cell.strip()) for cell in row]
        for row in cells_of
        if len(row) > 5
    ]
    assert {line[0] for line in lines} == {*ALGORITHMS, *PRESETS}
    cells = {
        (line[0], *where.split()): cell
        for line in lines
        for where, cell in zip(head[1:], line[1:], strict=True)
    }
    assert {(name, plan) for (name, plan, _), cell in cells.items() if "P" in cell} == probed
    assert (
        "R" in cells["a2c", "synchronous", "envpool"]
        and "L" in cells["apex", "asynchronous", "envpool"]
    )
    assert cells["rainbow", "gradients", "gymnax"].startswith("no (")
    assert cells["apex", "gradients", "gymnax"] == ""


@pytest.mark.case  # `make docs` builds the site
def test_each_command_has_its_place(site: Path) -> None:
    described = " ".join(row[0] for row in rows(site / "commands.html"))
    assert not [
        command for command in commands.COMMANDS if f"jaxrl-dist {command}" not in described
    ]
    pages = [
        help.page(kind, "")
        for kind in (profile.Output, resume.Resume, sweep.Sweep, compile_for.CompileFor)
    ]
    for text in (commands.help_text(), *pages):
        flags = {flag.replace("--no-", "--") for flag in re.findall(r"(?<!\w)--[a-z][a-z-]*", text)}
        missing = [flag for flag in flags if flag not in described]
        assert {*missing} <= {"--help", "--version"}


# --- Generated parts ------------------------------------------------------------------------------


GENERATOR = runpy.run_path(str(runs.ROOT / "scripts" / "docs.py"))
SLOW_PARTS = ("docs/tested.md",)
"""Pages whose generated part takes a minute to write."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=pytest.mark.case if name in SLOW_PARTS else ())
        for path in GENERATOR["pages"]()
        for name in [str(path.relative_to(runs.ROOT))]
    ],
)
def test_the_generated_parts_of_a_page_are_up_to_date(page: str) -> None:
    text = (runs.ROOT / page).read_text(encoding="utf-8")
    assert text == GENERATOR["generated"](text), f"{page} is old; run `python scripts/docs.py`"


def test_pages_have_no_open_generated_part() -> None:
    for path in (runs.ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^(<!-- generated|<!-- end -->|\{\{ \w)", text, re.M)
        parts = len(GENERATOR["PART"].findall(text))
        assert lines == ["<!-- generated", "<!-- end -->"] * parts, path


def test_pages_show_sources_and_measured_rows_as_they_are() -> None:
    def text_of(name: str) -> str:
        return (runs.ROOT / "docs" / name).read_text(encoding="utf-8")

    one = text_of("ppo-in-one-page.md")
    code = "\n".join(
        textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", one, re.DOTALL)
    )
    assert {
        "policy",
        "step",
        "gae",
        "postprocess",
        "loss",
        "gradient",
        "apply",
        "update",
        "run",
    } <= {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    assert "-jnp.minimum(ratio * batch" in one
    assert (
        "| [`dqn --env gymnax:MountainCar-v0`](algorithms/dqn.md#measured) | 200,000 | -103.4 | -108.5 | -103.2 | 5 |"
        in text_of("which-algorithm.md")
    )
    results = runs.read_json(runs.ROOT / "docs" / "learning" / "results.json")
    won, returns = results["qmix-3m"]["won"], results["qmix-3m"]["returns"]
    row = (
        f"{100 * np.mean(won):.0f} % ± {100 * np.std(won, ddof=1):.0f} | {np.mean(returns):.2f} ± "
    )
    assert f"| [qmix-3m](algorithms/qmix.md#measured) | {row}" in text_of("agents.md")
    with pytest.raises(LookupError, match="0 functions 'nothing'"):
        GENERATOR["source"]("jaxrl_dist.returns:nothing")


@dataclasses.dataclass(frozen=True)
class Own:
    size: tuple[int, ...] = (64, 32)
    """Widths of
    the layers."""
    kind: Literal["plain", "fancy"] | None = None
    """What | how."""
    undocumented: int = 1
    num_envs: Any = None
    """A field that presets fill in."""
    fast: bool = True
    """Whether."""


def test_flags_are_read_from_the_dataclass() -> None:
    first = f"before\n\n<!-- generated: fields {__name__}.Own -->"
    text = GENERATOR["generated"](f"{first}\n<!-- end -->\n\nafter")
    assert text.splitlines() == [
        *first.splitlines(),
        "",
        "| flag | default | what |",
        "| --- | --- | --- |",
        "| `--size` | `64 32` | Widths of the layers. |",
        "| `--kind` | none | What \\| how. One of `plain`, `fancy`. |",
        "| `--num-envs` | `8` | A field that presets fill in. |",
        "| `--fast` | on | Whether. |",
        "",
        "<!-- end -->",
        "",
        "after",
    ]
    assert GENERATOR["generated"](text) == text
    with pytest.raises(KeyError, match="nothing"):
        GENERATOR["generated"]("<!-- generated: nothing -->\n<!-- end -->")


def test_the_site_has_formulas_and_sources_as_text() -> None:
    hook = runpy.run_path(str(runs.ROOT / "scripts" / "mkdocs_hook.py"))

    def shown(text: str, page: str = "own.md") -> str:
        return hook["on_page_markdown"](
            text, SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
        )

    formula = shown("```math\nx^2\n```")
    assert (
        formula.startswith('<div class="formula"><math')
        and "<msup><mi>x</mi><mn>2</mn></msup>" in formula
    )
    assert shown("[`a.py`](../jaxrl_dist/a.py), [b](b.md)") == "`a.py`, [b](b.md)"
    link = "[`jaxrl_dist/returns.py`](../../jaxrl_dist/returns.py)"
    code = shown(f"[b](../b.md)\n\n## Source\n\n{link}\n", "algorithms/own.md")
    assert code.startswith('[b](../b.md)\n\n## Source\n\n??? note "`jaxrl_dist/returns.py`"')
    assert "    def gae(" in code
