"""Type checkers find mistakes in what users write."""

from __future__ import annotations

import pytest
import runs
from mypy import api
from test_docs import blocks

WRITTEN = f"""
import jaxrl_dist
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.config import NetworkConfig
from jaxrl_dist.protocols import Environment
{blocks("docs/adding-an-algorithm.md")[0]}

RWR(torso=(lambda key, x: key, lambda params, x: x), core="gru")
jaxrl_dist.preset(RWR, "CartPole-v1")

class Mine(Environment):
    def reset_env(self, key: jax.Array, params: PyTree) -> tuple[PyTree, PyTree]:
        return key, key
"""
AUX = 'Aux({"loss/policy": policy_loss, "loss/value": value_loss})'
ORDER, SWAPPED = (
    "variables: Variables, rollout: Rollout, context",
    "rollout: Rollout, variables: Variables, context",
)
UNTYPED = (
    f"def postprocess({ORDER}: Context) -> PyTree",
    "def postprocess(rollout, variables, context)",
)
ACT = "net.policy(variables, obs, (), context)"
PLANTED = {  # the text that is replaced, its replacement, and a part of what mypy says
    "a loss without aux": (f', batch["valid"], {AUX}', ', batch["valid"]', "[return-value]"),
    "a loss that returns its mean": (
        "tuple[jax.Array, jax.Array, Aux]",
        "jax.Array",
        '"loss" to "Algorithm"',
    ),
    "a loss without context": (
        "batch: PyTree, context: Context)",
        "batch: PyTree)",
        '"loss" to "Algorithm"',
    ),
    "an aux without metrics": (AUX, "Aux(priority=total)", '"metrics" in call to "Aux"'),
    "a policy without core": (
        "=net.policy",
        f"=lambda variables, obs, context: {ACT}",
        '"policy" to "Algorithm"',
    ),
    "two outputs of a policy": (
        "=net.policy",
        f"=lambda variables, obs, core, context: {ACT}[:2]",
        '"policy" to "Algorithm"',
    ),
    "swapped arguments": (ORDER, SWAPPED, '"postprocess" to "Algorithm"'),
    "swapped arguments without types": (*UNTYPED, '"postprocess" to "Algorithm"'),
    "no flags of the optimiser": (
        "ActorCriticConfig, value_",
        "NetworkConfig, value_",
        '"clipped_optimizer"',
    ),
    "init that returns parameters": (
        "=net.init,",
        "=networks.policy_network(self, spec.observation, 2).init,",
        '"init" to "Algorithm"',
    ),
    "validate with a parameter": (
        "    @staticmethod\n",
        "    def validate(self, spec: EnvSpec) -> None: ...\n\n    @staticmethod\n",
        "[override]",
    ),
    "initial_core of a core": (
        "=net.initial_core",
        "=lambda num_envs, core: core",
        '"initial_core" to "Algorithm"',
    ),
    "an unknown field": ("num_epochs=4", "epochs=4", '"epochs" for "Algorithm"'),
    "a window that is a tuple": (
        "window=net.window",
        "window=(net.window,)",
        '"window" to "Algorithm"',
    ),
    "make without a spec": ("make(self, spec: EnvSpec)", "make(self)", '1 to "preset"'),
    "a torso of one function": ("lambda key, x: key, ", "", '"torso" to "RWR"'),
    "a core that no flag names": ('core="gru"', 'core="grus"', '"core" to "RWR"'),
    "a reset without parameters": (
        "key: jax.Array, params: PyTree",
        "key: jax.Array",
        "[override]",
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of the documented algorithm, and of one with each mistake;
    it may know the package already.
    """
    folder = tmp_path_factory.mktemp("typed")
    for number, (old, new, _) in enumerate([*PLANTED.values(), ("", "", "")]):
        assert WRITTEN.count(old) == 1 or not old
        (folder / f"own_{number}.py").write_text(WRITTEN.replace(old, new), encoding="utf-8")
    options = (
        "--config-file",
        str(runs.ROOT / "pyproject.toml"),
        "--cache-dir",
        str(runs.ROOT / ".mypy_cache"),
    )
    out, errors, _ = api.run([*options, *map(str, sorted(folder.glob("*.py")))])
    assert not errors
    return out


def test_the_documented_algorithm_has_no_errors_of_type(said: str) -> None:
    assert f"own_{len(PLANTED)}.py" not in said


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_an_error_of_type(said: str, mistake: str) -> None:
    number = list(PLANTED).index(mistake)
    lines = [
        line for line in said.splitlines() if f"own_{number}.py" in line and ": error: " in line
    ]
    assert any(PLANTED[mistake][2] in line for line in lines), lines
