"""What a run keeps to itself: it listens on no socket,
and writes down no secret of its surroundings.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

import pytest
import runs

import jaxrl_dist

SECRETS = {
    name: f"a-secret-{name.lower()}-5f2d81c07b"
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN")
}
LISTENING = {"tcp": (3, "0A", 9), "tcp6": (3, "0A", 9), "unix": (3, "00010000", 6)}
"""In ``/proc/net``: the column that says so, how, and that of the inode; see proc(5)."""


def listening() -> set[str]:
    """The inodes of this process's sockets that accept connections."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set()
    for name, (column, state, inode) in LISTENING.items():
        table = Path("/proc/net", name)
        lines = (
            [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
        )
        found |= {line[inode] for line in lines if line[column] == state}
    return own & found


@pytest.mark.parametrize(
    "family, address", [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "socket")]
)
def test_a_socket_that_listens_is_seen(
    family: int, address: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = listening()
    with socket.socket(family) as server:
        server.bind(address)
        assert listening() == before
        server.listen()
        assert listening() - before == {str(os.fstat(server.fileno()).st_ino)}
    assert listening() == before


class Watched(NamedTuple):
    """A run, and the sockets that listened while it was under way."""

    run_dir: Path
    sockets: set[str]


RUNS = {
    "on_device": "gymnax:CartPole-v1",
    "synchronous": "envpool:CartPole-v1",
    "asynchronous": "envpool:CartPole-v1",
}


@pytest.fixture(scope="module", params=runs.cases(RUNS, "on_device"))
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    run_dir, sockets, before = tmp_path_factory.mktemp("runs") / "run", set(), listening()
    sizes = {"num_envs": 8, "rollout_length": 8, "hidden_sizes": (8,), "num_devices": 1}
    steps = {
        "total_env_steps": 256,
        "report_interval": 64,
        "checkpoint_interval": 64,
        "evaluation_episodes": 1,
    }
    config = jaxrl_dist.preset(
        "impala", RUNS[request.param], plan=request.param, run_dir=str(run_dir), **sizes, **steps
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, secret in SECRETS.items():
            patch.setenv(name, secret)
        reports = 0
        for _ in jaxrl_dist.train(config):
            reports += 1
            sockets |= listening() - before
    assert reports >= 3
    return Watched(run_dir, sockets)


def test_a_run_listens_on_no_socket(watched: Watched) -> None:
    assert not watched.sockets


def test_a_run_writes_down_no_secret(watched: Watched) -> None:
    files = [path for path in watched.run_dir.rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl", "summary.json", "run.json"} <= {
        path.name for path in files
    }
    for path in files:
        content = path.read_bytes()
        assert not [
            name
            for name, secret in SECRETS.items()
            if secret.encode() in content or secret in str(path)
        ], path
