"""What compiled programs start: counted in runs of known structure, and in the text of a program for a GPU."""

from __future__ import annotations

import re

import pytest
from probes import make_job

from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.source import find
from jaxrl_dist.plans import compiled
from jaxrl_dist.profiling.kernels import Loop, find_loops

HLO = """\
HloModule jit_run, is_scheduled=true

FileNames
1 "/somewhere/returns.py"

FunctionNames
1 "gae"
2 "_accumulate.<locals>.<lambda>"

FileLocations
1 {file_name_id=1 function_name_id=2 line=4 end_line=4 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %negate.1 = f32[4]{0} negate(%p)
}

%scan_body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %fusion.9 = f32[4]{0} fusion(%arg), calls=%fused, metadata={op_name="iteration/while/body/mul"}
  ROOT %tuple.9 = (s32[], f32[4]{0}) tuple(%arg, %fusion.9)
}

%scan_condition (arg.1: (s32[], f32[4])) -> pred[] {
  %arg.1 = (s32[], f32[4]{0}) parameter(0)
  %constant.1 = s32[] constant(7)
  %count = s32[] get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[] compare(%count, %constant.1), direction=LT
}

%small (arg.2: f32[4]) -> f32[4] {
  ROOT %arg.2 = f32[4]{0} parameter(0)
}

%large (arg.3: f32[4]) -> f32[4] {
  %arg.3 = f32[4]{0} parameter(0)
  %fusion.3 = f32[4]{0} fusion(%arg.3), calls=%fused, metadata={op_name="iteration/while/body/update/vmap(add)/add"}
  %start = f32[4]{0} all-reduce-start(%fusion.3), metadata={op_name="iteration/while/body/update/psum"}
  %done = f32[4]{0} all-reduce-done(%start)
  ROOT %copy.3 = f32[4]{0} copy(%done)
}

%run_body (arg.4: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.4 = (s32[], /*index=1*/f32[4]{0:T(128)}) parameter(0)
  %fusion.4 = f32[4]{0} fusion(%arg.4), calls=%fused, metadata={op_name="iteration/while/body/vmap(env_step)/add"}
  %loop = (s32[], f32[4]{0}) while(%arg.4), condition=%scan_condition, body=%scan_body, metadata={stack_frame_id=1}
  %either = f32[4]{0} conditional(%arg.4, %fusion.4, %fusion.4), branch_computations={%small, %large}
  ROOT %tuple.4 = (s32[], f32[4]{0}) tuple(%arg.4, %either)
}

%run_condition (arg.5: (s32[], f32[4])) -> pred[] {
  %arg.5 = (s32[], f32[4]{0}) parameter(0)
  %fusion.5 = pred[] fusion(%arg.5), calls=%fused
  ROOT %not = pred[] not(%fusion.5)
}

ENTRY %main (arg.6: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.6 = (s32[], f32[4]{0}) parameter(0)
  ROOT %w = (s32[]) while(%arg.6), condition=%run_condition, body=%run_body, metadata={op_name="a/iteration/while"}
}
"""


def outline(loop: Loop) -> list[tuple[int, str, int | None]]:
    return [(depth, loop.name, loop.times) for depth, loop in loop.walk()]


def test_every_kind_of_instruction_is_counted_in_its_loop() -> None:
    program = find_loops(HLO)
    assert outline(program) == [
        (0, "dispatch", 1),
        (1, "iteration", None),
        (2, "_accumulate()", 7),  # of no scope: the function that made it
        (2, "env_step", 1),  # XLA has dissolved loops of one pass
        (2, "update", 1),
    ]
    found = {loop.name: loop for _, loop in program.walk()}
    # Its condition depends on data, so each pass computes it.
    assert (found["iteration"].kernels, found["iteration"].copies, found["iteration"].conditionals) == (2, 1, 1)
    assert (found["_accumulate()"].kernels, found["env_step"].kernels) == (1, 1)
    assert (found["update"].kernels, found["update"].collectives) == (1, {"all-reduce": 1})
    assert found["iteration"].started() == 2 + 1 + 7 + 1 + 2 and program.started() == 13


def test_a_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        find_loops("HloModule empty\n")


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.case), 8])
def test_the_loops_of_a_run_are_found_and_each_update_sums_once(num_devices: int) -> None:
    source = find("Probe-v0")
    algorithm = PPO(hidden_sizes=(4,), num_minibatches=2, num_epochs=3).make(source.spec)
    job = make_job(algorithm, source, num_envs=8, rollout_length=6, num_devices=num_devices)
    text = compiled.lower(job).compile().as_text()
    program = find_loops(text)
    named = [row for row in outline(program) if re.fullmatch("dispatch|iteration|env_step|epoch|update", row[1])]
    loops = [(0, "dispatch", 1), (1, "iteration", None), (2, "env_step", 6), (2, "epoch", 3), (3, "update", 2)]
    assert sorted(named) == sorted(loops)
    sums = {loop.name: loop.collectives for _, loop in program.walk() if loop.name in ("env_step", "update")}
    assert sums == {"env_step": {}, "update": {"all-reduce": 1} if num_devices > 1 else {}}
