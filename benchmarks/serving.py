"""How many actions per second does `jaxrl-dist serve` answer over loopback?

    python benchmarks/serving.py RUN_DIR --clients 8 --seconds 10

Each client is a process that sends the next request when it has the last answer. The observations
are zeros of the run's space. Prints a line of JSON for HTTP and one for web sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from typing import Any

import aiohttp
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.envs.wire.encoding import Format, pack
from jaxrl_dist.envs.wire.spaces import space_from_json


async def over_http(url: str, token: str, request: bytes, until: float) -> list[float]:
    """Returns the seconds of each request over one connection."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": Format.MSGPACK.value}
    taken = []
    async with aiohttp.ClientSession() as session:
        while time.time() < until:
            began = time.perf_counter()
            async with session.post(f"{url}/act", data=request, headers=headers) as response:
                response.raise_for_status()
                await response.read()
            taken.append(time.perf_counter() - began)
    return taken


async def over_socket(url: str, token: str, request: bytes, until: float) -> list[float]:
    """Returns the seconds of each request over one web socket."""
    taken = []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/socket") as socket:
        await socket.send_json({"token": token})
        await socket.receive()
        while time.time() < until:
            began = time.perf_counter()
            await socket.send_bytes(request)
            await socket.receive()
            taken.append(time.perf_counter() - began)
    return taken


KINDS = {"http": over_http, "socket": over_socket}


def client(kind: str, url: str, token: str, request: bytes, start: float, seconds: float) -> Any:
    """Asks from ``start`` on, as ``time.time`` counts."""
    time.sleep(max(0.0, start - time.time()))
    return asyncio.run(KINDS[kind](url, token, request, start + seconds))


async def described(url: str, token: str) -> Any:
    """Returns what the server says of itself."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"Authorization": f"Bearer {token}"}) as response,
    ):
        return await response.json()


async def begin(url: str, token: str, requests: list[dict[str, Any]]) -> None:
    """Begins the episodes of these requests."""
    content = pack([request | {"first": True} for request in requests], Format.MSGPACK)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": Format.MSGPACK.value}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/act", data=content, headers=headers) as response,
    ):
        response.raise_for_status()


def blank(part: spaces.Part) -> np.ndarray:
    """Returns an observation of zeros, or of the least values of what begins elsewhere."""
    if isinstance(part, spaces.Box):
        return np.zeros(part.shape, part.dtype)
    return spaces.native(part, np.zeros((1, *part.shape), part.dtype))[0]


def measure(first: dict[str, Any], clients: int, seconds: float) -> None:
    """Prints the rates of a server, which its first line describes."""
    url = first["url"]
    token = first["token"]
    about = asyncio.run(described(url, token))
    name, policy = next(iter(about["policies"].items()))
    space = space_from_json(policy["observation"])
    parts = {path: blank(part) for path, part in spaces.leaves(space).items()}
    request = {"obs": spaces.nested(space, parts)}
    if name:
        request["policy"] = name
    requests = [request | {"episode": f"episode {number}"} for number in range(clients)]
    asyncio.run(begin(url, token, requests))
    with multiprocessing.get_context("spawn").Pool(clients) as pool:

        def taken_by(kind: str, seconds: float) -> list[list[float]]:
            start = time.time() + 1
            jobs = [
                (kind, url, token, pack(request, Format.MSGPACK), start, seconds)
                for request in requests
            ]
            return pool.starmap(client, jobs, chunksize=1)

        for kind in KINDS:
            while not all(taken_by(kind, 1.0)):
                pass  # some processes still import
            taken = np.concatenate(taken_by(kind, seconds))
            rates = {
                "clients": clients,
                "over": kind,
                "actions_per_second": round(len(taken) / seconds, 1),
                "median_ms": round(1000 * float(np.median(taken)), 2),
                "p99_ms": round(1000 * float(np.quantile(taken, 0.99)), 2),
            }
            print(json.dumps(rates), flush=True)


def main() -> None:
    """Starts a server, measures it and ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "jaxrl_dist.cli", "serve", options.run_dir]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        if not first:
            raise SystemExit(server.wait())
        measure(json.loads(first), options.clients, options.seconds)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


if __name__ == "__main__":
    main()
