#!/usr/bin/env python
"""Says which stage binds a run, which flags would speed it up, and what share of this machine's
peaks each stage reaches.

    python scripts/what_binds.py ppo --env CartPole-v1 --num-envs 64 --rollout-length 128
    python scripts/what_binds.py runs/NAME --json bottleneck.json

The flags are those of ``jaxrl-dist profile``, except ``--picture`` and ``--trace``. The peaks are
the rates of one large float32 matrix product, and of reading and writing one large array. The
operations and the bytes of a stage are counted in its program.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxrl_dist.checks import flag
from jaxrl_dist.commands import profile
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, say, visible
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.profiling import timing
from jaxrl_dist.profiling.stages import Stage, make_stages
from jaxrl_dist.settings.policies import by_policy
from jaxrl_dist.types import Algorithms

LAYERS = 5
"""Maximum number of layers that are printed for a stage; JSON has all."""
MARGIN = 1.25
"""A stage binds a run if it takes at least this many times as long as the thread's next one: closer
ones change places with the load of the machine, and to speed up one of them alone helps little."""
WAITING = "waiting for"
"""Begins the names of the stages in which a thread does nothing."""
SCOPES = ("iteration", "env_step", "epoch", "update")
"""Names of ``jax.named_scope`` that name the loops of a run, outer ones first."""


def main(args: Sequence[str]) -> None:
    """Profiles the run that the arguments name, and prints what binds it.

    Raises:
      ConfigError: an argument is wrong, or the run cannot be profiled.
    """
    output, config, source = profile.parse(args)
    if output.picture or output.trace:
        raise ConfigError("jaxrl-dist profile writes --picture and --trace; remove them")
    run = timing.prepare(config, source)
    say("compiling the run and its stages")
    stages = make_stages(run.session)
    times = timing.measure(run, stages, output.seconds, say)
    say("timing the peaks of the device")
    size = run.job.mesh.size
    peaks = Peaks(size * matmul_ceiling(), size * memory_ceiling())
    work = {name: counted(stage) for name, stage in stages.items()}
    binding = bound(
        times.threads, times.iteration_seconds, changeable(run.config, run.job.algorithm)
    )
    print(visible("\n".join([*profile.lines(times), "", *table(times, work, peaks)])))
    if not times.busy:
        print(f"\n{sentence(times, binding)}")
    if output.json is not None:
        text = json.dumps(to_json(times, work, peaks, binding), indent=2)
        pathlib.Path(output.json).write_text(f"{text}\n", encoding="utf-8")


def table(times: timing.Profile, work: Mapping[str, Work], peaks: Peaks) -> Iterator[str]:
    """Formats the share of each peak that a stage reaches, and the layers of its matrix products.

    A stage that is faster than a peak has no share of it: the arrays of small networks stay in
    caches, whose peak is not known.
    """
    yield f"{'peak of':<24}{'products':>10}{'memory':>8}  layers of the products"
    for stage, (layers, moved) in work.items():
        total = sum(layers.values())
        reached = (
            total / times.alone[stage] / peaks.matmul,
            moved / times.alone[stage] / peaks.memory,
        )
        shares = [f"{share:.0%}" if 0 < share <= 1 else "" for share in reached]
        largest = [f"{name} {part / total:.0%}" for name, part in layers.items()]
        more = ", ..." if len(largest) > LAYERS else ""
        yield (
            f"  {stage:<22}{shares[0]:>10}{shares[1]:>8}  {', '.join(largest[:LAYERS])}{more}"
        ).rstrip()


def to_json(
    times: timing.Profile, work: Mapping[str, Work], peaks: Peaks, binding: Binding
) -> dict[str, Any]:
    """Returns the profile for JSON, with the rates of each stage and the stage that binds."""
    return {
        **times._asdict(),
        "bound": binding._asdict(),
        "matmul_rates": {
            stage: sum(layers.values()) / times.alone[stage]
            for stage, (layers, _) in work.items()
            if layers
        },
        "matmul_ceiling": peaks.matmul,
        "memory_rates": {stage: moved / times.alone[stage] for stage, (_, moved) in work.items()},
        "memory_ceiling": peaks.memory,
        "layers": {stage: layers for stage, (layers, _) in work.items() if layers},
    }


# --- What binds -----------------------------------------------------------------------------------


class Remedy(NamedTuple):
    """A change that would speed up a stage."""

    change: str
    effect: str
    flags: Sequence[str] = ()
    """The flags of the change, which the run must have."""


class Advice(NamedTuple):
    """What to know about a stage that binds a run."""

    cause: str
    remedies: Sequence[Remedy] = ()


ADVICE = {
    "environment": Advice(
        "the environments bind",
        [
            Remedy("more --num-envs", "step more in each call", ["--num-envs"]),
            Remedy("--plan asynchronous", "lets actors step while the learner learns", ["--plan"]),
            Remedy("environments that JAX compiles", "are faster"),
        ],
    ),
    "policy": Advice(
        "choosing actions binds",
        [
            Remedy("more --num-envs", "make each call do more", ["--num-envs"]),
            Remedy("smaller --hidden-sizes", "make each call cheaper", ["--hidden-sizes"]),
        ],
    ),
    "replay": Advice(
        "sampling binds",
        [
            Remedy("a smaller --batch-size", "samples less", ["--batch-size"]),
            Remedy("a lower --replay-ratio", "samples less often", ["--replay-ratio"]),
        ],
    ),
    "postprocess": Advice("computing targets and advantages of every example binds"),
    "shuffle": Advice(
        "dividing the rollout into minibatches binds",
        [Remedy("fewer --num-epochs", "shuffle less often", ["--num-epochs"])],
    ),
    "gradient": Advice(
        "the loss and its gradient bind",
        [
            Remedy("fewer --num-epochs", "compute less", ["--num-epochs"]),
            Remedy("a lower --replay-ratio", "computes less", ["--replay-ratio"]),
            Remedy("smaller --hidden-sizes", "compute less", ["--hidden-sizes"]),
            Remedy("--precision bfloat16", "computes faster on accelerators", ["--precision"]),
        ],
    ),
    "optimizer": Advice(
        "the optimiser binds",
        [
            Remedy("fewer --num-minibatches", "call it less often", ["--num-minibatches"]),
            Remedy(
                "a lower --replay-ratio with a larger --batch-size",
                "calls it less often",
                ["--replay-ratio", "--batch-size"],
            ),
        ],
    ),
    timing.REST: Advice(
        "starting loops and kernels, and moving data, take most of the time",
        [Remedy("more --num-envs", "do more with each start", ["--num-envs"])],
    ),
}
"""For each stage that may bind a run, why it does, and what would speed it up."""


class Binding(NamedTuple):
    """What binds a run."""

    thread: str
    """With several threads, the one that waits least for the others."""
    stage: str
    """The stage of the thread that takes the most."""
    share: float
    """Share of the stage in an iteration."""
    advice: str
    """What would help; if the stage leads by less than ``MARGIN``, which others are near."""


def bound(
    threads: Mapping[str, Mapping[str, float]], iteration_seconds: float, flags: Collection[str]
) -> Binding:
    """Returns what binds a run.

    Args:
      threads: the seconds of each stage of each thread, in an iteration of ``iteration_seconds``.
      flags: those that can change as advice says.
    """
    busy = {
        thread: {
            stage: seconds for stage, seconds in stages.items() if not stage.startswith(WAITING)
        }
        for thread, stages in threads.items()
    }
    thread = max(busy, key=lambda thread: sum(busy[thread].values()))
    stages = busy[thread]
    shares = {stage: seconds / iteration_seconds for stage, seconds in stages.items()}
    stage, *others = sorted(shares, key=shares.__getitem__, reverse=True)
    near = [other for other in others if shares[stage] < MARGIN * shares[other]]
    if near:
        advice = _of_several(stage, near, shares, flags)
    else:
        advice = _of_one(stage, thread, flags)
    return Binding(thread, stage, shares[stage], advice)


def _of_one(stage: str, thread: str, flags: Collection[str]) -> str:
    cause, _ = ADVICE.get(_kind(stage), Advice(f"{stage} binds, in thread {thread}"))
    remedies = _remedies(stage, flags)
    if not remedies:
        return cause
    return f"{cause}: {'; '.join(f'{change} {effect}' for change, effect, _ in remedies)}"


def _of_several(
    stage: str, near: Sequence[str], shares: Mapping[str, float], flags: Collection[str]
) -> str:
    others = ", ".join(f"{other} {shares[other]:.0%}" for other in near)
    advice = f"no stage binds: {stage} takes the most, and {others} nearly as much"
    changes = [[change for change, *_ in _remedies(one, flags)] for one in (stage, *near)]
    common = [change for change in changes[0] if all(change in others for others in changes)]
    if not common:
        return advice
    return f"{advice}; {' or '.join(common)} would help all of them"


def _remedies(stage: str, flags: Collection[str]) -> list[Remedy]:
    """Returns what would speed up a stage, by flags that can change as it says."""
    _, remedies = ADVICE.get(_kind(stage), Advice(""))
    return [remedy for remedy in remedies if {*remedy.flags} <= {*flags}]


def _kind(stage: str) -> str:
    """Returns the stage without the policy that it belongs to."""
    return stage.rpartition("/")[2]


def changeable(config: Train, algorithms: Algorithms) -> list[str]:
    """Returns the flags of a run, but those that cannot change as advice says.

    The run follows it already, or its loss assumes on-policy data.
    """
    followed = {"precision": "bfloat16", "num_epochs": 1, "num_minibatches": 1}
    lags = all(x.corrects_lag or x.replay is not None for x in algorithms.values() if x.trains)
    if PLANS[config.plan].threaded or not lags:
        followed["plan"] = config.plan
    configs = (config, *(policy.algorithm for policy in by_policy(config).values()))
    return [
        flag(name)
        for one in configs
        for name in marked(one)
        if name not in followed or getattr(one, name) != followed[name]
    ]


def sentence(times: timing.Profile, binding: Binding) -> str:
    """Returns what binds a run in words."""
    whose = ""
    if len(times.threads) > 1:
        whose = f" of the {binding.thread}, which waits least"
    return f"{binding.share:.0%} of the time{whose}: {binding.advice}"


# --- Peaks ----------------------------------------------------------------------------------------


class Peaks(NamedTuple):
    """What all devices of a run reach at best."""

    matmul: float
    """Floating-point operations per second."""
    memory: float
    """Bytes per second."""


def matmul_ceiling() -> float:
    """Returns the floating-point operations per second of a
    float32 product of square matrices on the first device.
    """
    x = jnp.ones((2048, 2048), jnp.float32)
    return 2 * len(x) ** 3 / _fastest(lambda x: x @ x, x)


def memory_ceiling() -> float:
    """Returns the bytes per second that doubling a large
    float32 array reads and writes on the first device.
    """
    x = jnp.ones(2**26, jnp.float32)
    return 2 * x.nbytes / _fastest(lambda x: 2 * x, x)


def _fastest(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Returns the least seconds of some calls of a compiled function."""
    program = jax.jit(function)
    program(x).block_until_ready()
    return min(timeit.repeat(lambda: program(x).block_until_ready(), number=1, repeat=7))


# --- What a program does --------------------------------------------------------------------------


class Work(NamedTuple):
    """What a stage does in an iteration, on all devices."""

    layers: Mapping[str, int]
    """Floating-point operations of its matrix products and convolutions by layer, the most
    first."""
    moved: int
    """Bytes that it reads and writes."""


def counted(stage: Stage) -> Work:
    """Counts what a stage does."""
    jaxpr = stage.traced.jaxpr.jaxpr
    return Work(dict(of_products(jaxpr).most_common()), of_memory(jaxpr))


def of_products(jaxpr: Any, within: str = "") -> Counter[str]:
    """Counts the floating-point operations of a traced
    program's matrix products and convolutions, on all devices.

    A loop whose number of passes is known only at run time counts once; of several branches,
    the largest counts.

    Args:
      within: the names of the scopes that the program is called in.

    Returns:
      The operations of each layer, such as ``MLP/Dense_0``:
      the path of its flax modules or other named scopes.
    """
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        params = eqn.params
        scopes = f"{within}/{eqn.source_info.name_stack}"
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total[_layer(scopes)] += (
                2 * eqn.outvars[0].aval.size * int(np.prod([left[axis] for axis in contracted]))
            )
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total[_layer(scopes)] += 2 * eqn.outvars[0].aval.size * kernel.size // channels
        else:
            inside = [of_products(inner, scopes) for inner in _inside(eqn)]
            if name == "cond":
                inside = sorted(inside, key=Counter.total)[-1:]
            for layer, flops in sum(inside, Counter[str]()).items():
                total[layer] += _times(eqn) * flops
    return total


def of_memory(jaxpr: Any) -> int:
    """Counts the bytes that a traced program reads and writes on all devices,
    if XLA fuses all elementwise operations.

    Matrix products, convolutions, reductions and sorts read their operands and write their results.
    Gathering and slicing read and write only what they take, and their counterparts what they put.
    The elementwise operations of a program read its arguments and write its results, and those of a
    loop do so in each pass. Caches are ignored: what fits into one may move faster than memory
    does. Loops and branches count as in ``of_products``.
    """
    moved, read, written = _moved(jaxpr)
    return (
        moved
        + _sizes(jaxpr.invars[at] for at in read)
        + _sizes(jaxpr.outvars[at] for at in written)
    )


def _moved(jaxpr: Any) -> tuple[int, set[int], set[int]]:
    """Counts the bytes of all but elementwise operations.

    Returns:
      The bytes, the places of the arguments that elementwise operations read,
      and of the results that they write.
    """
    place = dict(zip(jaxpr.invars, itertools.count(), strict=False))  # also for views of arguments
    made: dict[Any, int] = {}  # values that elementwise operations make
    total = 0
    read = set[int]()
    for eqn in jaxpr.eqns:
        name, operands, out = eqn.primitive.name, eqn.invars, eqn.outvars
        if name in _VIEWS:
            for known in (place, made):
                known.update(zip(out, _among(operands[:1], known), strict=False))
        if (moved := _moved_at_once(eqn)) is not None:
            total += moved
        elif inside := list(_inside(eqn)):
            bytes_inside, *places = zip(*map(_moved, inside), strict=True)
            total += _times(eqn) * (max if name == "cond" else sum)(bytes_inside)
            for inner, reads, writes in zip(inside, *places, strict=True):
                passed = operands[len(operands) - len(inner.invars) :]
                read |= {*_among(map(passed.__getitem__, reads), place)}
                made |= dict.fromkeys(map(out.__getitem__, writes), 1)
        else:
            read |= {*_among(operands, place)}
            made |= dict.fromkeys(out, 1)
    return total, read, {at for at, x in enumerate(jaxpr.outvars) if _among([x], made)}


def _moved_at_once(eqn: Any) -> int | None:
    """Returns the bytes that an operation reads and writes; None: it is elementwise,
    or calls a program.
    """
    name, operands, out = eqn.primitive.name, eqn.invars, eqn.outvars
    if name in ("scan", "while"):
        return _times(eqn) * sum(map(of_memory, _inside(eqn)))
    if name in _SAME:
        return 0
    if name in _TAKING:
        return _sizes(operands[1:]) + 2 * _sizes(out)
    if name in _PUTTING:
        return _sizes(operands[1:]) + _sizes(operands[_PUTTING[name] :][:1])
    if name in _WHOLE or name.startswith(("reduce_", "cum")):
        return _sizes(operands) + _sizes(out)
    return None


_SAME = ("reshape", "squeeze", "expand_dims")
_TAKING = ("gather", "dynamic_slice", "slice")
_PUTTING = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that put an operand, by its place among the operands, into the first one."""
_VIEWS = {*_SAME, *_PUTTING}
"""Operations whose result stands for their first operand: it has another shape, or new parts."""
_WHOLE = ("dot_general", "conv_general_dilated", "sort", "top_k", "argmax", "argmin")


def _among(variables: Iterable[Any], known: Mapping[Any, int]) -> list[int]:
    """Returns the values of the variables that are known; constants, which cannot be hashed,
    are not.
    """
    return [known[x] for x in variables if not isinstance(x, Literal) and x in known]


def _sizes(variables: Iterable[Any]) -> int:
    """Returns the bytes of arrays; keys and effects have none."""
    avals = (x.aval for x in variables)
    return sum(
        aval.size * getattr(aval.dtype, "itemsize", 0) for aval in avals if hasattr(aval, "dtype")
    )


def _times(eqn: Any) -> int:
    """Returns how often an operation runs the programs inside it, over all devices."""
    match eqn.primitive.name:
        case "scan":
            return int(eqn.params["length"])
        case "shard_map":
            return int(eqn.params["mesh"].size)
    return 1


def _inside(eqn: Any) -> Iterator[Any]:
    """Yields the programs inside an operation."""
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else [value]:
            if hasattr(x, "eqns"):
                yield x
            elif hasattr(x, "jaxpr"):
                yield x.jaxpr


def _layer(scopes: str) -> str:
    """Returns the scopes of a layer's forward pass, without those of transformations and loops."""
    words = re.sub(r"\w+\(|\)", "", scopes).split("/")
    named = [word for word in words if word and word not in ("shard_map", *SCOPES)]
    # A custom derivative that takes one itself has its scope's name twice.
    return "/".join(word for word, _ in itertools.groupby(named)) or "other"


if __name__ == "__main__":
    try:
        with one_line_warnings():
            main(sys.argv[1:])
    except ConfigError as error:
        say(f"error: {error.with_flags}")
        sys.exit(2)
