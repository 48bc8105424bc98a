"""The episodes that clients of a served policy play, and what the policy remembers of each."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

from jaxrl_dist.checks import shown
from jaxrl_dist.envs.wire.encoding import WireError, check_name
from jaxrl_dist.types import PyTree


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

    def __init__(self, most: int, *, remembers: bool) -> None:
        """Prepares it.

        Args:
          remembers: whether an action depends on the earlier steps, so that an episode begins only
            if its client says so.
        """
        self._most = most
        self._remembers = remembers
        # the longest idle first
        self._memories = collections.OrderedDict[str, Memory]()
        self._busy = set[str]()

    @contextlib.contextmanager
    def step(self, name: str, first: bool | None) -> Iterator[Memory]:
        """Yields the memory of an episode, to which the block gives the core of the next step.

        If the block fails, the episode stays as it was.

        Args:
          first: whether the episode begins; None: it does if its id is new, and the policy does
            not remember.

        Raises:
          WireError: it was dropped or has not begun, or it already waits for an action.
        """
        check_name(name)
        self._check_idle(name)
        memory = Memory()
        if not first:
            memory = self._known(name, begun=self._remembers or first is False)
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

    def _check_idle(self, name: str) -> None:
        if name in self._busy:
            raise WireError(
                f"episode {shown(name)} still waits for an action; send its requests one after the "
                "other",
                409,
            )

    def _known(self, name: str, *, begun: bool) -> Memory:
        """Returns the memory of an episode, a new one if it need not have ``begun``."""
        if begun and name not in self._memories:
            raise WireError(
                f"episode {shown(name)} has not begun, or was dropped for {self._most} newer ones; "
                "send its first observation with first: true, or raise --max-episodes",
                410,
            )
        return self._memories.get(name, Memory())

    def _store(self, name: str, memory: Memory) -> None:
        self._memories[name] = memory
        self._memories.move_to_end(name)
        if len(self._memories) > self._most:
            self._memories.popitem(last=False)
