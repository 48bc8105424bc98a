"""What the tests show of each algorithm under each plan and backend: the table of
``docs/tested.md``, which ``scripts/docs.py`` writes.
"""

from __future__ import annotations

import importlib
import itertools
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jaxrl_dist
from jaxrl_dist import algorithms
from jaxrl_dist.config.envs import LIBRARIES, split_env
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.envs.source import BACKENDS, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.training import setup

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Tested(NamedTuple):
    """The parts of the table."""

    columns: list[tuple[str, str]]
    """Plans with backends."""
    rows: dict[str, list[str]]
    """The cells of each algorithm: the marks of its tests, or ``no`` and the number of a reason."""
    reasons: list[str]
    """Why combinations are refused."""


def cases(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each case of a parametrised test."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    for chosen in itertools.product(*(mark.args[1] for mark in marks)):
        case: dict[str, Any] = {}
        for mark, values in zip(marks, chosen, strict=True):
            names = [name.strip() for name in mark.args[0].split(",")]
            if hasattr(values, "marks"):  # of pytest.param
                values = values.values
            elif len(names) == 1:
                values = [values]
            case |= zip(names, values, strict=True)
        yield case


def evidence() -> Iterator[tuple[str, str, str, str]]:
    """Yields ``(algorithm, plan, backend, what)`` for
    each parametrised case of the tests that train.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "plans")]
    plans, threads, bars = (
        importlib.import_module(name)
        for name in ("test_plans", "test_asynchronous", "test_learning")
    )
    for test in (
        plans.test_probe,
        plans.test_continuous_probe,
        plans.test_probes_under_the_other_plans,
    ):
        for case in cases(test):
            yield case["name"], case.get("plan", "on_device"), "gymnax", "probes"
    for case in cases(plans.test_every_combination_trains_or_is_refused):
        yield case["name"], case["plan"], case["backend"], "trains"
    for case in cases(plans.test_every_algorithm_repeats_bit_for_bit):
        yield case["name"], "on_device", "gymnax", "repeats"
    for case in cases(plans.test_same_seed_same_numbers):
        run = plans.RUNS[case["plan"]]
        yield algorithms.name_of(run.algorithm), case["plan"], find(run.env).spec.backend, "repeats"
    for case in cases(threads.test_lockstep_repeats_bit_for_bit):
        yield case["name"], "asynchronous", backend_of(case["env_id"]), "repeats"
    for case in cases(bars.test_bar):
        # the table has no columns for them, and they may be missing
        if case["bar"].env.split(":")[0] in LIBRARIES:
            continue
        config = bars.LEARNING["config_of"](case["bar"], 0)
        yield case["bar"].algorithm, config.plan, backend_of(config.env), "learns"


def backend_of(env: str) -> str:
    backend = split_env(env)[0]
    assert backend is not None
    return backend


def refused(name: str, env: str, **fields: Any) -> str | None:
    """Returns the reason why an algorithm cannot train on an environment; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            setup.prepare(jaxrl_dist.preset(name, env, **fields))
    except ConfigError as error:
        return error.with_flags
    return None


def tested() -> Tested:
    """Returns algorithms by plan and backend: what the tests show,
    or why the combination is refused.
    """
    names = (*algorithms.ALGORITHMS, *algorithms.PRESETS)
    marks: dict[tuple[str, str, str], set[str]] = {}
    for name, plan, backend, what in evidence():
        marks.setdefault((name, plan, backend), set()).add(what[0].upper())
    columns = [(plan, backend) for plan in PLANS for backend in BACKENDS]
    columns = [column for column in columns if any((name, *column) in marks for name in names)]
    table = Tested(columns, {}, [])
    for name in names:
        possible = (
            env for env in ("CartPole-v1", "Pendulum-v1") if refused(name, f"gymnax:{env}") is None
        )
        env = next(possible, "")
        row = table.rows.setdefault(name, [])
        for plan, backend in columns:
            cell = " ".join(sorted(marks.get((name, plan, backend), ())))
            if cell and (reason := refused(name, f"{backend}:{env}", plan=plan)):
                if reason not in table.reasons:
                    table.reasons.append(reason)
                cell = f"no ({table.reasons.index(reason) + 1})"
            row.append(cell)
    return table
