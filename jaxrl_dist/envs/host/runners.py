"""Starts the workers that step Gymnasium environments, threads or processes, and listens to
them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple

from jaxrl_dist.envs.host import worker as env_worker
from jaxrl_dist.envs.host.calls import awaited
from jaxrl_dist.envs.native import Description, Mask, PlainSpace, advice_on, env_label
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning

START_SECONDS = 60.0
"""Time limit for the start of a worker process on a busy machine; ``timeout`` counts from then
on."""
CLOSE_SECONDS = 5.0
"""Time limit for closing environments; one second if they had already stopped answering."""
_NAP = 0.05
"""Seconds between two looks at a worker that is to end."""


def read_description(env_id: str, options: Mapping[str, object], timeout: float) -> Description:
    """Makes one environment in a worker process, reads its description and closes it.

    Raises:
      ConfigError: a library that it needs is not installed.
      EnvError: its code raised another error, or ended the process.
      TimeoutError: making it took too long.
    """
    name = env_label("gymnasium", env_id)
    worker = Worker(range(1), *process([env_id, options]))
    try:
        up = worker.receive(START_SECONDS)
        answer = None if up is None else worker.receive(timeout)
        content = json.loads(answer or "null")
        if isinstance(content, list):
            closing = worker.receive(CLOSE_SECONDS)
        else:
            closing = b""
    except (EOFError, OSError):
        raise EnvError(
            f"{name} cannot be made: the process of its constructor {worker.end()}"
        ) from None
    finally:
        worker.connection.close()
        worker.join(1.0)
    if content is None:
        raise TimeoutError(f"{name}: making an environment took longer than {timeout:g} s")
    if isinstance(content, dict):
        if content["missing"]:
            raise ConfigError(
                f"{name} cannot be made here: {content['error'].partition(': ')[2]}{advice_on(env_id)}"
            )
        raise EnvError(f"{name} cannot be made: {content['error']}", content["traceback"])
    warn_of_closing(name, closing)
    description = Description(*content)
    observation, action = map(PlainSpace.restored, (description.observation, description.action))
    agents = {agent: Mask(*mask) for agent, mask in description.agents.items()}
    return description._replace(
        observation=observation, action=action, mask=Mask(*description.mask), agents=agents
    )


def warn_of_closing(name: str, answer: bytes | None) -> None:
    """Warns if ``close`` raised an error, as ``worker.closed`` reports it,
    or has not returned (``answer`` None).
    """
    if answer == b"":
        return
    if answer is None:
        message = (
            f"{name}: close() did not return within {CLOSE_SECONDS:g} s; the run does not wait for "
            "it"
        )
    else:
        message = f"{name}: close() raises {json.loads(answer)['error']}"
    warnings.warn(message, EnvWarning, stacklevel=2)


def process(request: object, *memory: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts a worker process and sends it ``request``, which becomes JSON;
    returns the connection to it and the process.
    """
    # Not by multiprocessing: it would import the caller's script again in each process, and forking
    # a process that runs JAX's threads may hang. A new session keeps signals to the caller's
    # process group from the worker before it has installed its handlers.
    ours, theirs = multiprocessing.Pipe()
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with theirs:
        descriptors = (theirs.fileno(), *memory)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", env_worker.__name__, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": modules},
            start_new_session=True,
        )
    with contextlib.suppress(OSError):
        ours.send_bytes(json.dumps(request).encode())
    return ours, process


class Worker(NamedTuple):
    """A thread or process that runs ``worker``, and the connection to it."""

    indices: range
    connection: Connection
    runner: threading.Thread | subprocess.Popen[bytes]

    def receive(self, seconds: float) -> bytes | None:
        """Returns the next answer; None if it does not arrive in time.

        Raises:
          EOFError, OSError: the worker has ended.
        """
        if awaited(self.connection.poll, seconds):
            return self.connection.recv_bytes()
        return None

    def stop(self) -> None:
        """Asks the worker to close its environments and end."""
        with contextlib.suppress(OSError):  # it may have ended already
            self.connection.send_bytes(b"")

    def last_words(self, patience: float) -> bytes | None:
        """Returns the worker's last answer, skipping unread ones; None if it does not end in
        time.
        """
        deadline = time.monotonic() + patience
        answer = b""
        with contextlib.suppress(EOFError, OSError):
            while True:
                # Not only the end of the pipe: an environment's children of `fork` hold it open.
                ended = not self._runs()
                left = max(0.0, deadline - time.monotonic())
                if self.connection.poll(0.0 if ended else min(left, _NAP)):
                    answer = self.connection.recv_bytes()
                elif ended:
                    return answer
                elif not left:
                    return None
        return answer

    def _runs(self) -> bool:
        if isinstance(self.runner, threading.Thread):
            return self.runner.is_alive()
        return self.runner.poll() is None

    def join(self, patience: float) -> None:
        """Waits until the worker has ended; abandons a thread that hangs, and kills a process."""
        if isinstance(self.runner, threading.Thread):
            self.runner.join(patience)
            return
        try:
            self.runner.wait(patience)
        except subprocess.TimeoutExpired:
            self.runner.kill()
            self.runner.wait(CLOSE_SECONDS)
        assert self.runner.stdin is not None
        self.runner.stdin.close()

    def end(self) -> str:
        """Describes how a dead worker ended."""
        if isinstance(self.runner, threading.Thread):
            return "has ended"
        code = self.runner.wait(CLOSE_SECONDS)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"has ended with exit code {code}"
