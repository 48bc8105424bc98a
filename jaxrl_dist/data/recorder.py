"""Writes experience as a data set while it is played."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.data import columns
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.data.writing import Writer
from jaxrl_dist.types import EnvSpec, PyTree, Rollout

WAKE_SECONDS = 0.5
"""Longest single wait."""
WAITING = 2
"""Calls whose rollouts may wait to be written: whoever plays more waits, too."""
BLOCK = 128
"""Steps of an environment that are divided into episodes at a time: a rollout may have one."""
MAX_STEPS = 2**17
"""Steps of an episode that are kept until it ends; a longer one is cut."""


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Adds to the error of a disk how the run goes on that is recorded there."""
    try:
        yield
    except OSError as error:
        error.add_note(
            "--record None trains on without a record, and --record DIR with one elsewhere"
        )
        raise


class Recorder:
    """A thread that writes rollouts as a data set: episodes as they end,
    and at the end what is left of the others.
    """

    def __init__(
        self, writer: Writer, spec: EnvSpec, about: Mapping[str, Any], *, episodic: bool
    ) -> None:
        """Starts the thread.

        Args:
          writer: its arrays include ``log_prob`` if that of each action is known.
          about: as ``Dataset.about``.
          episodic: each rollout begins with new episodes.
        """
        self.place = writer.place
        self._writer = writer
        self._spec = spec
        self._about = about
        self._episodic = episodic
        # pieces of the episode under way in each environment
        self._pending = dict[int, list[PyTree]]()
        self._held = dict[int, list[Rollout]]()  # rollouts that are not yet divided into episodes
        self._last = dict[int, PyTree]()  # the observation after them
        self._episodes = 0
        self._error: BaseException | None = None
        self._queue = queue.Queue[tuple[int, Iterable[Rollout]] | None](WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def __call__(self, first: int, rollouts: Iterable[Rollout]) -> None:
        """Takes rollouts ``[T, B, ...]`` on any device;
        those of an environment come in their order.

        Args:
          first: index of their first environment.
          rollouts: the thread takes one after the other, so that a generator may fetch them.

        Raises:
          Exception: an earlier one could not be written.
        """
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put((first, rollouts), timeout=WAKE_SECONDS)
                return
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._take_all()
        except BaseException as error:
            self._error = error

    def _take_all(self) -> None:
        with advising():
            while (item := self._queue.get()) is not None:
                for rollout in item[1]:
                    self._take(item[0], rollout)
            for first in list(self._held):
                self._divide(first)
            self._append([piece for env in sorted(self._pending) for piece in self._ended(env)])

    def close(self) -> None:
        """Ends the episodes under way, and completes the data set; without a step there is none.

        Raises:
          Exception: not all could be written, and no call has raised this;
            what has been is a data set.
        """
        raised = self._error
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=WAKE_SECONDS)
                self._thread.join(WAKE_SECONDS)
        try:
            if self._writer.rows:
                steps = self._writer.rows - self._episodes  # each has one row more than steps
                with advising():
                    self._writer.commit(
                        {"steps": steps, "episodes": self._episodes, "about": dict(self._about)}
                    )
        finally:
            self._writer.close()
        if self._error is not None and raised is None:
            raise self._error

    def _take(self, first: int, rollout: Rollout) -> None:
        held = self._held.setdefault(first, [])
        held.append(jax.tree.map(np.asarray, rollout))
        if self._episodic or sum(len(x.reward) for x in held) >= BLOCK:
            self._divide(first)

    def _divide(self, first: int) -> None:
        """Appends the episodes that end in the rollouts held of these environments."""
        held = self._held.pop(first)
        done = list[PyTree]()
        names = ("action", "reward", "terminated", "valid")
        parts = [
            {name: getattr(x, name) for name in names} | dict(x.extras) | {"obs": x.obs_before}
            for x in held
        ]
        table = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        for row in range(table["valid"].shape[1]):
            env = first + row
            rows = jax.tree.map(lambda x, row=row: x[:, row], table)
            self._last[env] = jax.tree.map(lambda x, row=row: x[-1, row].copy(), held[-1].obs)
            # after the last episode that has ended
            cut = int(np.flatnonzero(~rows["valid"]).max(initial=-1)) + 1
            if cut:
                done += [
                    *self._pending.pop(env, []),
                    jax.tree.map(lambda x, cut=cut: x[:cut], rows),
                ]
            if cut < len(rows["valid"]):
                left = jax.tree.map(lambda x, cut=cut: x[cut:].copy(), rows)
                self._pending.setdefault(env, []).append(left)
            if (
                self._episodic
                or sum(len(x["valid"]) for x in self._pending.get(env, [])) >= MAX_STEPS
            ):
                done += self._ended(env)
        self._append(done)

    def _ended(self, env: int) -> list[PyTree]:
        """Returns the pieces of an episode that is cut here, with its last observation."""
        if not (pieces := self._pending.pop(env, [])):
            return []
        blank = jax.tree.map(lambda x: np.zeros_like(x[:1]), pieces[-1])
        return [*pieces, blank | {"obs": jax.tree.map(lambda x: x[None], self._last[env])}]

    def _append(self, pieces: list[PyTree]) -> None:
        if not any(piece["valid"].any() for piece in pieces):
            return
        rows = jax.tree.map(lambda *x: np.concatenate(x), *pieces)
        rows["action"] = spaces.clipped(self._spec.action, rows["action"])
        data = Dataset.of_rows(**rows, interface=self._spec.interface)
        self._writer.append(data.columns)
        self._episodes += len(data.ends)


def unrecordable(spec: EnvSpec) -> str | None:
    """Says why the experience in an environment makes no data set, and what would; None: it
    does.
    """
    if spec.policies or spec.num_agents > 1:
        return (
            "a data set holds the steps of one agent; --env-options opponents=random leaves one in a "
            "game, and Dataset.from_episodes takes the episodes of each agent from Python"
        )
    if spec.frame_stack > 1:
        return "a data set holds no stacked frames; record a run without a frame stack"
    return None


def kinds(spec: EnvSpec, *, known: bool) -> dict[str, Any]:
    """Returns the spaces of the arrays of experience in an environment; ``known``:
    with ``log_prob``.
    """
    rows = {name: kind for name, kind in columns.ROWS.items() if known or name != "log_prob"}
    return {**spec.interface.kinds, **rows}
