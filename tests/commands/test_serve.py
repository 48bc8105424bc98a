"""``jaxrl-dist serve`` from its first line to the signal that ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxrl_dist import cli

OBS = [0.0, 0.1, 0.0, -0.1]


def ask(port: int, token: str, request: Any = None, path: str = "act") -> tuple[int, Any]:
    """The status and the answer of one request."""
    data = None if request is None else json.dumps(request).encode()
    headers = {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until_open(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the port never opened")


def serve(client: Callable[[int], None], *flags: str, number: int = signal.SIGTERM) -> int:
    """Serves a run until a client is done, and a signal ends it; returns the exit code."""
    port = free_port()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            until_open(port)
            client(port)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=work)
    thread.start()
    run_dir = str(runs.finished(runs.CARTPOLE))
    code = cli.main(["serve", run_dir, "--port", str(port), "--max-batch", "2", *flags])
    thread.join()
    if failures:
        raise failures[0]
    return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    seen: list[Any] = []

    def client(port: int) -> None:
        token = file.read_text().strip()
        seen.append(port)
        seen.append(ask(port, token, path=""))
        seen.append(ask(port, token, {"obs": OBS, "extras": True}))
        seen.append(ask(port, f"{token}x", {"obs": OBS}))

    assert serve(client, "--token-file", str(file), number=number) == 128 + number
    port, (_, about), (status, answer), (refused, _) = seen
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    printed = capsys.readouterr()
    first = json.loads(printed.out.splitlines()[0])
    url = f"http://127.0.0.1:{port}"
    assert first == {"url": url, "port": port}  # the file holds the token
    assert printed.err.splitlines()[-1] == "jaxrl-dist: error: interrupted"
    assert about["policies"][""]["observation"]["shape"] == [4]
    assert about["policies"][""]["action"] == {"n": 2, "start": 0}
    assert status == 200 and answer["action"] in (0, 1) and answer.keys() >= {"value", "log_prob"}
    assert refused == 401


def test_a_token_that_was_read_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length\n")

    def client(port: int) -> None:
        assert ask(port, "a-token-of-some-length", {"obs": OBS})[0] == 200

    assert serve(client, "--token-file", str(tmp_path / "token"), "--sample") == 143
    printed = capsys.readouterr()
    assert "a-token" not in printed.out + printed.err
    assert json.loads(printed.out.splitlines()[0]).keys() == {"url", "port"}


PAGE = (runs.ROOT / "docs" / "serve.md").read_text("utf-8")
PLAY = """
const TOKEN = process.argv[2];
let steps = 0;
const observe = () => [0.0, 0.1, 0.0, -0.1];
const act = (action) => { console.log(action); if (++steps === 3) process.exit(0); };
"""
"""What the code of the page takes for granted."""


def blocks(language: str) -> list[str]:
    """The code of the page, in its order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_of_the_page_plays(tmp_path: Path) -> None:
    """Python by urllib and by aiohttp, JavaScript by fetch and by a web socket."""
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    said: list[str] = []

    def client(port: int) -> None:
        def run(command: list[str], name: str, code: str) -> None:
            (tmp_path / name).write_text(code.replace("8700", str(port)))
            done = subprocess.run(
                [*command, name, "a-token-of-some-length"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)

        for number, code in enumerate(blocks("python")):
            run([sys.executable], f"{number}.py", code)
        if shutil.which("node") is None:  # version 20 or newer, which has web sockets
            return
        over_socket, by_fetch = blocks("js")
        if "true" in subprocess.check_output(
            ["node", "-p", "'WebSocket' in globalThis"], text=True
        ):
            run(["node"], "socket.mjs", PLAY + over_socket)
        run(["node"], "fetch.mjs", f"{PLAY}{by_fetch}\nact(action);")

    assert serve(client, "--token-file", str(tmp_path / "token")) == 143
    by_urllib, by_aiohttp, *others = said
    first, second, ended, _ = by_urllib.split("\n")
    assert "log_prob" in first and "action" in second and ended == "{'ended': 'game 7'}"
    assert len(by_aiohttp.splitlines()) == 4
    assert all(line in ("0", "1") for line in "".join(others).split())


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["serve", str(runs.finished(runs.CARTPOLE)), "--max-batch", "1", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is in use" in refusal(capsys, "--port", port)
    assert "not an address of this machine" in refusal(capsys, "--host", "10.255.255.1")


@pytest.mark.parametrize("package", ["aiohttp", "msgpack"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    assert f"needs {package}" in (said := refusal(capsys))
    assert "pip install 'jaxrl-dist[serve]'" in said


def test_without_the_extra_the_command_is_refused() -> None:
    """Where nothing of the extra can be imported."""
    code = (
        "import sys, importlib.util; sys.modules.update(aiohttp=None, msgpack=None);"
        "find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda n: None if n in ('aiohttp', 'msgpack') else find(n);"
        "from jaxrl_dist import cli; sys.exit(cli.main(['serve', 'runs/NAME']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "jaxrl-dist[serve]" in done.stderr
    assert done.stderr.count("\n") == 1
