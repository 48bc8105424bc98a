"""Clients that bring their games to the trainer: what is valid, what is lost, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.config.envs import module_of_user
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers
from jaxrl_dist.envs.host import remote
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Discrete
from jaxrl_dist.training import setup

TOKEN = "a-token-of-some-length"
SECONDS = 20.0
SPACES: dict[str, Any] = {
    "observation": {"shape": [2], "dtype": "float32", "low": "-inf", "high": "inf"},
    "action": {"n": 3, "start": 0},
}
STORED = json.dumps({**SPACES, "mask": None, "both_sides": False, "tuples": []})
"""As a run stores them."""


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    monkeypatch.setenv(remote.TOKEN_FILE, str(file))
    yield
    left = list(remote._ports)
    for other in left:
        remote._close(other)
    assert not left, "a port is still open"


@pytest.fixture
def address() -> str:
    """A free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Client:
    """A client of the test's own thread."""

    def __init__(self, address: str, origin: str | None = None, **first: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._session = self._run(self._open())
        headers = {"Origin": origin} if origin else {}
        try:
            connect = self._session.ws_connect(f"http://{address}/", headers=headers)
            self._socket = self._run(connect)
        except aiohttp.ClientError:
            self._run(self._session.close())
            self._loop.close()
            raise
        self.send(**{"token": TOKEN, **SPACES, **first})

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def _run(self, what: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(what, SECONDS))

    def ready(self) -> Client:
        answer = self.receive()
        if answer != {"ready": True}:
            self.close()
            raise ConnectionError(answer)
        return self

    def send(self, **message: Any) -> None:
        self._run(self._socket.send_str(json.dumps(message)))

    def send_text(self, text: str | bytes) -> None:
        if isinstance(text, str):
            self._run(self._socket.send_str(text))
        else:
            self._run(self._socket.send_bytes(text))

    def receive(self) -> Any:
        """The next answer; None: the connection is closed."""
        received = self._run(self._socket.receive())
        if received.type is aiohttp.WSMsgType.BINARY:
            return msgpack.unpackb(received.data)
        return received.json() if received.type is aiohttp.WSMsgType.TEXT else None

    def begin(self, episode: str, *obs: float) -> None:
        self.send(episode=episode, step=0, obs=obs)

    def step(self, episode: str, step: int, *obs: float, **more: Any) -> None:
        self.send(episode=episode, step=step, obs=obs, **{"reward": 1.0, **more})

    def kill(self) -> None:
        """Ends as a killed process does: without a word."""
        self._socket._writer.transport.abort()
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._socket.close())
            self._run(self._session.close())
            self._loop.close()


def source(
    address: str, wrappers: Wrappers = UNWRAPPED, timeout: float = SECONDS, **options: Any
) -> EnvSource:
    texts = {"spaces": STORED, **{name: str(x) for name, x in options.items()}}
    return find(f"remote:{address}", texts, timeout=timeout, wrappers=wrappers)


class Game:
    """Environments whose calls run in another thread, while the test plays the clients."""

    def __init__(self, source: EnvSource, num_envs: int) -> None:
        self.env = source.host(num_envs, 0)
        self.size = num_envs
        self.dtype = getattr(source.spec.action, "dtype", None)
        self._thread = ThreadPoolExecutor(1)

    def reset(self) -> Any:
        return self._thread.submit(self.env.reset)

    def step(self, *action: int) -> Any:
        actions = np.array(action or [0] * self.size, np.int32)
        return self._thread.submit(self.env.step, actions)


@contextlib.contextmanager
def played(source: EnvSource, num_envs: int) -> Iterator[Game]:
    game = Game(source, num_envs)
    try:
        yield game
    finally:
        game.env.close()
        game._thread.shutdown()


@contextlib.contextmanager
def clients(address: str, count: int = 1) -> Iterator[list[Client]]:
    connected = [Client(address).ready() for _ in range(count)]
    try:
        yield connected
    finally:
        for client in connected:
            client.close()


# --- Episodes -------------------------------------------------------------------------------------


def test_an_episode_is_played_to_its_end(address: str) -> None:
    with played(source(address), 2) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 2)
        np.testing.assert_array_equal(first.result(SECONDS), [[1, 2], [0, 0]])
        stepped = game.step(2, 1)
        assert client.receive() == {"episode": "a", "step": 0, "action": 2}
        client.step("a", 1, 3, 4)
        step, ended = stepped.result(SECONDS)
        np.testing.assert_array_equal(step.obs, [[3, 4], [0, 0]])
        assert step.valid.tolist() == [True, False] and step.reward.tolist() == [1, 0]
        assert not (step.terminated | step.truncated).any() and not ended.episodes.any()
        stepped = game.step(0, 0)
        assert client.receive()["step"] == 1
        client.step("a", 2, 5, 6, reward=2, terminated=True)
        step, ended = stepped.result(SECONDS)
        assert step.terminated.tolist() == [True, False] and not step.truncated.any()
        assert ended.return_sum.tolist() == [3, 0] and ended.length_sum.tolist() == [2, 0]
        stepped = game.step()
        client.begin("b", 7, 8)  # takes the place that is free for longer
        step, _ = stepped.result(SECONDS)
        assert not step.valid.any()
        np.testing.assert_array_equal(step.obs, [[5, 6], [7, 8]])
        stepped = game.step(1, 2)
        assert client.receive() == {"episode": "b", "step": 0, "action": 2}
        client.step("b", 1, 9, 9, truncated=True)
        step, _ = stepped.result(SECONDS)
        assert step.valid.tolist() == step.truncated.tolist() == [False, True]


def test_a_lost_episode_is_truncated_and_resumed_by_its_name(address: str) -> None:
    with played(source(address), 2) as game, clients(address, 2) as (stays, lost):
        first = game.reset()
        stays.begin("stays", 0, 0)
        first.result(SECONDS)
        lost.begin("lost", 1, 1)
        stepped = game.step(0, 0)
        assert stays.receive()["action"] == 0
        stays.step("stays", 1, 0, 1)
        stepped.result(SECONDS)
        for number in (1, 2):
            stepped = game.step(0, number)
            stays.receive()
            if number == 1 and lost.receive()["action"] == 1:
                lost.kill()
            stays.step("stays", number + 1, 0, 2)
            step, ended = stepped.result(SECONDS)
            assert step.valid.tolist() == [True, False]
            assert not (step.terminated | step.truncated).any() and not ended.episodes.any()
            np.testing.assert_array_equal(step.obs[1], [1, 1])  # its last observation
        back = Client(address).ready()
        back.begin("lost", 1, 1)  # it says again what it has said last
        assert back.receive() == {"episode": "lost", "step": 0, "action": 1}
        back.step("lost", 1, 2, 2)
        stepped = game.step(0, 0)
        stays.receive()
        stays.step("stays", 4, 0, 4)
        step, _ = stepped.result(SECONDS)
        assert step.valid.tolist() == [True, False]
        np.testing.assert_array_equal(step.obs[1], [2, 2])
        stepped = game.step(0, 2)
        assert back.receive() == {"episode": "lost", "step": 1, "action": 2}
        stays.receive()
        stays.step("stays", 5, 0, 5)
        back.step("lost", 2, 3, 3, terminated=True)
        step, ended = stepped.result(SECONDS)
        assert step.valid.all() and step.terminated.tolist() == [False, True]
        assert ended.return_sum.tolist() == [0, 2] and ended.length_sum.tolist() == [0, 2]
        back.close()


def test_the_only_client_comes_back_without_a_loss(address: str) -> None:
    with played(source(address), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 1)
        first.result(SECONDS)
        stepped = game.step(1)
        client.receive()
        client.kill()
        back = Client(address).ready()
        back.begin("a", 1, 1)
        assert back.receive()["action"] == 1
        back.step("a", 1, 2, 2)
        assert stepped.result(SECONDS)[0].valid.all()
        back.close()


def test_a_new_episode_takes_the_place_of_a_lost_one(address: str) -> None:
    with played(source(address), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("lost", 1, 1)
        first.result(SECONDS)
        stepped = game.step(1)
        client.receive()
        client.kill()
        other = Client(address).ready()
        other.begin("new", 2, 2)
        step, ended = stepped.result(SECONDS)
        assert not step.valid.any() and not ended.episodes.any()
        np.testing.assert_array_equal(step.obs, [[2, 2]])
        other.step("lost", 1, 1, 1)  # it was given up
        assert other.receive() == {"episode": "lost", "step": 1, "reset": True}
        stepped = game.step(2)
        assert other.receive() == {"episode": "new", "step": 0, "action": 2}
        other.step("new", 1, 3, 3, terminated=True)
        assert stepped.result(SECONDS)[1].return_sum.tolist() == [1]
        other.close()


def test_a_slow_client_does_not_stop_others(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with played(source(address, wait_seconds=0.05), 2) as game, clients(address, 2) as (fast, slow):
        first = game.reset()
        fast.begin("fast", 0, 0)
        first.result(SECONDS)
        slow.begin("slow", 1, 1)
        for number in range(4):
            stepped = game.step(0, 1)
            fast.receive()
            fast.step("fast", number + 1, 0, 0)
            step, _ = stepped.result(SECONDS)
            assert step.valid.tolist() == [True, False]
        assert slow.receive() == {"episode": "slow", "step": 0, "action": 1}
        slow.step("slow", 1, 2, 2, terminated=True)  # late, but its return counts
        stepped = game.step(0, 0)
        fast.receive()
        fast.step("fast", 5, 0, 0)
        step, ended = stepped.result(SECONDS)
        assert step.valid.tolist() == [True, False] and not step.terminated.any()
        assert ended.return_sum.tolist() == [0, 1]
    assert "warning: 1 of 1 terminated episodes ended later" in capsys.readouterr().err


def test_a_late_step_is_learnt_with_its_action(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = source(address, wait_seconds=0.05, log_action=True)
    with played(options, 2) as game, clients(address, 2) as (fast, slow):
        fast.begin("fast", 0, 0)
        slow.begin("slow", 1, 1)
        time.sleep(0.1)  # both are there
        game.reset().result(SECONDS)
        for number, action in enumerate([2, 1, 1]):  # the slow client gets the first one
            stepped = game.step(0, action)
            fast.receive()
            if number == 2:
                slow.step("slow", 1, 2, 2, terminated=True)
                time.sleep(0.02)
            fast.step("fast", number + 1, 0, 0)
            step, _ = stepped.result(SECONDS)
            assert step.valid.tolist() == [True, number == 2]
            np.testing.assert_array_equal(step.obs[1], [2, 2] if number == 2 else [1, 1])
        assert step.action.tolist() == [0, 2] and step.reward.tolist() == [1, 1]
        assert step.terminated.tolist() == [False, True]
        assert slow.receive()["action"] == 2
    assert "warning" not in capsys.readouterr().err


def test_a_place_is_given_up_after_the_time_limit(address: str) -> None:
    options = source(address, wait_seconds=0.05, timeout=0.5)
    with played(options, 2) as game, clients(address, 2) as (fast, slow):
        first = game.reset()
        fast.begin("fast", 0, 0)
        first.result(SECONDS)
        slow.begin("slow", 1, 1)
        for number in range(8):
            time.sleep(0.1)
            stepped = game.step(0, 1)
            fast.receive()
            fast.step("fast", number + 1, 0, 0)
            stepped.result(SECONDS)
        assert "action" in slow.receive()
        assert slow.receive() == {"episode": "slow", "step": 0, "reset": True}


def test_time_limits_tell_the_client_to_begin_again(address: str) -> None:
    with played(source(address, Wrappers(time_limit=2)), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 1)
        first.result(SECONDS)
        for number in (1, 2):
            stepped = game.step()
            assert client.receive()["action"] == 0
            client.step("a", number, 1, 1)
            step, ended = stepped.result(SECONDS)
            assert step.truncated.tolist() == [number == 2] and not step.terminated.any()
        assert ended.length_sum.tolist() == [2]
        assert client.receive() == {"episode": "a", "step": 2, "reset": True}


def test_more_episodes_than_places_wait(address: str) -> None:
    with played(source(address), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 1)
        client.begin("b", 2, 2)
        first.result(SECONDS)
        stepped = game.step()
        assert client.receive()["episode"] == "a"
        client.step("a", 1, 1, 1, terminated=True)
        stepped.result(SECONDS)
        stepped = game.step()
        assert not stepped.result(SECONDS)[0].valid.any()
        stepped = game.step()
        assert client.receive()["episode"] == "b"
        client.step("b", 1, 1, 1)
        assert stepped.result(SECONDS)[0].valid.all()


def test_nobody_who_plays_is_an_error_in_time(address: str) -> None:
    with played(source(address, timeout=0.3), 1) as game, clients(address) as (client,):
        with pytest.raises(TimeoutError, match=r"no client has played.*--env-timeout"):
            game.reset().result(SECONDS)
        client.begin("a", 1, 1)
        game.reset().result(SECONDS)
        with pytest.raises(TimeoutError, match=f"remote:{address}"):
            game.step().result(SECONDS)


def test_metrics_of_the_info_are_counted(address: str) -> None:
    wrappers = Wrappers(info_metrics="score,fuel:sum")
    with played(source(address, wrappers), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 1)
        first.result(SECONDS)
        for number in (1, 2):
            stepped = game.step()
            client.receive()
            info = {"score": number, "fuel": 2, "name": "x"}
            client.step("a", number, 1, 1, info=info, terminated=number == 2)
            _, ended = stepped.result(SECONDS)
        assert {name: x[0].tolist() for name, x in ended.info.items()} == {
            "score": [2],
            "fuel:sum": [4],
        }


# --- Refusals -------------------------------------------------------------------------------------

DEEP = "[" * 900 + "]" * 900
BAD: dict[str, Any] = {
    "no JSON": "{",
    "no map": "[1]",
    "binary rubbish": b"\xc1",
    "too deep": f'{{"episode": "x", "step": 0, "obs": {DEEP}}}',
    "no episode": {"step": 1, "obs": [1, 1], "reward": 0},
    "no step": {"episode": "a", "obs": [1, 1], "reward": 0},
    "unknown field": {"episode": "a", "step": 1, "observation": [1, 1]},
    "step as text": {"episode": "a", "step": "1", "obs": [1, 1], "reward": 0},
    "later step": {"episode": "a", "step": 2, "obs": [1, 1], "reward": 0},
    "negative step": {"episode": "a", "step": -1, "obs": [1, 1], "reward": 0},
    "later than any step": {"episode": "b", "step": 10**40, "obs": [1, 1], "reward": 0},
    "half a pair": '{"episode": "\\ud800", "step": 5, "obs": [1, 1], "reward": 0}',
    "the name of another": {"episode": "a", "step": 0, "obs": [9, 9]},
    "long name": {"episode": "a" * 1000, "step": 0, "obs": [1, 1]},
    "no observation": {"episode": "a", "step": 1, "reward": 0},
    "wrong shape": {"episode": "a", "step": 1, "obs": [1], "reward": 0},
    "ragged": {"episode": "a", "step": 1, "obs": [[1], 2], "reward": 0},
    "texts": {"episode": "a", "step": 1, "obs": ["1", "2"], "reward": 0},
    "parts": {"episode": "a", "step": 1, "obs": {"x": 1}, "reward": 0},
    "NaN": '{"episode": "a", "step": 1, "obs": [1, NaN], "reward": 0}',
    "infinity": '{"episode": "a", "step": 1, "obs": [1, 1e999], "reward": 0}',
    "no reward": {"episode": "a", "step": 1, "obs": [1, 1]},
    "reward as text": {"episode": "a", "step": 1, "obs": [1, 1], "reward": "1"},
    "reward as flag": {"episode": "a", "step": 1, "obs": [1, 1], "reward": True},
    "huge reward": {"episode": "a", "step": 1, "obs": [1, 1], "reward": 10**400},
    "infinite reward": '{"episode": "a", "step": 1, "obs": [1, 1], "reward": 1e999}',
    "flag as number": {
        "episode": "a",
        "step": 1,
        "obs": [1, 1],
        "reward": 0,
        "truncated": 1,
    },
    "info as list": {"episode": "a", "step": 1, "obs": [1, 1], "reward": 0, "info": []},
    "huge info": {
        "episode": "a",
        "step": 1,
        "obs": [1, 1],
        "reward": 0,
        "info": {"x": 10**400},
    },
    "logged action": {
        "episode": "a",
        "step": 1,
        "obs": [1, 1],
        "reward": 0,
        "log_action": 1,
    },
}


def test_bad_messages_are_refused_and_training_continues(address: str) -> None:
    with played(source(address), 1) as game, clients(address) as (client,):
        first = game.reset()
        client.begin("a", 1, 1)
        first.result(SECONDS)
        stepped = game.step()
        client.receive()
        for kind, message in BAD.items():
            text = message if isinstance(message, str | bytes) else json.dumps(message)
            client.send_text(text)
            refusal = client.receive()
            assert refusal is not None and set(refusal) == {"error", "status"}, kind
            assert "\n" not in refusal["error"] and len(refusal["error"]) < 400, kind
        client.step("a", 1, 2, 2)
        assert stepped.result(SECONDS)[0].valid.all()


CHOICES = {"n": 3, "start": 0}
BOUNDED = {"shape": [1], "dtype": "float32", "low": -1, "high": 1}
MASKED = {
    "parts": {
        "action_mask": {"shape": [3], "dtype": "bool", "low": 0, "high": 1},
        "x": {**BOUNDED, "low": "-inf", "high": "inf"},
    }
}


@pytest.mark.parametrize(
    "observation, action, obs, takes, refused, names",
    [
        (SPACES["observation"], BOUNDED, [1, 1], [0.5], [50.0], "outside of the bounds"),
        (MASKED, CHOICES, {"action_mask": [1, 0, 1], "x": [0]}, 2, 1, "illegal by action_mask"),
    ],
)
def test_actions_that_nobody_can_take_are_refused(
    observation: Any, action: Any, obs: Any, takes: Any, refused: Any, names: str, address: str
) -> None:
    mask = "action_mask" if "parts" in observation else None
    spaces = {"observation": observation, "action": action}
    stored = json.dumps({**spaces, "mask": mask, "both_sides": False, "tuples": []})
    with played(source(address, spaces=stored, log_action=True), 1) as game:
        client = Client(address, **spaces).ready()
        first = game.reset()
        client.send(episode="a", step=0, obs=obs)
        first.result(SECONDS)
        stepped = game._thread.submit(game.env.step, np.zeros((1, *np.shape(takes)), game.dtype))
        client.receive()
        said = {"episode": "a", "step": 1, "obs": obs, "reward": 0}
        client.send(**said, log_action=refused)
        assert names in client.receive()["error"]
        client.send(**said, log_action=takes)
        assert stepped.result(SECONDS)[0].action.tolist() == [takes]
        client.close()


def test_an_oversized_message_ends_its_connection_only(address: str) -> None:
    with played(source(address), 1) as game, clients(address, 2) as (client, large):
        first = game.reset()
        client.begin("a", 1, 1)
        first.result(SECONDS)
        stepped = game.step()
        client.receive()
        with contextlib.suppress(ConnectionError):
            large.send_text("[" + "1," * 2**24)
        assert large.receive() is None
        client.step("a", 1, 2, 2)
        assert stepped.result(SECONDS)[0].valid.all()


PARTS: Any = {"n": 2, "start": 0}
for _ in range(400):
    PARTS = {"parts": {"a": PARTS}}


@pytest.mark.parametrize(
    "first, names",
    [
        ({"token": "another-token-than-it"}, "token"),
        ({"token": None}, "token"),
        ({"action": {"n": 4, "start": 0}}, r"Discrete\(3\).*Discrete\(4\)"),
        ({"observation": {**SPACES["observation"], "low": 0}}, "bounds"),
        ({"observation": {**SPACES["observation"], "dtype": "float64"}}, "float32"),
        ({"observation": {"shape": [2]}}, "spaces"),
        ({"observation": {"parts": {}}}, "spaces"),
        ({"action": []}, "action"),
        ({"observation": {"shape": [2], "dtype": "uint8", "low": 0, "high": 256}}, "spaces"),
        ({"observation": {**SPACES["observation"], "shape": [2**13, 2**12]}}, "spaces"),
        ({"observation": PARTS}, "parts inside each other"),
        ({"extra": 1}, "extra"),
    ],
)
def test_other_clients_are_refused_in_one_line(
    address: str, first: dict[str, Any], names: str
) -> None:
    with played(source(address), 1):
        client = Client(address, **first)
        refusal = client.receive()["error"]
        assert "\n" not in refusal
        assert client.receive() is None
        client.close()
        assert re.search(names, refusal), refusal


def test_pages_from_elsewhere_are_refused_unless_allowed(address: str) -> None:
    allowed = "http://localhost:8000"
    with played(source(address, allow_origin=f"{allowed},null"), 1):
        for origin in (allowed, "null"):
            client = Client(address, origin).ready()
            client.close()
        with pytest.raises(aiohttp.WSServerHandshakeError):
            Client(address, "http://example.org")
    with pytest.raises(ConfigError, match="allow_origin is not the origin"):
        source(address, allow_origin="example.org").host(1, 0)


# --- Finding, storing, resuming -------------------------------------------------------------------


def test_the_first_client_says_the_spaces(address: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(find, f"remote:{address}", {}, timeout=SECONDS)
        client = connected(address)
        client.begin("a", 1, 1)  # before there are environments
        found = waiting.result(SECONDS)
        assert found.spec.action == Discrete(3) and found.spec.observation.shape == (2,)
        assert json.loads(found.options["spaces"]) == json.loads(STORED)
        with played(found, 1) as game:
            np.testing.assert_array_equal(game.reset().result(SECONDS), [[1, 1]])
    client.close()


def connected(address: str) -> Client:
    """A client of a trainer that may not listen yet."""
    for _ in range(100):
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            return Client(address).ready()
        threading.Event().wait(0.1)
    raise AssertionError("nobody listens")


def test_a_stored_run_needs_no_client_to_know_its_spaces(address: str) -> None:
    found = source(address)
    assert found.spec.action == Discrete(3) and not remote._ports
    with pytest.raises(ConfigError, match="spaces"):
        find(f"remote:{address}", {"spaces": "{}"})


def test_no_client_in_time_is_said_in_one_line(address: str) -> None:
    with pytest.raises(TimeoutError, match=rf"remote:{address} within 0.2 s \(--env-timeout\)"):
        find(f"remote:{address}", {}, timeout=0.2)


def test_port_0_is_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with played(source("127.0.0.1:0"), 1):
        line = capsys.readouterr().err
        found = re.fullmatch(r".* ws://(127\.0\.0\.1:\d+) with the token in .*\n", line)
        assert found
        Client(found[1]).ready().close()


def test_a_token_of_a_bad_file_is_refused(address: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match=f"{remote.TOKEN_FILE}: .* token"):
        source(address).host(1, 0)


def test_clients_cannot_be_drawn(address: str) -> None:
    with pytest.raises(ConfigError, match=f"remote:{address} cannot be drawn"):
        source(address).host(1, 0, drawn=True)


def test_a_port_in_use_is_refused(address: str) -> None:
    host, port = address.split(":")
    taken = socket.create_server((host, int(port)))
    with taken, pytest.raises(ConfigError, match=f"port {port}"):
        source(address).host(1, 0)


@pytest.mark.parametrize(
    "name", ["remote:8800", "remote:localhost:x", "remote:a:b:1", "remote:h:65536"]
)
def test_an_address_names_host_and_port(name: str) -> None:
    with pytest.raises(ConfigError, match=r"remote:127\.0\.0\.1:8800"):
        find(name)


def test_no_file_chooses_a_port_for_other_machines() -> None:
    assert module_of_user("remote:127.0.0.1:8800") is None
    assert module_of_user("remote:0.0.0.0:8800") == "remote"


def test_nothing_of_aiohttp_is_imported_unless_it_listens() -> None:
    code = "import sys, jaxrl_dist.envs.source; print(*{'aiohttp', 'msgpack'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr


# --- Runs -----------------------------------------------------------------------------------------


class Players:
    """Threads whose clients play episodes of five steps until the context ends."""

    def __init__(self, address: str, kills: int = 0, **more: Any) -> None:
        self.kills = kills
        self.killed = self.played = 0
        self._address = address
        self._more = more
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> Players:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._over.is_set():
            try:
                client = Client(self._address).ready()
            except (aiohttp.ClientError, ConnectionError):
                time.sleep(0.05)
                continue
            try:
                self._episodes(client)
            except (aiohttp.ClientError, ConnectionError):
                continue  # the run has ended
            finally:
                client.close()

    def _episodes(self, client: Client) -> None:
        """Plays until the connection is lost, by ``kills`` in the middle of an episode."""
        for number in itertools.count():
            name = uuid.uuid4().hex
            client.begin(name, 0, 1)
            step = 0
            while step < 5:
                answer = client.receive()
                if answer is None:
                    return
                assert "error" not in answer, answer
                if answer["episode"] != name or "reset" in answer:
                    break
                if number == 2 and step == 3 and self.killed < self.kills:
                    self.killed += 1
                    client.kill()
                    return
                step += 1
                client.step(name, step, step / 5, 1, terminated=step == 5, **self._more)
                self.played += 1


SIZES: dict[str, Any] = {
    **{"total_env_steps": 512, "report_interval": 128, "num_envs": 4, "rollout_length": 8},
    **{"hidden_sizes": (8,), "num_devices": 1, "env_timeout": SECONDS},
}


def test_a_client_killed_twenty_times_costs_its_episodes_only(address: str, tmp_path: Path) -> None:
    with Players(address, kills=20) as players:
        sizes = {**SIZES, "run_dir": str(tmp_path / "run"), "record": str(tmp_path / "data")}
        config = jaxrl_dist.preset("a2c", f"remote:{address}", **sizes)
        *_, last = jaxrl_dist.train(config)
        assert players.killed == 20 and last.env_steps >= 512
        assert last.metrics["episode/return"] == last.metrics["episode/length"] == 5
        # each kill loses the step that it interrupts, and the others count
        assert last.env_steps <= players.played
        stored = json.loads((tmp_path / "run/config.json").read_text())
        assert json.loads(stored["run"]["env_options"]["spaces"]) == json.loads(STORED)
        recorded = Dataset.load(tmp_path / "data")
        assert recorded.steps == last.env_steps
        cut = recorded.truncated[recorded.valid].sum()
        assert recorded.terminated.sum() + cut == len(recorded.returns) and cut >= 20
        *_, last = jaxrl_dist.resume(tmp_path / "run", total_env_steps=640, record=None)
        assert last.env_steps >= 640
        evaluation = jaxrl_dist.load_policy(tmp_path / "run").evaluate(5)
        assert evaluation.returns.tolist() == [5] * 5


@pytest.mark.case  # test_a_client_killed_twenty_times_costs_its_episodes_only
def test_actors_share_the_games(address: str) -> None:
    sizes = {**SIZES, "plan": "asynchronous", "num_actors": 2}
    with Players(address), Players(address):
        *_, last = jaxrl_dist.train(jaxrl_dist.preset("impala", f"remote:{address}", **sizes))
    assert last.env_steps >= 512 and last.metrics["episode/return"] == 5


def test_replay_holds_the_actions_that_clients_took(address: str) -> None:
    sizes = {**SIZES, "total_env_steps": 128, "env_options": {"log_action": "true"}}
    memory = {"learning_starts": 64, "replay_capacity": 512}
    with Players(address, log_action=2):
        config = jaxrl_dist.preset("dqn", f"remote:{address}", **sizes, **memory)
        *_, last = jaxrl_dist.train(config)
        steps = last.checkpoint().state.memory.steps
    assert steps.valid.any() and (steps.action[steps.valid] == 2).all()


@pytest.mark.parametrize(
    "algorithm, fields, names",
    [
        ("ppo", {"env_options": {"log_action": "true"}}, "log_action"),
        ("r2d2", {"env_options": {"log_action": "true"}}, "log_action"),
        ("dqn", {"env_options": {"log_action": "true"}, "record": "x"}, "record"),
        ("es", {}, "restarts"),
        ("ppo", {"seeds": 2}, "seeds"),
        ("ppo", {"vary": {"learning_rate": "1e-3,1e-4"}}, "vary"),
        ("ppo", {"evaluation_episodes": 3}, "evaluation_episodes"),
        ("ppo", {"evaluation_interval": 3}, "evaluation_interval"),
        ("ppo", {"video_interval": 3}, "video_interval"),
        ("ppo", {"action_repeat": 2}, "action_repeat"),
        ("ppo", {"plan": "on_device"}, "on_device"),
        ("ppo", {"env_workers": "processes"}, "env_workers"),
        ("ppo", {"env_options": {"wait": "1"}}, "wait_seconds"),
        ("impala", {"actors_on": "ray", "plan": "asynchronous"}, "actors_on"),
        ("ppo", {"processes": 2, "process": 0, "coordinator": "127.0.0.1:1"}, "processes"),
    ],
)
def test_what_clients_cannot_do_is_refused(
    algorithm: str, fields: dict[str, Any], names: str, address: str
) -> None:
    options = {"spaces": STORED, **fields.get("env_options", {})}
    values = {**SIZES, **fields, "env": f"remote:{address}", "env_options": options}
    values = {name: x for name, x in values.items() if name != "hidden_sizes"}
    config = jaxrl_dist.Train(algorithm, **values)
    with pytest.raises(ConfigError, match=names) as caught:
        setup.prepare(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["check-env remote:127.0.0.1:8800", "list envs remote"])
def test_commands_refuse_clients_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- The clients of the documents -----------------------------------------------------------------


def train_to_475(address: str, **options: str) -> float:
    """Trains PPO on the CartPole of clients, and returns its last mean return."""
    config = jaxrl_dist.preset(
        "ppo",
        f"remote:{address}",
        stop_at_return=475,
        total_env_steps=500_000,
        num_devices=1,
        env_timeout=60,
        env_options=options,
    )
    *_, last = jaxrl_dist.train(config)
    assert last.ended_by == "stop_at_return"
    returned = last.metrics["episode/return"]
    assert returned is not None
    return returned


def test_the_python_client_plays_and_comes_back(address: str) -> None:
    client = runs.ROOT / "docs/remote/cartpole.py"
    play = runpy.run_path(str(client))["main"]
    observation = {**SPACES["observation"], "shape": [4]}
    stored = {**json.loads(STORED), "observation": observation, "action": {"n": 2, "start": 0}}
    options = {"spaces": json.dumps(stored)}
    loop = asyncio.new_event_loop()
    with played(find(f"remote:{address}", options, timeout=SECONDS), 2) as game:
        thread = threading.Thread(
            target=loop.run_until_complete, args=(during(loop, play, address),)
        )
        thread.start()
        game.reset().result(SECONDS)
        steps = [game.step(0, 0).result(SECONDS) for _ in range(40)]
        valid = sum(step.valid for step, _ in steps)
        assert (valid > 10).all() and sum(ended.episodes.sum() for _, ended in steps) > 2
        loop.call_soon_threadsafe(STOP[loop].set)
        thread.join()
    loop.close()


STOP: dict[Any, asyncio.Event] = {}


async def during(loop: Any, play: Any, address: str) -> None:
    """Plays until ``STOP``."""
    STOP[loop] = asyncio.Event()
    playing = asyncio.ensure_future(play(f"ws://{address}", TOKEN, 2))
    await STOP[loop].wait()
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing


@pytest.mark.slow
def test_ppo_learns_cartpole_from_the_python_client(address: str) -> None:
    command = [sys.executable, "docs/remote/cartpole.py", f"ws://{address}", TOKEN]
    with subprocess.Popen(command, cwd=runs.ROOT) as client:
        try:
            assert train_to_475(address) >= 475
        finally:
            client.kill()


@pytest.mark.slow
def test_ppo_learns_cartpole_from_a_page_in_a_browser(address: str, page: Any) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(runs.ROOT / "docs/remote"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{site.server_port}"
        with ThreadPoolExecutor(1) as thread:
            training = thread.submit(train_to_475, address, allow_origin=origin)
            page.goto(f"{origin}/cartpole.html")
            page.fill("[name=url]", f"ws://{address}")
            page.fill("[name=token]", TOKEN)
            page.click("button")
            while not training.done():  # the page plays while its driver waits
                page.wait_for_timeout(100)
            assert training.result() >= 475
        site.shutdown()


@pytest.fixture
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu"]
        try:
            opened = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=flags)
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield opened.new_page()
        opened.close()
