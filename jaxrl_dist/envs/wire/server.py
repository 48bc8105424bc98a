"""A port for programs outside this package: HTTP and web sockets, by aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import WSMsgType, web

from jaxrl_dist.envs.wire.access import Access
from jaxrl_dist.envs.wire.encoding import Format, WireError, pack, unpack
from jaxrl_dist.errors import ConfigError, one_line, say

MAX_BYTES = 2**24
"""Bytes of a message, at most, unless a user says otherwise."""
FIRST_BYTES = 2**18
"""Bytes of the first message of a web socket, at most: nobody has checked its token yet."""
READ_SECONDS = 10.0
"""Seconds in which a body, or the first message of a web socket, must be there, and in which a
client must take an answer."""
HEARTBEAT_SECONDS = 60.0
"""Seconds after which a silent web socket is asked whether it is still there; it is closed unless
it answers within half of them."""
ACCESS = web.AppKey("access", Access)
_SOCKETS = web.AppKey(
    "sockets", weakref.WeakValueDictionary[asyncio.BaseProtocol, web.WebSocketResponse]
)
"""The web sockets, by their connections."""
_TRUSTED = web.AppKey("trusted", weakref.WeakSet[asyncio.BaseTransport])
"""The connections that have shown the token."""

_silent = logging.getLogger("jaxrl_dist.wire")  # aiohttp prints what malformed requests do
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


def application(access: Access, max_bytes: int = MAX_BYTES) -> web.Application:
    """Returns an application without routes, which answers only those who have ``access``.

    A handler raises ``WireError`` to refuse a request; an answer to a refused one is
    ``refusal``. The token of a web socket is checked by ``open_socket``.
    """
    app = web.Application(middlewares=[_guard], client_max_size=max_bytes)
    app[ACCESS] = access
    app[_SOCKETS] = weakref.WeakValueDictionary()
    app[_TRUSTED] = weakref.WeakSet()
    return app


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    access = request.app[ACCESS]
    origin = request.headers.get("Origin")
    response: web.StreamResponse
    try:
        access.check_origin(origin, f"{request.scheme}://{request.headers.get('Host', '')}")
        if request.method == "OPTIONS":  # what browsers ask before they send a token
            response = web.Response(status=204)
        else:
            authorization = request.headers.get("Authorization", "")
            upgrades = request.headers.get("Upgrade", "").lower() == "websocket"
            may_open_socket = upgrades and request.method == "GET"
            if not may_open_socket:
                access.check_header(authorization)
                _trust(request)
            response = await handler(request)
            if not isinstance(response, web.WebSocketResponse):  # nobody has checked the token
                access.check_header(authorization)
    except WireError as error:
        response = _refused(error)
        if error.status == 403:
            return response
    except web.HTTPException as error:
        response = _refused(WireError(_REMEDIES.get(error.status, error.reason), error.status))
    except (ConnectionError, asyncio.CancelledError):  # nobody is there to be answered
        raise
    except Exception as error:
        say(f"error: a request failed: {one_line(error)}")
        failure = WireError("the server failed; its own output says why", 500)
        socket = request.app[_SOCKETS].get(request.protocol)
        if socket is not None:
            await refuse(socket, failure, Format.JSON)
            await socket.close(code=1011)  # "internal error"
            return socket
        response = _refused(failure)
    if origin is not None and not response.prepared:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
        response.headers["Vary"] = "Origin"
    return response


def _trust(request: web.Request) -> None:
    """Lets the connection of a request stay, which has shown the token."""
    if request.transport is not None:
        request.app[_TRUSTED].add(request.transport)


_REMEDIES = {
    404: "there is nothing at this path; GET / describes what there is",
    405: "this path does not take this method; GET / describes what it takes",
    413: "the body is too large; send less, or start the server with a larger --max-megabytes",
}


def _refused(error: WireError) -> web.Response:
    response = web.json_response(refusal(error), status=error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        response.force_close()
    return response


def refusal(error: WireError) -> dict[str, Any]:
    """Returns the answer that says why a request is refused."""
    return {"error": str(error), "status": error.status}


async def body(request: web.Request) -> tuple[Any, Format]:
    """Returns the message in the body of a request, and its format.

    Raises:
      WireError: it is malformed, or its sender is too slow.
      web.HTTPException: it is too large.
    """
    format = Format.of(request.headers.get("Content-Type", "").partition(";")[0].strip().lower())
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise WireError("compressed bodies are not read; send it without Content-Encoding", 415)
    try:
        async with asyncio.timeout(READ_SECONDS):
            content = await request.read()
    except TimeoutError:
        raise WireError(
            f"the body took more than {READ_SECONDS:.0f} s; send it faster", 408
        ) from None
    return unpack(content, format), format


def answer(value: Any, format: Format) -> web.Response:
    """Returns the response that holds a value."""
    return web.Response(body=pack(value, format), content_type=format.value)


class Received(NamedTuple):
    """A message of a web socket."""

    message: Any
    format: Format


async def open_socket(
    request: web.Request, max_bytes: int = MAX_BYTES
) -> tuple[web.WebSocketResponse, Received | None]:
    """Accepts a web socket, and returns it with its first message, without the field ``token``,
    which is checked; None: it was refused or never came, and the socket is closed.

    A message larger than ``max_bytes`` closes the socket.

    Raises:
      WireError: the request is not one for a web socket.
    """
    socket = web.WebSocketResponse(
        max_msg_size=max_bytes, heartbeat=HEARTBEAT_SECONDS, compress=False, timeout=1.0
    )
    if not socket.can_prepare(request).ok:
        raise WireError("this path is for web sockets; connect with ws://", 426)
    await socket.prepare(request)
    request.app[_SOCKETS][request.protocol] = socket
    format = Format.JSON
    try:
        async with asyncio.timeout(READ_SECONDS):
            content = await _receive(socket)
        if content is None:
            return socket, None
        format = _format(content)
        if len(content) > FIRST_BYTES:
            raise WireError(f"the first message has over {FIRST_BYTES} bytes; send less in it", 413)
        message = unpack(content, format)
        token = message.pop("token", None) if isinstance(message, dict) else None
        request.app[ACCESS].check_token(token)
        _trust(request)
        return socket, Received(message, format)
    except TimeoutError:
        await refuse(socket, WireError("no first message came; send the token in it", 408), format)
    except WireError as error:
        await refuse(socket, error, format)
    await socket.close(code=1008)  # "policy violation"
    return socket, None


async def messages(socket: web.WebSocketResponse) -> AsyncIterator[Received]:
    """Yields the messages of a web socket until it is closed: texts as JSON, bytes as msgpack.

    A malformed one is refused, and the socket stays open.
    """
    while (content := await _receive(socket)) is not None:
        format = _format(content)
        try:
            message = unpack(content, format)
        except WireError as error:
            await refuse(socket, error, format)
        else:
            yield Received(message, format)


async def _receive(socket: web.WebSocketResponse) -> str | bytes | None:
    """Returns the content of the next message; None: the socket is closed."""
    message = await socket.receive()
    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        content: str | bytes = message.data
        return content
    return None


def _format(content: str | bytes) -> Format:
    return Format.JSON if isinstance(content, str) else Format.MSGPACK


async def send(socket: web.WebSocketResponse, value: Any, format: Format) -> None:
    """Sends a message; a client that does not take it in time is disconnected.

    Raises:
      ConnectionError: the client is gone.
    """
    content = pack(value, format)
    try:
        async with asyncio.timeout(READ_SECONDS):
            if format is Format.JSON:
                await socket.send_str(content.decode())
            else:
                await socket.send_bytes(content)
    except TimeoutError:
        raise ConnectionResetError("the client takes no messages") from None


async def refuse(socket: web.WebSocketResponse, error: WireError, format: Format) -> None:
    """Sends a refusal, if the client is still there."""
    with contextlib.suppress(ConnectionError):
        await send(socket, refusal(error), format)


async def _nothing() -> None:
    pass


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    host: str,
    port: int,
    *,
    drained: Callable[[], Awaitable[None]] = _nothing,
    grace: float = 5.0,
) -> AsyncIterator[int]:
    """Listens while the context is open, and yields the port. At the end it closes all
    connections.

    Args:
      port: 0: a free one.
      drained: returns when nobody waits for an answer any more.
      grace: seconds for which the end waits for this, and for requests that are still read.

    Raises:
      ConfigError: the port is in use, or the host is not this machine's.
    """

    async def close_sockets(app: web.Application) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await drained()
        for socket in list(app[_SOCKETS].values()):
            await socket.close(code=1001)  # "going away"

    app.on_shutdown.append(close_sockets)
    runner = web.AppRunner(
        app, access_log=None, logger=_silent, shutdown_timeout=grace, auto_decompress=False
    )
    await runner.setup()
    try:
        try:
            listener = await _listener(app, runner, host, port)
        except (OSError, UnicodeError, OverflowError) as error:
            raise _unusable(error, host, port) from None
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()
    finally:
        await runner.cleanup()


async def _listener(
    app: web.Application, runner: web.AppRunner, host: str, port: int
) -> asyncio.Server:
    """Returns a server that closes connections which do not show the token in time, and immediately
    those for which the process would lack files.
    """
    server = runner.server
    assert server is not None, "the runner is set up"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.get_running_loop()

    def close_unless_trusted(connection: web.RequestHandler) -> None:
        if connection.transport not in app[_TRUSTED]:
            connection.force_close()

    def connect() -> asyncio.BaseProtocol:
        connection = server()
        crowded = len(server.connections) >= files // 2
        delay = 0.0 if crowded else READ_SECONDS + 1.0  # a refusal comes first
        loop.call_later(delay, close_unless_trusted, connection)
        return connection

    loop.set_exception_handler(_LoopErrors())
    return await loop.create_server(connect, host, port, backlog=min(128, files // 8))


class _LoopErrors:
    """Says once that files lack, where asyncio repeats it without end."""

    said = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self.said:
            self.said = True
            say("warning: too many files are open for more connections; raise ulimit -n")


def _unusable(error: Exception, host: str, port: int) -> ConfigError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is in use; choose another, or 0 for a free one")
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"port {port} needs rights that you lack; choose one above 1023")
    return ConfigError(f"{host} is not an address of this machine; choose 127.0.0.1 or 0.0.0.0")
