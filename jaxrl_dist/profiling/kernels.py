"""Counts what a compiled program starts: the kernels, copies, conditionals and collectives of each of its loops.

On a GPU, a small network spends its time on starting kernels, some microseconds each, rather than on computing. The
number of kernels is known without the GPU.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

SCOPES = ("iteration", "env_step", "epoch", "update")
"""Names of ``jax.named_scope`` that name the loops of a run, outer ones first."""
FREE = {
    *("add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element", "opt-barrier"),
    *("parameter", "partition-id", "replica-id", "tuple"),
}
"""Instructions of HLO that start nothing."""
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")


@dataclasses.dataclass
class Loop:
    """One pass of a loop's body, without the loops inside it."""

    name: str
    """``dispatch`` for the program itself, one of ``SCOPES``, or the function of the source that holds the loop."""
    times: int | None
    """Passes in each pass of the loop around it; None: known only at run time."""
    kernels: int = 0
    copies: int = 0
    conditionals: int = 0
    """Branches; a GPU's host waits for the predicate of each. The larger branch is counted."""
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    loops: list[Loop] = dataclasses.field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Loop]]:
        """Yields the depth of each loop, and the loop, from this one inwards."""
        yield depth, self
        for loop in self.loops:
            yield from loop.walk(depth + 1)

    def started(self) -> int:
        """Returns the kernels, copies and collectives of one pass, those of the loops inside it included.

        A loop whose number of passes is known only at run time counts once.
        """
        inside = sum((loop.times or 1) * loop.started() for loop in self.loops)
        return self.kernels + self.copies + self.collectives.total() + inside

    def counts(self) -> dict[str, Any]:
        """Returns the numbers of this loop without those inside it, for JSON."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "loops"}


def find_loops(hlo: str) -> Loop:
    """Finds the loops of a program in the text of its optimised HLO, as ``jax.stages.Compiled.as_text`` returns it.

    Returns:
      The program itself as a loop of one pass, with its loops inside.

    Raises:
      ValueError: the text holds no entry computation.
    """
    program, dispatch = _Program(hlo), Loop("dispatch", 1)
    program.fill(dispatch, program.entry, 0)
    return dispatch


class _Instruction(NamedTuple):
    opcode: str
    line: str

    def find(self, pattern: str) -> str | None:
        """Returns what the groups of a pattern match in the line."""
        match = re.search(pattern, self.line)
        return "".join(filter(None, match.groups())) if match else None

    @property
    def scope(self) -> str | None:
        """The innermost of ``SCOPES`` in a name such as ``jit(run)/iteration/while/body/vmap(update)/add``."""
        path = (self.find(r'op_name="([^"]*)"') or "").split("/")
        parts = [re.sub(r"^(?:(?:vmap|jvp|transpose)\()+([^()]*)\)+$", r"\1", part) for part in path]
        return next((part for part in reversed(parts) if part in SCOPES), None)

    @property
    def loop_scope(self) -> str | None:
        """The same, if the instruction is the loop of that scope."""
        return self.scope if self.find(rf'op_name="[^"]*/({self.scope})/while"') else None

    @property
    def number(self) -> int | None:
        """Passes of a loop, or the value of an integer constant."""
        text = self.find(r'"known_trip_count":\{"n":"(\d+)"| s32\[\]\S* constant\((\d+)\)')
        return None if text is None else int(text)

    def called(self, use: str) -> list[str]:
        """Returns the names of the computations of a use."""
        texts = re.findall(rf"\b(?:{use})=(?:\{{([^}}]*)\}}|%?([\w.-]+))", self.line)
        return [name for names in texts for name in re.findall(r"[\w.-]+", "".join(names))]


class _Program:
    def __init__(self, hlo: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        self._tables = {name: _table(hlo, name) for name in ("FunctionNames", "FileLocations", "StackFrames")}
        entries, body = list[str](), list[_Instruction]()
        for line in hlo.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
                body = self._computations[head[2]] = []
                entries += [head[2]] if head[1] else []
            elif opcode := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", line):
                body.append(_Instruction(opcode[1], line))
        if not entries:
            raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
        (self.entry,) = entries

    def fill(self, loop: Loop, computation: str, level: int) -> None:
        """Counts what one pass of a computation starts; ``level`` is the loop's among ``SCOPES``."""
        inner: dict[str, Loop] = {}  # what belongs to a loop that XLA has dissolved, because it has one pass
        present = set(self._scopes(computation))
        for instruction in self._executed(computation):
            scope = instruction.scope
            if instruction.opcode == "while":
                loop.loops.append(self._loop(instruction, level))
            elif scope in SCOPES[level:] and scope != loop.name and scope not in present:
                _count(inner.setdefault(scope, Loop(scope, 1)), instruction.opcode)
            else:
                _count(loop, instruction.opcode)
        loop.loops += inner.values()

    def _loop(self, instruction: _Instruction, level: int) -> Loop:
        (body,), (condition,) = instruction.called("body"), instruction.called("condition")
        scope = instruction.loop_scope if instruction.loop_scope in SCOPES[level:] else None
        times = instruction.number if instruction.number is not None else self._passes(condition)
        loop = Loop(scope or self._function(int(instruction.find(r"stack_frame_id=(\d+)") or 0)), times)
        # XLA may have moved a loop without a scope out of another one; its parts keep the scope that they had there.
        self.fill(loop, body, SCOPES.index(scope) + 1 if scope else len(SCOPES))
        if times is None:  # a condition that only counts passes is not computed
            for part in self._executed(condition):
                _count(loop, part.opcode)
        return loop

    def _passes(self, condition: str) -> int | None:
        """Returns the passes of a loop whose condition compares a count with a constant, as ``jax.lax.scan`` does."""
        parts = list(self._executed(condition))
        constants = [part.number for part in parts if part.opcode == "constant"]
        compared = [part.opcode for part in parts if part.opcode not in FREE]
        return constants[0] if compared == ["compare"] and len(constants) == 1 else None

    def _executed(self, computation: str) -> Iterator[_Instruction]:
        """Yields the instructions that run, including calls and the larger branches, but not the bodies of loops."""
        for instruction in self._computations[computation]:
            if instruction.opcode == "conditional":
                yield instruction
                names = instruction.called("branch_computations|true_computation|false_computation")
                branches = [list(self._executed(name)) for name in names]
                yield from max(branches, key=lambda branch: sum(part.opcode not in FREE for part in branch))
            elif instruction.opcode in ("call", "async-start"):
                for name in instruction.called("calls|to_apply"):
                    yield from self._executed(name)
            else:
                yield instruction

    def _scopes(self, computation: str) -> Iterator[str | None]:
        """Yields the scopes of the loops inside a computation."""
        for instruction in self._executed(computation):
            if instruction.opcode == "while":
                yield instruction.loop_scope
                yield from self._scopes(*instruction.called("body"))

    def _function(self, frame: int) -> str:
        """Returns the name of the function that made an instruction, or ``loop`` if the text does not say."""
        try:
            location = _number(self._tables["StackFrames"][frame], "file_location_id")
            function = _number(self._tables["FileLocations"][location], "function_name_id")
            names = self._tables["FunctionNames"][function].strip('"').split(".")
        except KeyError:
            return "loop"
        return next((f"{name}()" for name in reversed(names) if not name.startswith("<")), "loop")


def _count(loop: Loop, opcode: str) -> None:
    name = opcode.removesuffix("-start")
    if opcode in FREE or opcode.endswith(("-done", "-update")):
        return
    if opcode == "conditional":
        loop.conditionals += 1
    elif name in COLLECTIVES:
        loop.collectives[name] += 1
    elif name == "copy":
        loop.copies += 1
    else:
        loop.kernels += 1


def _table(hlo: str, name: str) -> dict[int, str]:
    """Returns the rows of a table in the head of the text, by number."""
    table = re.search(rf"^{name}\n((?:\d+ .*\n)*)", hlo, re.MULTILINE)
    return {int(number): row for number, row in re.findall(r"(\d+) (.*)\n", table[1] if table else "")}


def _number(row: str, key: str) -> int:
    match = re.search(rf"{key}=(\d+)", row)
    return int(match[1]) if match else 0
