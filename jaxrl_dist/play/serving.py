"""Trained policies behind HTTP and web sockets: what clients may ask, and how waiting requests
become a batch.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web

from jaxrl_dist.checks import did_you_mean, shown
from jaxrl_dist.envs.wire import server
from jaxrl_dist.envs.wire.access import Access
from jaxrl_dist.envs.wire.encoding import Format, WireError, fields, read
from jaxrl_dist.errors import one_line, say
from jaxrl_dist.play.episodes import Episodes, Memory
from jaxrl_dist.play.served import Chosen, Row, ServedPolicy, draw_of
from jaxrl_dist.spaces import Box

ANSWER_SECONDS = 30.0
"""Seconds for which a request waits for its action."""
MAX_WAITING = 4096
"""Requests that wait, at most; more are refused."""
POLL_SECONDS = 0.05
"""Seconds between two looks for the end of the server."""
FIELDS: dict[str, tuple[type, ...]] = {
    "obs": (),
    "policy": (str,),
    "episode": (str,),
    "first": (bool,),
    "end": (bool,),
    "reward": (int, float),
    "extras": (bool,),
}
"""Fields of a request with their types, as docs/serve.md describes them; none: any type."""
_REWARD = Box((), np.dtype(np.float32), np.array(-np.inf), np.array(np.inf))


class _Waiting(NamedTuple):
    policy: str
    row: Row
    chosen: asyncio.Future[Chosen]


class Desk:
    """Answers requests. Those that arrive while a batch computes form the next one."""

    def __init__(self, policies: Mapping[str, ServedPolicy], max_episodes: int) -> None:
        """Prepares it.

        Args:
          policies: by name; a single policy of a run has the name ``""``.
          max_episodes: of each policy, as ``Episodes``.
        """
        self._policies = policies
        self._episodes = {
            name: Episodes(max_episodes, remembers=policy.has_core)
            for name, policy in policies.items()
        }
        self._waiting = collections.deque[_Waiting]()
        self._arrived = asyncio.Event()
        self._requests = 0
        self._under_way = 0

    async def answer(self, message: Any) -> Any:
        """Answers a request, or each of a list of requests; in a list, a refusal is an answer.

        Raises:
          WireError: the request is refused.
        """
        if isinstance(message, list):
            if len(message) > MAX_WAITING:
                raise WireError(f"a list holds {len(message)} requests; send {MAX_WAITING} at most")
            return await asyncio.gather(*map(self._answer_or_refusal, message))
        return await self._answer(message)

    async def _answer_or_refusal(self, message: Any) -> dict[str, Any]:
        try:
            return await self._answer(message)
        except WireError as error:
            return server.refusal(error)

    async def _answer(self, message: Any) -> dict[str, Any]:
        request = fields(message, FIELDS)
        policy = self._named(request.get("policy", ""))
        ends = request.get("end", False)
        if ends and "episode" not in request:
            raise WireError("end needs the id of an episode; send episode")
        if not ends and "obs" not in request:
            raise WireError("a request needs an observation; send obs")
        answer = {}
        if "obs" in request:
            answer = await self._act(policy, request)
        if ends:
            self._episodes[policy].end(request["episode"])
            answer["ended"] = request["episode"]
        return answer

    def _named(self, name: str) -> str:
        """Returns the name of a policy, if it is here."""
        names = ", ".join(self._policies)
        if name in self._policies:
            return name
        if not names:
            raise WireError("the only policy here has no name; remove policy")
        if not name:
            raise WireError(f"several policies are here; name one as policy: {names}")
        advice = did_you_mean(name, self._policies)
        raise WireError(f"policy {shown(name)} is not here{advice}; name one of {names}")

    async def _act(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        policy = self._policies[name]
        obs = read(policy.observation, request["obs"], policy.tuples, "observation")
        wants_extras = request.get("extras", False)
        if wants_extras and not policy.extras:
            raise WireError("this policy says nothing besides the action; remove extras")
        episode = request.get("episode")
        if episode is not None:
            with self._episodes[name].step(episode, request.get("first")) as memory:
                reward = _reward(policy, request, memory)
                row = Row(obs, memory.core, reward, (draw_of(episode), memory.steps))
                chosen = await self._chosen(name, row)
                memory.core = chosen.core
        elif policy.has_core:
            raise WireError("this policy remembers its episode; send an id of it as episode")
        else:
            self._requests += 1
            chosen = await self._chosen(name, Row(obs, draw=(0, self._requests % 2**32)))
        answer = {"action": chosen.action}
        if wants_extras:
            answer |= chosen.extras
            infinite = [name for name, x in chosen.extras.items() if not np.isfinite(x)]
            answer |= dict.fromkeys(infinite)  # null, as JSON holds finite numbers only
        return answer

    async def _chosen(self, policy: str, row: Row) -> Chosen:
        """Waits for the batch of a row."""
        if len(self._waiting) >= MAX_WAITING:
            raise WireError(f"{MAX_WAITING} requests wait already; try again later", 503)
        waiting = _Waiting(policy, row, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await waiting.chosen
        except TimeoutError:
            raise WireError(
                f"no action came within {ANSWER_SECONDS:.0f} s; try again with fewer requests", 503
            ) from None

    def _take(self) -> list[_Waiting]:
        """Takes the next batch from those who wait: of the policy that waits longest."""
        batch: list[_Waiting] = []
        others = []
        while self._waiting and (
            not batch or len(batch) < self._policies[batch[0].policy].max_batch
        ):
            waiting = self._waiting.popleft()
            if batch and waiting.policy != batch[0].policy:
                others.append(waiting)
            elif not waiting.chosen.done():  # nobody waits for it any more
                batch.append(waiting)
        self._waiting.extendleft(reversed(others))
        return batch

    async def compute(self) -> None:
        """Computes batches until it is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "policy") as thread:
            while True:
                await self._arrived.wait()
                batch = self._take()
                if not batch:
                    self._arrived.clear()
                    continue
                rows = [waiting.row for waiting in batch]
                policy = self._policies[batch[0].policy]
                try:
                    chosen = await loop.run_in_executor(thread, policy, rows)
                except Exception as error:
                    say(f"error: a batch failed: {one_line(error)}")
                    _refuse(batch)
                    continue
                for waiting, choice in zip(batch, chosen, strict=True):
                    if not waiting.chosen.done():
                        waiting.chosen.set_result(choice)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Makes ``idle`` wait for the block."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def idle(self) -> None:
        """Returns when no request is under way."""
        while self._under_way:
            await asyncio.sleep(POLL_SECONDS)


def _refuse(batch: list[_Waiting]) -> None:
    for waiting in batch:
        if not waiting.chosen.done():
            waiting.chosen.set_exception(
                WireError("the policy failed; the output of the server says why", 500)
            )


def _reward(policy: ServedPolicy, request: Mapping[str, Any], memory: Memory) -> float:
    """Returns the reward of the last action, as far as the policy reads it."""
    if not policy.reads_reward or memory.core is None:
        return 0.0
    if "reward" not in request:
        raise WireError("this policy reads the reward of its last action; send reward")
    return float(read(_REWARD, request["reward"], path="reward"))


def application(
    desk: Desk, access: Access, about: Mapping[str, Any], max_bytes: int
) -> web.Application:
    """Returns the application: ``GET /`` describes it, ``POST /act`` answers a request, and
    ``GET /socket`` is a web socket, which answers one message after the other.

    Args:
      about: the description, in JSON.
      max_bytes: of a message, at most.
    """

    async def describe(request: web.Request) -> web.Response:
        return server.answer(about, Format.JSON)

    async def act(request: web.Request) -> web.Response:
        message, format = await server.body(request)
        with desk.working():
            return server.answer(await desk.answer(message), format)

    async def converse(request: web.Request) -> web.WebSocketResponse:
        socket, first = await server.open_socket(request, max_bytes)
        if first is None:
            return socket
        await server.send(socket, about, first.format)
        async for message, format in server.messages(socket):
            with desk.working():
                try:
                    answer = await desk.answer(message)
                except WireError as error:
                    answer = server.refusal(error)
                await server.send(socket, answer, format)
        return socket

    app = server.application(access, max_bytes)
    app.router.add_get("/", describe)
    app.router.add_post("/act", act)
    app.router.add_get("/socket", converse)
    return app


async def serve(
    desk: Desk,
    app: web.Application,
    host: str,
    port: int,
    *,
    ready: Callable[[int], None],
    stop: Callable[[], bool],
) -> None:
    """Serves until ``stop`` returns True; requests that wait then are answered.

    Args:
      ready: called with the port as soon as it is open.

    Raises:
      ConfigError: as ``server.listening``.
    """
    computing = asyncio.create_task(desk.compute())
    try:
        async with server.listening(app, host, port, drained=desk.idle) as bound:
            ready(bound)
            while not stop() and not computing.done():
                await asyncio.sleep(POLL_SECONDS)
        if computing.done():
            computing.result()
    finally:
        computing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await computing
