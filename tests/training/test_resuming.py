"""How each member of a program goes on, from what its files hold."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from jaxrl_dist import Train
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.errors import CheckpointError
from jaxrl_dist.training.resuming import BEGIN, Decision, Saved, decide

CONFIG = Train(
    PPO(), "CartPole-v1", run_dir="run", total_env_steps=40, stop_at_return=9.0, keep_checkpoints=2
)


def at(
    *iterations: int,
    of: int | None = None,
    trained: bool = False,
    finished: bool = False,
    **more: Any,
) -> Saved:
    """A member with intact checkpoints after these iterations of 10 steps,
    ``of`` this many; ``more`` is its newest.
    """
    progress = [{"iteration": x, "env_steps": 10 * x} for x in iterations]
    progress[:1] = [{**x, **more} for x in progress[:1]]
    return Saved(
        pathlib.Path("run/members/x"),
        T,
        progress,
        len(progress) if of is None else of,
        trained,
        finished,
    )


HIGH = (10.0).hex()
T, D = "training", "diverged"


@pytest.mark.parametrize(
    "statuses, saved, expected",
    [
        ([T], [at(2, 1)], [Decision(T, 2)]),
        ([T, T], [at(2, 1), at(2, 1)], [Decision(T, 2), Decision(T, 2)]),
        # one was killed before its second save
        ([T, T], [at(2, 1), at(1)], [Decision(T, 1), Decision(T, 1)]),
        # older ones are damaged
        ([T, T], [at(3, 2, of=3), at(3, of=3)], [Decision(T, 3), Decision(T, 3)]),
        # Nothing, or not all of the first checkpoint, is saved.
        ([T, T], [at(), at()], [BEGIN, BEGIN]),
        ([T, T], [at(1), at()], [BEGIN, BEGIN]),
        ([T, D], [at(1), at()], [Decision(T, 1), Decision(D)]),
        ([T, D], [at(), at()], [BEGIN, Decision(D)]),
        ([T, D], [at(), at(1)], [BEGIN, BEGIN]),
        ([D, D], [at(), at()], [Decision(D), Decision(D)]),
        # Some have ended.
        ([T, D], [at(2, 1), at(1)], [Decision(T, 2), Decision(D, 1)]),
        ([D, T], [at(3, 1, of=2), at(2, 1)], [Decision(D, 3), Decision(T, 2)]),
        (
            ["done", T],
            [at(2, 1, score=HIGH, finished=True), at(3)],
            [Decision("done", 2), Decision(T, 3)],
        ),
        (
            [T, T],
            [at(4, finished=True), at(5, 3, finished=True)],
            [Decision("done", 4), Decision("done", 5)],
        ),
        ([T, T], [at(4), at(3)], [Decision(T, 4), Decision(T, 3)]),  # the first is not evaluated
        (
            ["done", "done"],
            [at(3, finished=True), at(3, finished=True)],
            [Decision(T, 3), Decision(T, 3)],
        ),  # the end is later now
        (["halved", T], [at(1, halved=True), at(2, 1)], [Decision("halved", 1), Decision(T, 2)]),
    ],
)
def test_how_members_go_on(
    statuses: Sequence[str], saved: Sequence[Saved], expected: Sequence[Any]
) -> None:
    members = [own._replace(status=status) for status, own in zip(statuses, saved, strict=True)]
    assert decide(CONFIG, members) == expected


@pytest.mark.parametrize(
    "saved",
    [
        [at(2), at(3)],
        [at(of=1), at(of=1)],
        [at(2, 1), at()],
        [at(1), at(of=1)],  # damaged, and not missing
        [at(1), at(trained=True)],  # which is written before the last checkpoint
    ],
)
def test_members_that_share_no_checkpoint_cannot_go_on(saved: Sequence[Saved]) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"members of run share no intact .* one by one, such as run/members/x",
    ):
        decide(CONFIG, saved)


def test_where_one_checkpoint_is_kept_it_may_be_a_later_one() -> None:
    one = Train(PPO(), "CartPole-v1", run_dir="run", total_env_steps=40, keep_checkpoints=1)
    with pytest.raises(CheckpointError, match="share no intact checkpoint"):
        decide(one, [at(1), at()])
