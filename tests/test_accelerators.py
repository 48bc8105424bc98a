"""What programs for GPUs launch: the counting itself, what docs/accelerators.json claims,
and new counts against it.
"""

from __future__ import annotations

import importlib.metadata
import runpy
from typing import Any

import pytest
import runs

SCRIPT = runpy.run_path(str(runs.ROOT / "scripts" / "accelerators.py"))
KEPT: dict[str, Any] = SCRIPT["load"]()
SEQUENCE = """\
001: kCopy         [source       | next=002 (1)] kCopy
002: kWhile        [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=008 (1)]
        004: kWhile        [source | sink ]
condition:
            005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
          body:
            006: kCopy         [source | sink] kCopy
            007: kCustomKernel [source | sink] gemm_fusion_dot grid: [1, 1, 1]
    008: kConditional   [prev=000 (1) | next=013 (1)]
      false_branch:
        009: kAsyncStart    [source | sink] stream=communication_stream[0], async_id=9
            010: kAllReduce [source | sink] kAllReduce
        011: kAsyncDone     [source | sink] async_id=9
      true_branch:
    013: kWhile        [prev=008 (1) | sink ]
condition:
        014: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        015: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
"""
"""XLA's text: it does not indent conditions, and no thunk is in the other branch."""


def test_thunks_are_counted_as_the_host_launches_them() -> None:
    by_scope: dict[str, Any] = {}
    found = {2: ("iteration", None), 4: ("env_step", 7), 13: ("", 5)}
    whole = SCRIPT["count"](SCRIPT["parse"](SEQUENCE), found, by_scope)
    # A buffer of 7 passes with their conditions, the all-reduce, 5 passes,
    # and the condition of the outer loop.
    assert by_scope["iteration"] == {
        "operations": 7 * 3 + 1 + 5 + 1,
        "launches": 1 + 1 + 5 + 1,
        "waits": 2,
        "collectives": 1,
    }
    assert by_scope["env_step"] == {"operations": 3} and by_scope[""] == {
        "operations": 1,
        "launches": 1,
    }
    assert whole - by_scope["iteration"] == {"operations": 1, "launches": 1}


def test_loops_are_named_by_their_scopes_and_have_their_passes() -> None:
    hlo = """
  %while.36 = (s32[], f32[4]) while(%tuple.1), metadata={op_name="jit(run)/iteration/while/body/env_step/while"}, \
backend_config={"known_trip_count":{"n":"128"}}
  %while.5 = (s32[]) while(%tuple.2), metadata={op_name="jit(run)/iteration/while/body/jit(learn)/while"}
"""
    thunk = 'thunk_info {{\n profile_annotation: "{}"\n thunk_id: {}\n }}\n thunk_kind: "{}"\n}}\n'
    thunks = ("while.36", 18, "kWhile"), ("add", 19, "kCopy"), ("while.5", 20, "kWhile")
    metadata = "".join(thunk.format(*values) for values in thunks)
    assert SCRIPT["loops"](metadata, hlo) == {18: ("env_step", 128), 20: ("", None)}


def test_env_steps_have_no_collectives_and_no_waits() -> None:
    for run, targets in KEPT["runs"].items():
        for target, ways in targets.items():
            for name, counts in ways.items():
                if name in SCRIPT["FLAGS"]:
                    step, update = counts.get("env_step", {}), counts.get("update", {})
                    assert not {"collectives", "waits"} & step.keys() and "waits" not in update, (
                        run,
                        target,
                        name,
                    )
                    # Importance weights of prioritised replay, and MARWIL's advantages,
                    # are compared over devices.
                    most = (
                        0 if target == "h200" else 2 if run in ("rainbow", "r2d2", "marwil") else 1
                    )
                    assert update.get("collectives", 0) <= most, (run, target, name)


@pytest.mark.slow
@pytest.mark.parametrize("run, target", [("ppo", "h200"), ("dqn", "h200x8")])
def test_counts_are_the_kept_ones(run: str, target: str) -> None:
    for package, kept in KEPT["versions"].items():
        if package != "libtpu":
            try:
                installed = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(f"{package} is not installed")
            if installed != kept:
                pytest.skip(f"the kept counts are those of {package} {kept}")
    assert SCRIPT["kept"](run, target) == KEPT["runs"][run][target]
