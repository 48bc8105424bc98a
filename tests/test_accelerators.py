"""What programs for GPUs and TPUs start, held to the counts that docs/accelerators.json keeps."""

from __future__ import annotations

import importlib.metadata
import runpy
from typing import Any

import jax
import pytest
import runs

from jaxrl_dist.commands.accelerators import PLUGINS

SCRIPT = runpy.run_path(str(runs.ROOT / "scripts" / "accelerators.py"))
KEPT: dict[str, Any] = SCRIPT["load"]()


def missing(run: str, target: str) -> str | None:
    """Why a run cannot be compiled for a target here, or not be compared."""
    if target not in KEPT["runs"].get(run, {}):
        return f"no counts are kept: python scripts/accelerators.py --only {run} --target {target}"
    package = PLUGINS["tpu" if target.startswith("v") else "cuda12"]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed: pip install -e '.[tpu,cuda12]'"
    return None if jax.__version__ == KEPT["jax"] else f"the kept counts are those of jax {KEPT['jax']}"


def test_env_steps_have_no_collectives_and_no_host_branch() -> None:
    for run, targets in KEPT["runs"].items():
        for target, found in targets.items():
            step, update = found["loops"]["env_step"], found["loops"]["update"]
            assert step["collectives"] == {}, (run, target)
            if target.startswith("h200"):
                assert (step["conditionals"], update["conditionals"]) == (0, 0), (run, target)
            prioritized = run in ("rainbow", "r2d2")  # whose importance weights are compared over devices
            expected = 0 if target == "h200" else 2 if prioritized else 1
            counted = update["collectives"].get("all-reduce", 0)
            # XLA may join that of a single update with those of the iteration around it.
            joined = found["loops"]["iteration"]["collectives"].get("all-reduce", 0) if update["times"] == 1 else 0
            assert counted <= expected <= counted + joined, (run, target)


def test_a_count_that_rises_is_seen() -> None:
    before = {"loops": {"update": {"kernels": 3, "copies": 1, "conditionals": 0, "collectives": {"all-reduce": 1}}}}
    now = {"loops": {"update": {"kernels": 2, "copies": 1, "conditionals": 1, "collectives": {"all-reduce": 2}}}}
    assert list(SCRIPT["rises"](before, before)) == []
    assert list(SCRIPT["rises"](before, now)) == ["update: 1 conditionals, 0 before", "update: 2 all-reduce, 1 before"]


@pytest.mark.slow
@pytest.mark.parametrize("target", SCRIPT["TARGETS"])
@pytest.mark.parametrize("run", SCRIPT["RUNS"])
def test_counts_do_not_rise(run: str, target: str) -> None:
    if reason := missing(run, target):
        pytest.skip(reason)
    rises = list(SCRIPT["rises"](KEPT["runs"][run][target], SCRIPT["kept"](SCRIPT["compiled"](run, target))))
    assert not rises, "; ".join(rises)
