"""Code is read once: lines that hold two thoughts are counted, and may only become fewer.
So are clumsy words of the documents. The name of a test is a short sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import runs

pytestmark = pytest.mark.quick

ALLOWED = {"packed assignment": 0, "conditional": 3, "walrus": 0, "cut message": 6}
"""Places of each kind in the package. Lower a number when the text has fewer; never raise one."""


def _trees() -> dict[str, ast.Module]:
    files = sorted((runs.ROOT / "jaxrl_dist").rglob("*.py"))
    return {
        path.relative_to(runs.ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in files
    }


TREES = _trees()


def packed_assignments(tree: ast.Module) -> Iterator[int]:
    """``a, b = f(), g()`` is two statements; a swap of names is one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else []
        if not all(isinstance(value, ast.Name | ast.Attribute) for value in values):
            yield node.lineno


def nested_conditionals(tree: ast.Module) -> Iterator[int]:
    """A conditional expression within another one, an f-string or a comprehension."""
    outer = (
        ast.IfExp,
        ast.FormattedValue,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
        ast.GeneratorExp,
    )
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, outer):
            below = (child for child in ast.walk(node) if child is not node)
            inner |= {child for child in below if isinstance(child, ast.IfExp)}
    yield from (node.lineno for node in inner)


def walruses(tree: ast.Module) -> Iterator[int]:
    """``:=`` outside the test of an ``if`` or a ``while``."""
    tested = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While):
            tested |= {child for child in ast.walk(node.test) if isinstance(child, ast.NamedExpr)}
    every = (node for node in ast.walk(tree) if isinstance(node, ast.NamedExpr))
    yield from (node.lineno for node in every if node not in tested)


def cut_messages(tree: ast.Module) -> Iterator[int]:
    """A sentence in a variable that an f-string of an error puts into another sentence."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        sentences = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr | ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and " " in ast.unparse(node.value)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Raise):
                names = {
                    part.value.id
                    for part in ast.walk(node)
                    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
                }
                if names & sentences:
                    yield node.lineno


KINDS = {
    "packed assignment": packed_assignments,
    "conditional": nested_conditionals,
    "walrus": walruses,
    "cut message": cut_messages,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_lines_hold_two_thoughts(kind: str) -> None:
    places = [f"{name}:{line}" for name, tree in TREES.items() for line in KINDS[kind](tree)]
    assert len(places) <= ALLOWED[kind], "\n".join(["write one thought a line:", *places])
    assert len(places) == ALLOWED[kind], f"fewer now: set ALLOWED[{kind!r}] to {len(places)}"


WORDS = {
    r"\bthat of\b": 24,
    r"\bthose of\b": 27,
    r"\bwhose\b": 173,
    r"\bgoes on\b": 0,
    r"\bat once\b": 5,
    r"(?<!there )\bis no\b": 1,
    r", too\.": 0,
}
"""Times that messages and docstrings of the package use words that have to be read twice. Instead,
repeat the noun, and say "with" a property, "continue", "immediately", "is not" and "also".
Lower a number when the text has fewer; never raise one.
"""


@pytest.mark.parametrize("words", WORDS)
def test_sentences_of_the_package_are_read_once(words: str) -> None:
    places = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for _ in re.findall(words, " ".join(node.value.split()))
    ]
    assert len(places) <= WORDS[words], "\n".join([f"say it without {words!r}:", *places])
    assert len(places) == WORDS[words], f"fewer now: set WORDS[{words!r}] to {len(places)}"


LONGEST_NAME = 60
LONG_NAMES = {"test_damaged_final_variables_are_those_of_the_newest_checkpoint"}
"""Tests whose names are longer. Remove a name from here; never add one."""


def test_the_names_of_tests_are_short_sentences() -> None:
    pattern = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    files = sorted((runs.ROOT / "tests").rglob("test_*.py"))
    names = {name for path in files for name in pattern.findall(path.read_text("utf-8"))}
    assert {name for name in names if len(name) > LONGEST_NAME} <= LONG_NAMES


CLUMSY = {
    r"\bthat of\b": 12,
    r"\bthose of\b": 27,
    r"\bwhose\b": 46,
    r"\bgoes on\b": 5,
    r"\bat once\b": 4,
    r"(?<!here )\bis no\b": 2,
    r", too\.": 2,
    r"\bare there\b": 3,
}
"""Places of each wording in the documents. Lower a number when there are fewer; never raise one."""


def prose(text: str) -> str:
    """A document without its code and its generated parts, on one line."""
    for other in (r"<!-- generated: .*?<!-- end -->", r"```.*?```", r"`[^`\n]*`"):
        text = re.sub(other, " ", text, flags=re.DOTALL)
    return " ".join(text.split())


DOCUMENTS = {
    path.relative_to(runs.ROOT).as_posix(): prose(path.read_text("utf-8"))
    for path in [runs.ROOT / "README.md", *sorted((runs.ROOT / "docs").rglob("*.md"))]
}


@pytest.mark.parametrize("words", CLUMSY)
def test_no_more_clumsy_words_in_documents(words: str) -> None:
    places = [name for name, text in DOCUMENTS.items() for _ in re.findall(words, text)]
    assert len(places) <= CLUMSY[words], "\n".join(["say it in plainer words:", *places])
    assert len(places) == CLUMSY[words], f"fewer now: set CLUMSY[{words!r}] to {len(places)}"
