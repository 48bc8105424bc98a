"""Requests for actions: what they may hold, how they wait, and what is remembered of an episode.
A policy that computes nothing stands for the trained one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from jaxrl_dist.envs.wire import encoding
from jaxrl_dist.envs.wire.access import Access
from jaxrl_dist.envs.wire.encoding import Format, WireError
from jaxrl_dist.play import serving
from jaxrl_dist.play.episodes import Episodes
from jaxrl_dist.play.served import Chosen, Row
from jaxrl_dist.spaces import Box

pytestmark = pytest.mark.quick

TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Counting:
    """Answers with the number of the step in the episode, and keeps the sizes of its batches."""

    tuples = ()
    extras: tuple[str, ...] = ("value",)
    max_batch = 4
    observation: Any = Box((2,), np.dtype(np.float32), np.zeros(2), np.ones(2))

    def __init__(self, *, has_core: bool = False, reads_reward: bool = False) -> None:
        self.has_core = has_core
        self.reads_reward = reads_reward
        self.batches: list[list[Row]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, rows: Sequence[Row]) -> list[Chosen]:
        self.batches.append(list(rows))
        assert self.gate.wait(20)
        if any(row.obs[0] == 13 for row in rows):
            raise RuntimeError("it cannot count to 13")
        steps = [0 if row.core is None else row.core + 1 for row in rows]
        return [Chosen(np.int32(step), step, {"value": np.float32(0.5)}) for step in steps]


async def computed(desk: serving.Desk, work: Callable[[], Awaitable[Any]]) -> Any:
    """What some work returns while the desk computes."""
    computing = asyncio.create_task(desk.compute())
    try:
        return await asyncio.wait_for(work(), 20)
    finally:
        computing.cancel()


def answers(*messages: Any, policy: Any = None, most: int = 3) -> list[Any]:
    """The answers to requests, one after the other; the text of a refusal."""
    policies = policy if isinstance(policy, dict) else {"": policy or Counting()}
    desk = serving.Desk(policies, most)

    async def work() -> list[Any]:
        seen: list[Any] = []
        for message in messages:
            try:
                seen.append(await desk.answer(message))
            except WireError as error:
                seen.append(f"{error.status} {error}")
        return seen

    return asyncio.run(computed(desk, work))


OBS = [0.0, 1.0]


# --- Episodes -------------------------------------------------------------------------------------


def step(name: str, **more: Any) -> dict[str, Any]:
    return {"obs": OBS, "episode": name, **more}


def test_an_episode_is_remembered_until_it_ends_or_begins_again() -> None:
    said = answers(
        step("a", first=True),
        step("a"),
        step("b", first=True),
        step("a", first=False),
        step("a", first=True),
        step("a", end=True),
        step("a", first=True),
        {"episode": "a", "end": True},
        step("a", first=True),
        {"episode": "none", "end": True},
        policy=Counting(has_core=True),
    )
    assert [answer.get("action") for answer in said] == [0, 1, 0, 2, 0, 1, 0, None, 0, None]
    assert said[5] == {"action": 1, "ended": "a"} and said[7] == {"ended": "a"}


def test_the_longest_idle_episode_is_dropped_and_says_so() -> None:
    said = answers(
        *(step(name, first=True) for name in "abc"),
        step("a"),
        step("d", first=True),  # b is idle for longest
        step("b"),
        step("a"),
        step("b", first=False),
        step("b", first=True),
        step("b"),
        step("c"),
        policy=Counting(has_core=True),
    )
    assert said[5].startswith("410 episode 'b' has not begun, or was dropped for 3 newer ones")
    assert "--max-episodes" in said[5] and said[7].startswith("410 episode 'b'")
    assert [answer["action"] for answer in (said[6], *said[8:10])] == [2, 0, 1]
    assert said[10].startswith("410 episode 'c'")


def test_no_episode_continues_with_an_empty_memory() -> None:
    memory = Episodes(1, remembers=True)
    for number in range(2**16 + 3):  # any number of others
        with memory.step(f"episode {number}", first=True) as now:
            now.core = number
    for name in ("episode 0", "episode 1", "new"):
        with pytest.raises(WireError, match="first: true"), memory.step(name, None):
            pass


def test_a_policy_without_memory_takes_any_episode() -> None:
    said = answers(*(step(name) for name in "abcda"), step("e", first=False))
    assert [answer["action"] for answer in said[:5]] == [0] * 5
    assert said[5].startswith("410 episode 'e' has not begun")


def test_a_failed_step_leaves_an_episode_as_it_was() -> None:
    said = answers(
        step("a", first=True),
        step("a", obs=[13.0, 0.0]),
        step("a"),
        policy=Counting(has_core=True),
    )
    assert said[0]["action"] == 0 and said[1].startswith("500 ") and said[2]["action"] == 1


def test_requests_of_an_episode_come_one_after_the_other() -> None:
    policy = Counting(has_core=True)
    policy.gate.clear()
    desk = serving.Desk({"": policy}, 3)  # type: ignore[dict-item]

    async def work() -> list[Any]:
        first = asyncio.create_task(desk.answer(step("a", first=True)))
        await asyncio.sleep(0.05)
        seen: list[Any] = []
        for message in (step("a"), step("a", first=True), {"episode": "a", "end": True}):
            with pytest.raises(WireError, match="still waits") as caught:
                await desk.answer(message)
            assert caught.value.status == 409
        policy.gate.set()
        seen.append(await first)
        return [*seen, await desk.answer(step("a"))]

    assert [answer["action"] for answer in asyncio.run(computed(desk, work))] == [0, 1]


def test_the_reward_is_read_after_the_first_step() -> None:
    policy = Counting(has_core=True, reads_reward=True)
    said = answers(
        step("a", first=True, reward=5),
        step("a", reward=2),
        step("a"),
        step("a", reward=1e300),
        step("a", reward=0.5),
        policy=policy,
    )
    assert said[2].startswith("400 this policy reads the reward")
    assert said[3].startswith("400 reward ")
    assert [row.reward for [row] in policy.batches] == [0.0, 2.0, 0.5]


# --- Batches --------------------------------------------------------------------------------------


def test_requests_that_wait_form_one_batch() -> None:
    policy = Counting()
    other = Counting()
    desk = serving.Desk({"one": policy, "other": other}, 3)  # type: ignore[dict-item]

    async def work() -> None:
        policy.gate.clear()
        for size, name in ((1, "one"), (6, "one"), (3, "other")):
            for _ in range(size):
                asked.append(asyncio.create_task(desk.answer({"obs": OBS, "policy": name})))
            await asyncio.sleep(0.05)
        policy.gate.set()
        await asyncio.gather(*asked)

    asked: list[asyncio.Task[Any]] = []
    asyncio.run(computed(desk, work))
    assert [len(batch) for batch in policy.batches] == [1, 4, 2]
    assert [len(batch) for batch in other.batches] == [3]


def test_a_list_of_requests_is_a_batch_of_its_own() -> None:
    policy = Counting()
    [said] = answers([{"obs": OBS}, {"obs": [1]}, {"obs": OBS}, 5], policy=policy)
    assert said[0] == {"action": 0} == said[2]
    assert [answer.get("status") for answer in said] == [None, 400, None, 400]
    assert [len(batch) for batch in policy.batches] == [2]


def test_a_long_list_of_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 2)
    [said] = answers([{"obs": OBS}] * 3)
    assert said == "400 a list holds 3 requests; send 2 at most"


def test_waiting_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(serving, "MAX_WAITING", 2)
    policy = Counting()
    policy.gate.clear()
    desk = serving.Desk({"": policy}, 3)  # type: ignore[dict-item]

    async def work() -> Any:
        asked = [asyncio.create_task(desk.answer({"obs": OBS})) for _ in range(5)]
        seen = await asyncio.gather(*asked, return_exceptions=True)
        policy.gate.set()
        return seen, await desk.answer({"obs": OBS})

    seen, after = asyncio.run(computed(desk, work))
    assert {error.status for error in seen} == {503} and after == {"action": 0}
    assert "2 requests wait already" in str(seen[-1])


# --- HTTP and web sockets -------------------------------------------------------------------------

Client = Callable[[aiohttp.ClientSession, str], Awaitable[Any]]


def with_server(client: Client, policy: Any = None) -> Any:
    """Returns what a client returns, after which the server stops."""
    policies = policy if isinstance(policy, dict) else {"": policy or Counting()}
    desk = serving.Desk(policies, 3)
    app = serving.application(desk, Access(TOKEN), {"run": "runs/NAME"}, max_bytes=2000)
    done: list[Any] = []

    async def run() -> None:
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        clients = asyncio.create_task(talk(bound))
        await serving.serve(desk, app, "127.0.0.1", 0, ready=bound.set_result, stop=clients.done)
        done.append(await clients)

    async def talk(bound: asyncio.Future[int]) -> Any:
        url = f"http://127.0.0.1:{await bound}"
        async with aiohttp.ClientSession() as session:
            return await asyncio.wait_for(client(session, url), 20)

    asyncio.run(run())
    return done[0]


@pytest.mark.parametrize("format", list(Format))
def test_an_action_comes_in_the_format_of_its_request(format: Format) -> None:
    headers = {**BEARER, "Content-Type": format.value}
    request = encoding.pack({"obs": np.float32(OBS), "extras": True}, format)

    async def client(session: aiohttp.ClientSession, url: str) -> Any:
        async with session.post(f"{url}/act", data=request, headers=headers) as response:
            return response.content_type, encoding.unpack(await response.read(), format)

    assert with_server(client) == (format.value, {"action": 0, "value": 0.5})


def test_a_socket_plays_an_episode() -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> list[Any]:
        async with session.ws_connect(f"{url}/socket") as socket:
            await socket.send_json({"token": TOKEN})
            seen = [await socket.receive_json()]
            begin = step("a", first=True)
            for message in (begin, {"obs": 1}, step("a"), {"episode": "a", "end": True}):
                await socket.send_json(message)
                seen.append(await socket.receive_json())
            return seen

    about, first, refused, second, ended = with_server(client, Counting(has_core=True))
    assert about == {"run": "runs/NAME"} and ended == {"ended": "a"}
    assert (first, second) == ({"action": 0}, {"action": 1}) and refused["status"] == 400


REFUSED: dict[str, tuple[Any, int]] = {
    "nothing": (b"", 400),
    "half": (b'{"obs": [1', 400),
    "no map": (b"1", 400),
    "a text": (b'"obs"', 400),
    "null": (b"null", 400),
    "no observation": (b"{}", 400),
    "another field": ({"obs": OBS, "action": 1}, 400),
    "a misspelt field": ({"obss": OBS}, 400),
    "one too few": ({"obs": [1]}, 400),
    "one too many": ({"obs": [1, 2, 3]}, 400),
    "a batch": ({"obs": [OBS]}, 400),
    "ragged": ({"obs": [[1], [1, 2]]}, 400),
    "texts": ({"obs": ["a", "b"]}, 400),
    "a map": ({"obs": {"a": 1}}, 400),
    "no number": ({"obs": [None, 1]}, 400),
    "NaN": (b'{"obs": [NaN, 1]}', 400),
    "infinity": (b'{"obs": [1e999, 1]}', 400),
    "minus infinity": (b'{"obs": [-Infinity, 1]}', 400),
    "beyond float32": ({"obs": [1e300, 1]}, 400),
    "digits": (b'{"obs": [1' + b"0" * 1000 + b", 1]}", 400),
    "deep": (b'{"obs": ' + b"[" * 1900, 400),
    "deep and closed": (b'{"obs": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "no UTF-8": (b'{"obs": "\xff\xfe"}', 400),
    "packed wrongly": ({"obs": {"dtype": "float32", "shape": [2], "data": "AAAA"}}, 400),
    "a dtype of objects": ({"obs": {"dtype": "object", "shape": [2], "data": "AAAA"}}, 400),
    "another dtype": ({"obs": {"dtype": "complex64", "shape": [2], "data": "AAAA"}}, 400),
    "a huge shape": ({"obs": {"dtype": "float32", "shape": [2**60], "data": ""}}, 400),
    "an id that is a number": ({"obs": OBS, "episode": 1}, 400),
    "an empty id": ({"obs": OBS, "episode": ""}, 400),
    "half a pair as an id": (b'{"obs": [0, 1], "episode": "\\ud800"}', 400),
    "a long id": ({"obs": OBS, "episode": "a" * 201}, 400),
    "first that is a number": ({"obs": OBS, "episode": "a", "first": 1}, 400),
    "an end of nothing": ({"end": True}, 400),
    "a reward that is a text": ({"obs": OBS, "reward": "1"}, 400),
    "a policy that is not here": ({"obs": OBS, "policy": "other"}, 400),
    "extras that are a text": ({"obs": OBS, "extras": "value"}, 400),
    "an episode that has not begun": ({"obs": OBS, "episode": "a", "first": False}, 410),
    "too large": (b" " * 2001, 413),
    "msgpack as JSON": (encoding.pack({"obs": OBS}, Format.MSGPACK), 400),
}
REFUSED_MSGPACK: dict[str, bytes] = {
    "JSON as msgpack": b'{"obs": [1, 2]}',
    "a huge list": b"\x81\xa3obs\xdd\xff\xff\xff\xff",
    "an extension": b"\x81\xa3obs\xc7\x08\x01" + bytes(8),
    "a time": b"\x81\xa3obs\xd6\xff" + bytes(4),
    "deep msgpack": b"\x81\xa3obs" + b"\x91" * 1900,
    "names of bytes": b"\x81\xc4\x03obs\x01",
    "lists as names": b"\x81\x91\x01\x01",
    "NaN in msgpack": b"\x81\xa3obs\x92\xcb\x7f\xf8" + bytes(6) + b"\x01",
}


def test_a_server_survives_every_wrong_request() -> None:
    """In one line, with the problem and the remedy, over HTTP and over a web socket."""

    async def client(session: aiohttp.ClientSession, url: str) -> list[Any]:
        seen = []
        kinds = [(content, status, Format.JSON) for content, status in REFUSED.values()]
        kinds += [(content, 400, Format.MSGPACK) for content in REFUSED_MSGPACK.values()]
        for content, status, format in kinds:
            data = content if isinstance(content, bytes) else encoding.pack(content, format)
            headers = {**BEARER, "Content-Type": format.value}
            async with session.post(f"{url}/act", data=data, headers=headers) as response:
                seen.append((data[:40], status, response.status, (await response.json())["error"]))
            async with session.post(f"{url}/act", json={"obs": OBS}, headers=BEARER) as response:
                assert response.status == 200 and await response.json() == {"action": 0}
        async with session.ws_connect(f"{url}/socket") as socket:
            await socket.send_json({"token": TOKEN})
            await socket.receive()
            for content, status, format in kinds:
                data = content if isinstance(content, bytes) else encoding.pack(content, format)
                if status == 413 or (format is Format.JSON and not data.isascii()):
                    continue  # these close a socket
                if format is Format.JSON:
                    await socket.send_str(data.decode())
                else:
                    await socket.send_bytes(data)
                answer = encoding.unpack((await socket.receive()).data, format)
                seen.append((data[:40], status, answer["status"], answer["error"]))
        return seen

    seen = with_server(client)
    assert len(REFUSED) + len(REFUSED_MSGPACK) > 40
    wrong = [
        row
        for row in seen
        if row[1] != row[2] or "\n" in row[3] or "; " not in row[3] or len(row[3]) > 300
    ]
    assert not wrong


def test_a_policy_is_named_where_there_are_several() -> None:
    both: Any = {"left": Counting(), "right": Counting()}
    said = answers(
        {"obs": OBS}, {"obs": OBS, "policy": "rigth"}, {"obs": OBS, "policy": "right"}, policy=both
    )
    assert "name one as policy: left, right" in said[0] and "did you mean 'right'" in said[1]
    assert said[2] == {"action": 0} and len(both["right"].batches) == 1


def test_extras_that_are_not_finite_are_null() -> None:
    class Certain(Counting):
        def __call__(self, rows: Sequence[Row]) -> list[Chosen]:
            return [Chosen(np.int32(0), None, {"value": np.float32("-inf")}) for _ in rows]

    assert answers({"obs": OBS, "extras": True}, policy=Certain()) == [{"action": 0, "value": None}]


def test_a_policy_that_remembers_needs_an_episode() -> None:
    [said] = answers({"obs": OBS}, policy=Counting(has_core=True))
    assert "remembers" in said and "send an id" in said


def test_requests_that_wait_are_answered_at_the_end() -> None:
    policy = Counting()
    policy.gate.clear()
    results: list[Any] = []

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        async def over_http() -> None:
            async with (
                aiohttp.ClientSession() as own,
                own.post(f"{url}/act", json={"obs": OBS}, headers=BEARER) as response,
            ):
                results.append(await response.json())

        async def over_socket() -> None:
            async with aiohttp.ClientSession() as own, own.ws_connect(f"{url}/socket") as socket:
                await socket.send_json({"token": TOKEN})
                await socket.receive()
                await socket.send_json({"obs": OBS})
                results.append(await socket.receive_json())
                results.append((await socket.receive()).data)

        tasks.extend([asyncio.create_task(over_http()), asyncio.create_task(over_socket())])
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_later(0.2, policy.gate.set)

    tasks: list[asyncio.Task[None]] = []
    with_server(client, policy)
    assert results.count({"action": 0}) == 2 and results[-1] == 1001


def test_a_client_that_leaves_harms_nobody() -> None:
    policy = Counting(has_core=True)

    async def client(session: aiohttp.ClientSession, url: str) -> Any:
        policy.gate.clear()
        for _ in range(20):
            gone = asyncio.create_task(
                session.post(f"{url}/act", json=step("a", first=True), headers=BEARER)
            )
            await asyncio.sleep(0.01)
            gone.cancel()
            socket = await session.ws_connect(f"{url}/socket")
            await socket.send_json({"token": TOKEN})
            await socket.receive()
            await socket.send_json(step("b", first=True))
            assert socket._conn is not None and socket._conn.transport is not None
            socket._conn.transport.abort()
        policy.gate.set()
        async with session.post(
            f"{url}/act", json=step("c", first=True), headers=BEARER
        ) as response:
            return await response.json()

    assert with_server(client, policy) == {"action": 0}
