"""Writes experience as a data set while it is played."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.data import columns
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.data.writing import Writer
from jaxrl_dist.run.storage import Json
from jaxrl_dist.spaces import Space
from jaxrl_dist.types import EnvSpec, PyTree, Rollout

WAKE_SECONDS = 0.5
"""Longest single wait."""
WAITING = 2
"""Calls whose rollouts may wait to be written; a further call waits."""
BLOCK = 128
"""Least steps of an environment that are divided into episodes at a time: a rollout may have one
step."""
MAX_STEPS = 2**17
"""Steps of an episode that are kept until it ends; a longer one is cut."""


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Adds to the error of a disk how the recorded run can continue."""
    try:
        yield
    except OSError as error:
        error.add_note(
            "continue without recording with --record None, or record elsewhere with --record DIR"
        )
        raise


class Recorder:
    """A thread that writes rollouts as a data set: episodes as they end, and what there is of the
    others when it is closed.
    """

    def __init__(
        self, writer: Writer, spec: EnvSpec, about: Mapping[str, Json], *, episodic: bool
    ) -> None:
        """Starts the thread.

        Args:
          writer: its arrays include ``log_prob`` if the probability of each action is known.
          about: as ``Dataset.about``.
          episodic: each rollout begins with new episodes.
        """
        self.place = writer.place
        self._writer = writer
        self._spec = spec
        self._about = about
        self._episodic = episodic
        # Rollouts that are not yet divided into episodes, by their first environment.
        self._held = dict[int, list[Rollout]]()
        # Pieces of each environment's unfinished episode, and the observation after them.
        self._pending = dict[int, list[PyTree]]()
        self._last = dict[int, PyTree]()
        self._episodes = 0
        self._error: BaseException | None = None
        self._queue = queue.Queue[tuple[int, Iterable[Rollout]] | None](WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def __call__(self, first: int, rollouts: Iterable[Rollout]) -> None:
        """Takes rollouts ``[T, B, ...]`` on any device, for each environment in order.

        Args:
          first: index of their first environment.
          rollouts: may be a generator that fetches them, which the thread then runs.

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
                first, rollouts = item
                for rollout in rollouts:
                    self._take(first, rollout)
            for first in list(self._held):
                self._divide(first)
            self._append([piece for env in sorted(self._pending) for piece in self._ended(env)])

    def close(self) -> None:
        """Cuts the unfinished episodes, and completes the data set; without a step there is none.

        Raises:
          Exception: not all could be written, and no call has raised this; what was written is a
            data set.
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
        if self._episodic or sum(len(each.reward) for each in held) >= BLOCK:
            self._divide(first)

    def _divide(self, first: int) -> None:
        """Appends the episodes that end in the rollouts held of these environments."""
        held = self._held.pop(first)
        steps = jax.tree.map(lambda *x: np.concatenate(x), *map(_columns, held))
        complete = list[PyTree]()
        for column in range(steps["valid"].shape[1]):
            env = first + column
            self._last[env] = _copied(_of_env(held[-1].obs, column), -1)
            complete += self._completed(env, _of_env(steps, column))
        self._append(complete)

    def _completed(self, env: int, rows: PyTree) -> list[PyTree]:
        """Returns the pieces of the episodes that end in these rows, and keeps the other rows."""
        complete = list[PyTree]()
        # After the last episode that has ended.
        cut = int(np.flatnonzero(~rows["valid"]).max(initial=-1)) + 1
        if cut:
            complete = [*self._pending.pop(env, []), columns.sliced(rows, 0, cut)]
        pending = self._pending.setdefault(env, [])
        if cut < len(rows["valid"]):
            pending.append(_copied(rows, slice(cut, None)))
        if self._episodic or sum(len(piece["valid"]) for piece in pending) >= MAX_STEPS:
            complete += self._ended(env)
        return complete

    def _ended(self, env: int) -> list[PyTree]:
        """Returns the pieces of an episode that is cut here, with its last observation."""
        pieces = self._pending.pop(env, [])
        if not pieces:
            return []
        blank = jax.tree.map(lambda x: np.zeros_like(x[:1]), pieces[-1])
        last = jax.tree.map(lambda x: x[None], self._last[env])
        return [*pieces, blank | {"obs": last}]

    def _append(self, pieces: list[PyTree]) -> None:
        if not any(piece["valid"].any() for piece in pieces):
            return
        rows = jax.tree.map(lambda *x: np.concatenate(x), *pieces)
        rows["action"] = spaces.clipped(self._spec.action, rows["action"])
        data = Dataset.of_rows(**rows, interface=self._spec.interface)
        self._writer.append(data.columns)
        self._episodes += len(data.ends)


def _columns(rollout: Rollout) -> dict[str, PyTree]:
    """Returns the arguments ``[T, B, ...]`` of ``Dataset.of_rows``."""
    names = "action", "reward", "terminated", "valid"
    arrays = {name: getattr(rollout, name) for name in names}
    return {**arrays, **rollout.extras, "obs": rollout.obs_before}


def _of_env(tree: PyTree, column: int) -> PyTree:
    return jax.tree.map(lambda x: x[:, column], tree)


def _copied(tree: PyTree, rows: int | slice) -> PyTree:
    """Returns rows without the arrays that hold them."""
    return jax.tree.map(lambda x: x[rows].copy(), tree)


def unrecordable(spec: EnvSpec) -> str | None:
    """Says why experience in an environment makes no data set, and what would; None: it does."""
    if spec.policies or spec.num_agents > 1:
        return (
            "a data set holds the steps of one agent; leave one in a game with --env-options "
            "opponents=random, or give each agent's episodes to Dataset.from_episodes in Python"
        )
    if spec.frame_stack > 1:
        return "a data set cannot hold stacked frames; record a run without --frame-stack"
    return None


def kinds(spec: EnvSpec, *, known: bool) -> dict[str, Space]:
    """Returns the spaces of the arrays of experience in an environment.

    Args:
      known: the probability of each action is known, so that there is a ``log_prob``.
    """
    kinds = {**spec.interface.kinds, **columns.ROWS}
    if not known:
        del kinds["log_prob"]
    return kinds
