"""The episodes that clients of a served policy play, and what the policy remembers of each."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

from jaxrl_dist.checks import shown
from jaxrl_dist.envs.wire.encoding import WireError
from jaxrl_dist.types import PyTree

MAX_NAME = 200
"""Characters of an episode's id."""
DROPPED = 2**16
"""Ids of dropped episodes that are remembered."""


@dataclasses.dataclass
class Memory:
    """What a policy remembers of an episode."""

    core: PyTree = None
    """The policy's state; None: the episode begins."""
    steps: int = 0
    """Steps so far."""


class Episodes:
    """The memory of each of up to ``most`` episodes; the one that has been idle for longest makes
    room for another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # the longest idle first
        self._memories = collections.OrderedDict[str, Memory]()
        self._busy = set[str]()
        self._dropped = collections.OrderedDict[str, None]()

    @contextlib.contextmanager
    def step(self, name: str, first: bool | None) -> Iterator[Memory]:
        """Yields the memory of an episode, to which the block gives the core of the next step.

        If the block fails, the episode stays as it was.

        Args:
          first: whether the episode begins; None: it does if its id is new.

        Raises:
          WireError: it was dropped, has not begun, or already waits for an action.
        """
        if not 1 <= len(name) <= MAX_NAME:
            raise WireError(f"an episode's id has 1 to {MAX_NAME} characters; send another id")
        self._check_idle(name)
        memory = Memory()
        if not first:
            memory = self._known(name, begun=first is False)
        self._busy.add(name)
        try:
            yield memory
        finally:
            self._busy.discard(name)
        memory.steps += 1
        self._store(name, memory)

    def end(self, name: str) -> None:
        """Forgets an episode.

        Raises:
          WireError: it waits for an action.
        """
        self._check_idle(name)
        self._memories.pop(name, None)
        self._dropped.pop(name, None)

    def _check_idle(self, name: str) -> None:
        if name in self._busy:
            raise WireError(
                f"episode {shown(name)} still waits for an action; send its requests one after the "
                "other",
                409,
            )

    def _known(self, name: str, *, begun: bool) -> Memory:
        """Returns the memory of an episode, a new one if it need not have ``begun``."""
        if name in self._dropped:
            raise WireError(
                f"episode {shown(name)} was dropped, because {self._most} others were played since; "
                "begin it again with first: true, or serve with a larger --max-episodes",
                410,
            )
        if begun and name not in self._memories:
            raise WireError(
                f"episode {shown(name)} has not begun; send its first observation with first: true",
                410,
            )
        return self._memories.get(name, Memory())

    def _store(self, name: str, memory: Memory) -> None:
        self._dropped.pop(name, None)
        self._memories[name] = memory
        self._memories.move_to_end(name)
        if len(self._memories) > self._most:
            oldest, _ = self._memories.popitem(last=False)
            self._dropped[oldest] = None
        if len(self._dropped) > DROPPED:
            self._dropped.popitem(last=False)
