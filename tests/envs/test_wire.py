"""The port for programs outside the package: what messages may hold, and who may connect."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import resource
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
from aiohttp import web

from jaxrl_dist.envs.wire import access, encoding, server, spaces
from jaxrl_dist.envs.wire.access import Access
from jaxrl_dist.envs.wire.encoding import Format, WireError
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete

pytestmark = pytest.mark.quick

FLOATS = Box((2,), np.dtype(np.float32), np.zeros(2), np.ones(2))
IMAGE = Box((2, 3), np.dtype(np.uint8), np.zeros((2, 3)), np.full((2, 3), 255))
MASK = Box((2,), np.dtype(bool), np.zeros(2, bool), np.ones(2, bool))
PIXELS = np.arange(6, dtype=np.uint8).reshape(2, 3)
TOKEN = "a-token-of-some-length"


# --- Values ---------------------------------------------------------------------------------------

VALUES = {
    "floats": (FLOATS, np.float32([0.1, 1e30])),
    "image": (IMAGE, PIXELS),
    "discrete": (Discrete(4), np.int32(3)),
    "from one": (Discrete(4, start=1), np.int32(4)),
    "vector": (MultiDiscrete((2, 3)), np.int32([1, 2])),
    "mask": (MASK, np.array([True, False])),
    "scalar": (Box((), np.dtype(np.float32), np.array(0), np.array(1)), np.float32(0.5)),
    "parts": (
        {"camera": IMAGE, "inner": {"speed": FLOATS}},
        {"camera": PIXELS, "inner": {"speed": np.float32([1, 2])}},
    ),
}


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("name", VALUES)
def test_values_survive_a_message(name: str, format: Format) -> None:
    space, value = VALUES[name]
    read = encoding.read(space, encoding.unpack(encoding.pack(value, format), format))
    assert jax_equal(read, value)


def jax_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(jax_equal(one[name], other[name]) for name in one)
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def test_json_takes_base64_and_tuples_take_lists() -> None:
    packed = {
        "dtype": "uint8",
        "shape": [2, 3],
        "data": base64.b64encode(PIXELS.tobytes()).decode(),
    }
    assert jax_equal(encoding.read(IMAGE, packed), PIXELS)
    space = {"0": Discrete(2), "1": FLOATS}
    read = encoding.read(space, [1, [0, 0]], ("obs",))
    assert read["0"] == 1 and read["1"].shape == (2,)


def packed(dtype: Any = "uint8", shape: Any = (2, 3), data: Any = bytes(6)) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data": data,
    }


REFUSED_VALUES = {
    "a text": (FLOATS, "12"),
    "null": (FLOATS, None),
    "texts": (FLOATS, ["1", "2"]),
    "texts of which numpy makes terabytes": (FLOATS, ["1" * 10**6] + [""] * 10**6),
    "one too many": (FLOATS, [1, 2, 3]),
    "a number": (FLOATS, 1.0),
    "of other lengths": (FLOATS, [[1], [1, 2]]),
    "too deep": (FLOATS, [[[[1]]]]),
    "flags for floats": (FLOATS, [True, False]),
    "not finite": (FLOATS, [1, float("nan")]),
    "infinite": (FLOATS, [1, float("inf")]),
    "beyond float32": (FLOATS, [1, 1e300]),
    "beyond any integer": (FLOATS, [1, 10**400]),
    "a list that holds maps": (FLOATS, [{}, {}]),
    "bytes": (FLOATS, b"12345678"),
    "an extension": (FLOATS, msgpack.ExtType(1, b"12")),
    "floats for bytes": (IMAGE, [[0.5, 1, 2], [3, 4, 5]]),
    "256": (IMAGE, [[0, 1, 2], [3, 4, 256]]),
    "below 0": (IMAGE, [[0, 1, 2], [3, 4, -1]]),
    "no action": (Discrete(3), 3),
    "negative": (Discrete(3), -1),
    "below its start": (Discrete(3, start=1), 0),
    "a float": (Discrete(3), 1.0),
    "beyond int32": (Discrete(3), 2**32),
    "no component": (MultiDiscrete((2, 3)), [1, 3]),
    "2 in a mask": (MASK, [1, 2]),
    "no part": ({"a": FLOATS}, {}),
    "another part": ({"a": Discrete(2)}, {"a": 1, "b": 2}),
    "bytes as a name": ({"a": Discrete(2)}, {"a": 1, b"b": 2}),
    "no map": ({"a": Discrete(2)}, [1]),
    "a dtype that runs code": (IMAGE, packed("object")),
    "a dtype of numpy": (IMAGE, packed("V1")),
    "a dtype that is no text": (IMAGE, packed(1)),
    "a negative size": (IMAGE, packed(shape=(-1, 6))),
    "a huge size": (IMAGE, packed(shape=(2**40, 2**40))),
    "many axes": (IMAGE, packed(shape=(1,) * 99)),
    "no shape": (IMAGE, packed(shape=None)),
    "too few bytes": (IMAGE, packed(data=bytes(5))),
    "no base64": (IMAGE, packed(data="AAAA!AAAA")),
    "no bytes": (IMAGE, packed(data=[0] * 6)),
    "one more field": (IMAGE, packed() | {"order": "F"}),
    "another shape": (IMAGE, packed(shape=(3, 2))),
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_wrong_values_are_refused_in_one_line(name: str) -> None:
    space, value = REFUSED_VALUES[name]
    with pytest.raises(WireError) as caught:
        encoding.read(space, value, path="obs")
    assert "obs" in str(caught.value) and "\n" not in str(caught.value)
    assert "; " in str(caught.value) and len(str(caught.value)) < 300


REFUSED_MESSAGES = {
    "nothing": (b"", Format.JSON),
    "half": (b'{"obs": [1,', Format.JSON),
    "two": (b"{} {}", Format.JSON),
    "NaN": (b'{"obs": NaN}', Format.JSON),
    "no UTF-8": (b'{"obs": "\xff"}', Format.JSON),
    "thousands of digits": (b"1" * 10_000, Format.JSON),
    "nested": (b"[" * 100_000, Format.JSON),
    "no msgpack": (b"\xc1", Format.MSGPACK),
    "empty msgpack": (b"", Format.MSGPACK),
    "half of msgpack": (b"\x82\xa3obs", Format.MSGPACK),
    "a huge list": (b"\xdd\xff\xff\xff\xff", Format.MSGPACK),
    "a huge text": (b"\xdb\xff\xff\xff\xff", Format.MSGPACK),
    "nested msgpack": (b"\x91" * 100_000, Format.MSGPACK),
    "a list as a name": (b"\x81\x90\x01", Format.MSGPACK),
    "more msgpack": (b"\x80\x80", Format.MSGPACK),
    "no UTF-8 in msgpack": (b"\x81\xa1\xff\x01", Format.MSGPACK),
}


@pytest.mark.parametrize("name", REFUSED_MESSAGES)
def test_malformed_messages_are_refused_in_one_line(name: str) -> None:
    content, format = REFUSED_MESSAGES[name]
    with pytest.raises(WireError) as caught:
        encoding.unpack(content, format)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_fields_name_what_is_wrong() -> None:
    kinds: dict[str, tuple[type, ...]] = {"obs": (), "first": (bool,), "seed": (int,)}
    assert encoding.fields({"obs": [1], "first": True}, kinds) == {"obs": [1], "first": True}
    with pytest.raises(WireError, match=r"no field 'frist' \(did you mean 'first'\?\)"):
        encoding.fields({"frist": True}, kinds)
    with pytest.raises(WireError, match="first is an integer; send true or false"):
        encoding.fields({"first": 1}, kinds)
    with pytest.raises(WireError, match="seed is true or false; send an integer"):
        encoding.fields({"seed": True}, kinds)
    for message in ([], 1, None, "obs", {b"obs": 1}, {1: 2}):
        with pytest.raises(WireError):
            encoding.fields(message, kinds)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint64"])
def test_bounds_of_integers_are_those_of_their_dtype(dtype: str) -> None:
    limits = np.iinfo(dtype)
    box: dict[str, Any] = {"shape": [2], "dtype": dtype}
    whole = spaces.space_from_json({**box, "low": "-inf", "high": "inf"})
    assert isinstance(whole, Box)
    assert (whole.low == limits.min).all() and (whole.high == limits.max).all()
    again = spaces.space_from_json(spaces.space_to_json(whole))
    assert isinstance(again, Box) and (again.high == limits.max).all()
    for bounds in (
        {"low": 0, "high": 2.0**65},
        {"low": 0.5, "high": 1},
        {"low": 0, "high": [1, 1e30]},
    ):
        with pytest.raises(ValueError, match="bounds"):
            spaces.space_from_json({**box, **bounds})


# --- Access ---------------------------------------------------------------------------------------


def test_a_token_is_made_written_and_read(tmp_path: Path) -> None:
    one = access.find_token(None)
    assert one != access.find_token(None) and len(one) >= 32
    file = tmp_path / "token"
    token = access.find_token(str(file))
    assert file.read_text() == f"{token}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert access.find_token(str(file)) == token


def test_a_token_that_others_can_read_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    token = access.find_token(str(file))
    assert access.find_token(str(file)) == token and not capsys.readouterr().err
    file.chmod(0o644)
    assert access.find_token(str(file)) == token
    warning = capsys.readouterr().err
    assert f"chmod 600 {file}" in warning and token not in warning


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"two words of a token", b"\xff" * 20, b"x" * 5000]
)
def test_a_file_without_a_token_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="does not hold a token"):
        access.find_token(str(tmp_path / "token"))


def test_a_token_has_a_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none" / "token", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="name another"):
            access.find_token(str(path))


def test_origins_are_checked() -> None:
    access.check_origins(("https://example.org", "http://localhost:8000", "null"))
    for origin in ("*", "example.org", "https://example.org/", "https://*.example.org", ""):
        with pytest.raises(ConfigError, match="origin of a page"):
            access.check_origins((origin,))


# --- The port -------------------------------------------------------------------------------------


async def echo(request: web.Request) -> web.Response:
    message, format = await server.body(request)
    if message == "fail":
        raise RuntimeError("a fault\nof two lines")
    return server.answer(message, format)


answered: list[str] = []
"""The methods of the requests that reached a handler."""


async def describe(request: web.Request) -> web.Response:
    answered.append(request.method)
    return server.answer("a secret", Format.JSON)


async def echoes(request: web.Request) -> web.WebSocketResponse:
    socket, first = await server.open_socket(request, max_bytes=1000)
    if first is not None:
        await server.send(socket, *first)
        async for message, format in server.messages(socket):
            if message == "fail":
                raise RuntimeError("a fault")
            await server.send(socket, message, format)
    return socket


Client = Callable[[aiohttp.ClientSession, str], Awaitable[Any]]


def with_port(client: Client, *, origins: tuple[str, ...] = ()) -> Any:
    """Returns what a client returns, which has a session and the address of a port."""

    async def run() -> Any:
        app = server.application(Access(TOKEN, origins), max_bytes=1000)
        app.router.add_post("/echo", echo)
        app.router.add_get("/socket", echoes)
        app.router.add_get("/about", describe)
        app.router.add_post("/about", describe)
        async with (
            server.listening(app, "127.0.0.1", 0, grace=0.1) as port,
            aiohttp.ClientSession() as session,
        ):
            return await asyncio.wait_for(client(session, f"http://127.0.0.1:{port}"), 20)

    return asyncio.run(run())


BEARER = {"Authorization": f"Bearer {TOKEN}"}
REFUSED_REQUESTS: dict[str, tuple[dict[str, Any], int]] = {
    "no token": ({"headers": {}}, 401),
    "a wrong token": ({"headers": {"Authorization": f"Bearer {TOKEN}x"}}, 401),
    "half a token": ({"headers": {"Authorization": f"Bearer {TOKEN[:-1]}"}}, 401),
    "no letters": ({"headers": {"Authorization": "Bearer \udcff\u00e9"}}, 401),
    "another scheme": ({"headers": {"Authorization": f"Basic {TOKEN}"}}, 401),
    "another page": ({"headers": {**BEARER, "Origin": "https://example.org"}}, 403),
    "another path": ({"path": "/etc/passwd"}, 404),
    "another method": ({"method": "PUT"}, 405),
    "too much": ({"data": b"1" * 1001}, 413),
    "much in pieces": ({"data": "pieces"}, 413),
    "another type": ({"headers": {**BEARER, "Content-Type": "text/xml"}}, 415),
    "compressed": ({"headers": {**BEARER, "Content-Encoding": "gzip"}}, 415),
    "no socket": ({"method": "GET", "path": "/socket"}, 426),
    "malformed": ({"data": b"{"}, 400),
    "a fault of the server": ({"data": b'"fail"'}, 500),
}


async def pieces() -> Any:
    for _ in range(11):
        yield b"1" * 100


@pytest.mark.parametrize("name", REFUSED_REQUESTS)
def test_a_request_is_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    request, status = REFUSED_REQUESTS[name]
    sent = {"method": "POST", "path": "/echo", "data": b"{}", "headers": BEARER, **request}
    if sent["data"] == "pieces":
        sent["data"] = pieces()

    async def client(session: aiohttp.ClientSession, url: str) -> tuple[int, Any, str]:
        path = sent.pop("path")
        async with session.request(sent.pop("method"), f"{url}{path}", **sent) as response:
            status = response.status
            refusal = await response.json()
        async with session.post(f"{url}/echo", data=b"1", headers=BEARER) as response:
            return status, refusal, await response.text()

    answered, content, after = with_port(client)
    assert (answered, after) == (status, "1")
    assert content["status"] == status and "\n" not in content["error"]
    assert TOKEN not in content["error"]
    assert ("a fault of two lines" in capsys.readouterr().err) is (status == 500)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_headers_of_a_socket_replace_no_token(method: str) -> None:
    answered.clear()
    handshake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }

    async def client(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
        async with session.request(method, f"{url}/about", headers=handshake) as response:
            return response.status, await response.text()

    status, text = with_port(client)
    assert status == 401 and "secret" not in text and "POST" not in answered


def test_a_message_comes_back_in_its_format() -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> list[bytes]:
        answers = []
        for format in Format:
            headers = {**BEARER, "Content-Type": format.value}
            data = encoding.pack({"obs": [1, 2]}, format)
            async with session.post(f"{url}/echo", data=data, headers=headers) as response:
                assert response.content_type == format.value
                answers.append(await response.read())
        return answers

    assert with_port(client) == [b'{"obs": [1, 2]}', msgpack.packb({"obs": [1, 2]})]


def test_a_slow_body_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.1)

    async def slowly() -> Any:
        yield b"1"
        await asyncio.sleep(1)
        yield b"2"

    async def client(session: aiohttp.ClientSession, url: str) -> int:
        async with session.post(f"{url}/echo", data=slowly(), headers=BEARER) as response:
            return response.status

    assert with_port(client) == 408


def test_pages_from_allowed_origins_may_connect() -> None:
    page = "https://example.org"

    async def client(session: aiohttp.ClientSession, url: str) -> list[Any]:
        asked = {"Origin": page, "Access-Control-Request-Headers": "authorization"}
        seen: list[Any] = []
        async with session.options(f"{url}/echo", headers=asked) as response:
            seen.append((response.status, response.headers.get("Access-Control-Allow-Origin")))
        for headers in ({**BEARER, "Origin": page}, {"Origin": page}, {**BEARER, "Origin": url}):
            async with session.post(f"{url}/echo", data=b"1", headers=headers) as response:
                seen.append((response.status, "Access-Control-Allow-Origin" in response.headers))
        return seen

    assert with_port(client, origins=(page,)) == [
        (204, page),
        (200, True),
        (401, True),
        (200, True),
    ]
    assert [status for status, _ in with_port(client)] == [403, 403, 403, 200]


def test_garbage_on_the_port_is_survived(capfd: pytest.CaptureFixture[str]) -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> int:
        port = int(url.rpartition(":")[2])
        for garbage in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"A" * 50_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.write_eof()
            await reader.read()
            writer.close()
        async with session.post(f"{url}/echo", data=b"1", headers=BEARER) as response:
            return response.status

    assert with_port(client) == 200
    assert capfd.readouterr().err == ""


async def say_to(socket: aiohttp.ClientWebSocketResponse, *messages: str | bytes) -> list[Any]:
    """The answers to some messages, and the code of the close at their end, if there is one."""
    answers: list[Any] = []
    for message in messages:
        if isinstance(message, str):
            await socket.send_str(message)
        else:
            await socket.send_bytes(message)
        answer = await socket.receive()
        answers.append(answer.data)
        if answer.type is aiohttp.WSMsgType.CLOSE:
            return answers
    return answers


FIRST = json.dumps({"token": TOKEN, "game": 1})


def over_socket(*messages: str | bytes) -> Any:
    """What a web socket answers."""

    async def client(session: aiohttp.ClientSession, url: str) -> list[Any]:
        async with session.ws_connect(f"{url}/socket") as socket:
            return await say_to(socket, *messages)

    return with_port(client)


def test_a_socket_answers_in_the_format_of_its_messages() -> None:
    packed_message = msgpack.packb({"x": [1, 2.5]})
    answers = over_socket(FIRST, '{"x": 1}', packed_message, "{", '{"y": 2}')
    assert answers[:3] == ['{"game": 1}', '{"x": 1}', packed_message]
    assert "not json" in answers[3] and answers[4] == '{"y": 2}'
    first = msgpack.packb({"token": TOKEN})
    assert over_socket(first) == [msgpack.packb({})]


@pytest.mark.parametrize(
    "first",
    ["{}", "[]", "1", "{", '{"token": "no"}', '{"token": 1}', '{"token": "\\ud800"}', b"\xc1"],
)
def test_a_socket_without_the_token_is_closed(first: str | bytes) -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> Any:
        async with session.ws_connect(f"{url}/socket") as socket:
            answers = await say_to(socket, first)
            return answers[0], (await socket.receive()).data

    refusal, code = with_port(client)
    if isinstance(first, bytes):
        refusal = json.dumps(msgpack.unpackb(refusal))
    assert json.loads(refusal)["status"] in (400, 401) and code == 1008


def test_a_socket_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.1)

    async def client(session: aiohttp.ClientSession, url: str) -> Any:
        async with session.ws_connect(f"{url}/socket") as socket:
            return json.loads((await socket.receive()).data)["status"]

    assert with_port(client) == 408


def test_a_large_message_closes_a_socket() -> None:
    assert over_socket(FIRST, "1" * 1001)[1] == 1009


def test_a_first_message_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_BYTES", 100)
    first = json.dumps({"token": TOKEN, "game": "x" * 100})
    assert json.loads(over_socket(first)[0])["status"] == 413
    assert over_socket(FIRST, first)[1] == first


def test_a_fault_closes_a_socket(capsys: pytest.CaptureFixture[str]) -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> Any:
        async with session.ws_connect(f"{url}/socket") as socket:
            answers = await say_to(socket, FIRST, '"fail"')
            return json.loads(answers[1])["status"], (await socket.receive()).data

    assert with_port(client) == (500, 1011)
    assert "a fault" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [b"", b"POST /echo HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", -0.8)

    async def client(session: aiohttp.ClientSession, url: str) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        async with session.get(f"{url}/about", headers=BEARER) as response:
            return response.status

    assert with_port(client) == 200


def test_surplus_connections_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (16, 16))

    async def client(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
        async with session.get(f"{url}/about", headers=BEARER) as response:
            await response.read()
        port = int(url.rpartition(":")[2])
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        ends = await asyncio.gather(
            *(asyncio.wait_for(reader.read(), 1) for reader, _ in opened), return_exceptions=True
        )
        for _, writer in opened:
            writer.close()
        async with session.get(f"{url}/about", headers=BEARER) as response:
            return ends.count(b""), response.status

    closed, status = with_port(client)
    assert 4 <= closed <= 6 and status == 200


def test_a_lack_of_files_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    handle = server._LoopErrors()
    for _ in range(3):
        handle(None, {"exception": OSError(errno.EMFILE, "too many open files")})  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("ulimit") == 1


def test_a_page_from_elsewhere_gets_no_socket() -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> int:
        try:
            async with session.ws_connect(f"{url}/socket", origin="https://example.org"):
                return 101
        except aiohttp.WSServerHandshakeError as error:
            return error.status

    assert with_port(client) == 403
    assert with_port(client, origins=("https://example.org",)) == 101


def test_a_used_port_is_refused() -> None:
    async def client(session: aiohttp.ClientSession, url: str) -> None:
        port = int(url.rpartition(":")[2])
        async with server.listening(server.application(Access(TOKEN)), "127.0.0.1", port):
            pass

    with pytest.raises(ConfigError, match="in use; choose another"):
        with_port(client)
    for host in ("10.255.255.1", "nowhere.invalid", "a" * 300):

        async def elsewhere(session: aiohttp.ClientSession, url: str, host: str = host) -> None:
            async with server.listening(server.application(Access(TOKEN)), host, 0):
                pass

        with pytest.raises(ConfigError, match="is not an address of this machine"):
            with_port(elsewhere)
