"""Which stage binds a run, and which flags would speed it up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

REST = "rest"
"""The stage for all time that belongs to no other one."""
WAITING = "waiting for"
"""Begins the names of the stages in which a thread does nothing."""
ADVICE = {
    "environment": "the environments bind: more --num-envs step more in each call; actors in threads overlap them with "
    "learning (--plan asynchronous); environments that JAX compiles are faster",
    "policy": "choosing actions binds: more --num-envs make each call do more; smaller --hidden-sizes make it cheaper",
    "replay": "sampling binds: a smaller --batch-size samples less; a lower --replay-ratio samples less often",
    "postprocess": "the postprocessor binds: it computes targets and advantages of every example",
    "shuffle": "dividing the rollout into minibatches binds: fewer --num-epochs shuffle less often",
    "gradient": "the loss and its gradient bind: fewer --num-epochs compute less; a lower --replay-ratio computes "
    "less; smaller --hidden-sizes compute less; --precision bfloat16 computes faster on accelerators",
    "optimizer": "the optimiser binds: fewer --num-minibatches call it less often; a lower --replay-ratio, with a "
    "larger --batch-size, calls it less often",
    REST: "no stage binds: starting loops and kernels, and moving data, take most; more --num-envs do more with each",
}
"""For each stage that may bind a run: that it does, and what would speed it up."""
MARGIN = 1.25
"""A stage binds a run if it takes at least this many times as long as the thread's next one: closer
ones change places with the load of the machine, and to speed up one of them alone helps little."""
FLAG = re.compile("--[a-z-]+")
CHANGE = re.compile(r"(?:\w+ )+--[a-z-]+")
"""How a remedy begins, such as "more --num-envs"."""


def bound(
    threads: Mapping[str, Mapping[str, float]], iteration_seconds: float, flags: Collection[str]
) -> tuple[str, str, float, str]:
    """Returns the thread and the stage that bind a run, the stage's share of an iteration,
    and what would help.

    With several threads, the one that waits least for the others binds. Where the stage leads by
    less than ``MARGIN``, the last says instead that none binds, which are near, and what would help
    them all.

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

    def kind(stage: str) -> str:
        return stage.rpartition("/")[2]

    def remedies(stage: str) -> list[str]:
        """Returns what would speed up a stage, by flags that can change as it says."""
        texts = ADVICE.get(kind(stage), "").partition(": ")[2].split("; ")
        return [text for text in texts if text and {*FLAG.findall(text)} <= {*flags}]

    thread = max(busy, key=lambda thread: sum(busy[thread].values()))
    stages = busy[thread]
    stage, *others = sorted(stages, key=stages.__getitem__, reverse=True)
    share = stages[stage] / iteration_seconds
    if others and stages[stage] < MARGIN * stages[others[0]]:
        near = [other for other in others if stages[stage] < MARGIN * stages[other]]
        shares = ", ".join(f"{other} {stages[other] / iteration_seconds:.0%}" for other in near)
        text = f"no stage binds: {stage} takes the most, and {shares} nearly as much"
        changes = [
            [found[0] for x in remedies(one) if (found := CHANGE.match(x))]
            for one in (stage, *near)
        ]
        common = [change for change in changes[0] if all(change in others for others in changes)]
        return (
            thread,
            stage,
            share,
            f"{text}; {' or '.join(common)} would help all of them" if common else text,
        )
    cause = ADVICE.get(kind(stage), f"{stage} binds, in thread {thread}").partition(": ")[0]
    return thread, stage, share, ": ".join(filter(None, (cause, "; ".join(remedies(stage)))))
