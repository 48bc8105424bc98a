"""The port where programs outside bring their episodes, for the environments of ``remote``."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from aiohttp import web

from jaxrl_dist import spaces
from jaxrl_dist.checks import shown
from jaxrl_dist.envs import episodes
from jaxrl_dist.envs.wire import server
from jaxrl_dist.envs.wire.access import Access
from jaxrl_dist.envs.wire.encoding import Format, WireError, check_name, fields, read
from jaxrl_dist.envs.wire.spaces import interface_to_json, space_from_json
from jaxrl_dist.errors import ConfigError, one_line, say
from jaxrl_dist.spaces import Interface, Space
from jaxrl_dist.types import PyTree

FIRST: dict[str, tuple[type, ...]] = {"observation": (dict,), "action": (dict,)}
"""Fields of a client's first message, besides its token."""
LATER: dict[str, tuple[type, ...]] = {
    **{"episode": (str,), "step": (int,), "obs": (), "reward": (int, float)},
    **{"terminated": (bool,), "truncated": (bool,), "info": (dict,), "log_action": ()},
}
"""Fields of its later messages."""
LARGEST = float(np.finfo(np.float32).max)
MAX_STEP = 2**31
"""Steps of an episode, fewer than these."""
START_SECONDS = 30.0
MAX_WAITING = 1000
"""Episodes that may wait for an environment."""


class Move(NamedTuple):
    """What a client says of a step of its episode; arrays are as policies see them."""

    step: int
    """Actions taken before; 0: the episode begins."""
    observation: PyTree
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, float]
    action: PyTree
    """The action that was taken in place of the policy's; None: it took the policy's."""


class Link:
    """A client's connection."""

    def __init__(self, socket: web.WebSocketResponse, format: Format) -> None:
        self.socket = socket
        self.format = format
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def write(self) -> None:
        """Sends all answers, until the client takes none any more."""
        try:
            while True:
                await server.send(self.socket, await self.answers.get(), self.format)
        except ConnectionError:
            await self.socket.close()
        except Exception as error:
            say(f"error: an answer failed: {one_line(error)}")
            await self.socket.close(code=1011)  # "internal error"


@dataclasses.dataclass(eq=False)
class Episode:
    """A client's episode, which changes under ``Clients.changed`` only."""

    name: str
    link: Link | None
    """None: the connection is lost, and the client may come back."""
    move: Move
    fresh: bool = True
    """Whether nobody has taken the move yet."""
    answer: dict[str, Any] | None = None
    """The answer to the move."""
    since: float = math.inf
    """When it was answered."""


class Slots(Protocol):
    """Environments that episodes take part in."""

    def place(self, episode: Episode) -> bool:
        """Gives an episode one of them; returns False if all are taken."""

    @property
    def running(self) -> int:
        """The number of those that are taken."""


class Clients:
    """Listens in a thread, and keeps the episodes of all clients."""

    def __init__(
        self, host: str, port: int, access: Access, check: Callable[[Space, Space], Interface]
    ) -> None:
        """Begins to listen.

        Args:
          check: makes an interface of the spaces of observations and actions, or raises
            ``ConfigError``.

        Raises:
          ConfigError: the address cannot be used.
        """
        self.changed = threading.Condition()
        self.interface: Interface | None = None
        """The spaces of the first client; None: it has not come yet."""
        self.logs_actions = False
        self._check = check
        self._access = access
        self._slots = list[Slots]()
        self._episodes = dict[str, Episode]()
        self._waiting = collections.deque[Episode]()
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, port, started)), name="remote", daemon=True
        )
        self._thread.start()
        self.port = started.result(START_SECONDS)
        """Where it listens."""

    # --- The thread of the environments -----------------------------------------------------------

    def open(self, slots: Slots) -> None:
        """Also places episodes in these environments."""
        with self.changed:
            self._slots.append(slots)
            self.fill()

    def remove(self, slots: Slots) -> None:
        """Places no more episodes in these environments."""
        with self.changed:
            self._slots.remove(slots)

    @property
    def used(self) -> bool:
        """Whether it has environments."""
        return bool(self._slots)

    def close(self) -> None:
        """Closes the port and all connections."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(timeout=5.0)

    def fill(self) -> None:
        """Lets the episodes begin that wait for an environment, as far as there is one; those with
        the fewest episodes come first.
        """
        while self._waiting:
            fewest = sorted(self._slots, key=lambda slots: slots.running)
            if not any(slots.place(self._waiting[0]) for slots in fewest):
                return
            self._waiting.popleft()

    def answer(self, episode: Episode, **content: Any) -> None:
        """Answers a move: ``action=...``, or ``reset=True``, which ends the episode."""
        episode.answer = {"episode": episode.name, "step": episode.move.step, **content}
        episode.since = time.monotonic()
        if "reset" in content:
            self.end(episode)
        if episode.link is not None:
            answers = episode.link.answers
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(answers.put_nowait, episode.answer)

    def end(self, episode: Episode) -> None:
        """Forgets an episode that is over."""
        self._episodes.pop(episode.name, None)

    # --- The thread of the port -------------------------------------------------------------------

    async def _serve(self, host: str, port: int, started: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        app = server.application(self._access)
        app.router.add_get("/", self._connect)
        try:
            async with server.listening(app, host, port) as used:
                started.set_result(used)
                await self._end.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        """Talks with a client until one of both ends it."""
        socket, first = await server.open_socket(request)
        if first is None:
            return socket
        link = Link(socket, first.format)
        writer = asyncio.create_task(link.write())
        try:
            with _shallow():
                self._greet(first.message)
            link.answers.put_nowait({"ready": True})
            async for received in server.messages(socket):
                await self._receive(link, received.message)
        except WireError as error:
            await server.refuse(socket, error, link.format)
        finally:
            writer.cancel()
            self._lose(link)
        await socket.close(code=1008)  # "policy violation"
        return socket

    def _greet(self, message: Any) -> None:
        """Checks the spaces of a client; the first client decides them for the run."""
        given = fields(message, FIRST)
        try:
            observation, action = (space_from_json(given[name]) for name in FIRST)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            raise WireError(
                "the first message needs the spaces observation and action, such as "
                '{"n": 2, "start": 0} or {"shape": [4], "dtype": "float32", "low": "-inf", '
                '"high": "inf"}'
            ) from None
        try:
            interface = self._check(observation, action)
        except ConfigError as error:
            raise WireError(str(error)) from None
        with self.changed:
            if self.interface is None:
                self.interface = interface
            self.changed.notify_all()
        if interface_to_json(interface) != interface_to_json(self.interface):
            raise WireError(
                f"this run has {_described(self.interface)}; a client with "
                f"{_described(interface)} or with other bounds needs a run of its own"
            )

    async def _receive(self, link: Link, message: Any) -> None:
        """Takes a client's word of a step, or refuses it."""
        try:
            with _shallow(), self.changed:
                self._continue(link, fields(message, LATER))
                self.changed.notify_all()
        except WireError as error:
            await server.refuse(link.socket, error, link.format)

    def _continue(self, link: Link, given: Mapping[str, Any]) -> None:
        """Begins or continues an episode."""
        name = given.get("episode", "")
        step = given.get("step", -1)
        check_name(name)
        if not 0 <= step < MAX_STEP:
            raise WireError("a message needs step, the number of actions taken in the episode")
        episode = self._episodes.get(name)
        if episode is None and step > 0:  # it has been given up
            link.answers.put_nowait({"episode": name, "step": step, "reset": True})
        elif episode is None:
            if len(self._waiting) >= MAX_WAITING:
                raise WireError(
                    f"{MAX_WAITING} episodes wait already; play fewer, or raise --num-envs"
                )
            self._episodes[name] = Episode(name, link, self._move(given, {}))
            self._waiting.append(self._episodes[name])
            self.fill()
        elif step == episode.move.step:  # the client has come back
            again = self._read("observation", given.get("obs"), "obs")
            if not _equal(again, episode.move.observation):
                raise WireError(
                    f"episode {shown(name)} had another observation at step {step}; name each "
                    "episode anew, as with a UUID"
                )
            episode.link = link
            if episode.answer is not None:
                link.answers.put_nowait(episode.answer)
        elif step == episode.move.step + 1 and episode.answer is not None:
            episode.move = self._move(given, episode.move.observation)
            episode.link = link
            episode.answer = None
            episode.fresh = True
        else:
            raise WireError(
                f"episode {shown(name)} is at step {episode.move.step}, not {step}; send a step "
                "after the answer to the one before"
            )

    def _move(self, given: Mapping[str, Any], before: PyTree) -> Move:
        """Returns what a message says of a step.

        Args:
          before: the observation before the step.
        """
        assert self.interface is not None, "the first message sets it"
        step = given["step"]
        reward = given.get("reward", None if step else 0.0)
        if reward is None or not abs(reward) <= LARGEST:
            raise WireError(f"step {step} needs a reward, a finite number")
        info = episodes.numbers(given.get("info", {}))
        if not all(abs(x) <= LARGEST for x in info.values()):
            raise WireError(
                f"the info of step {step} holds a number that is not finite; leave it out"
            )
        if "obs" not in given:
            raise WireError(f"step {step} has no obs; send the observation after the action")
        action = given.get("log_action")
        if action is not None:
            if not self.logs_actions:
                raise WireError(
                    "log_action needs an algorithm with a replay memory, such as dqn or sac; start "
                    "the run with --env-options log_action=true"
                )
            action = self._read("action", action, "log_action")
            self._check_action(action, before)
        return Move(
            step,
            self._read("observation", given["obs"], "obs"),
            float(reward),
            step > 0 and given.get("terminated", False),
            step > 0 and given.get("truncated", False),
            {name: float(x) for name, x in info.items()},
            action,
        )

    def _read(self, kind: str, value: Any, path: str) -> PyTree:
        """Returns a value of one of the run's spaces, as policies see it."""
        space = getattr(self.interface, kind)
        return jax.tree.map(
            lambda part, x: spaces.counted(part, x[None])[0], space, read(space, value, path=path)
        )

    def _check_action(self, action: PyTree, before: PyTree) -> None:
        """Refuses an action outside of its bounds, or one that the mask before the step forbids."""
        interface = self.interface
        assert interface is not None, "the first message sets it"
        if not _equal(spaces.clipped(interface.action, action), action):
            raise WireError("log_action is outside of the bounds of the actions; send one within")
        if interface.mask is None or not before:
            return
        sizes = spaces.num_choices(interface.action)
        allowed = np.split(before[interface.mask][-sum(sizes) :], np.cumsum(sizes)[:-1])
        for flags, choice in zip(allowed, np.ravel(action), strict=True):
            if flags.any() and not flags[choice]:
                raise WireError(
                    f"log_action is illegal by {interface.mask} of the step before; send the "
                    "action that was taken"
                )

    def _lose(self, link: Link) -> None:
        """Notes that a connection is lost."""
        with self.changed:
            for episode in list(self._episodes.values()):
                if episode.link is link:
                    episode.link = None
                    if episode in self._waiting:
                        self._waiting.remove(episode)
                        self.end(episode)
            self.fill()
            self.changed.notify_all()


@contextlib.contextmanager
def _shallow() -> Iterator[None]:
    """Refuses a message of which the depth is too great for the block."""
    try:
        yield
    except RecursionError:
        raise WireError("the message has too many parts inside each other; send fewer") from None


def _equal(one: PyTree, other: PyTree) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def _described(interface: Interface) -> str:
    observation = spaces.describe(interface.observation, starts=True)
    return (
        f"observations {observation} and actions {spaces.describe(interface.action, starts=True)}"
    )
