"""Runs commands as processes, several at a time, and starts those that die again."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from jaxrl_dist.errors import DIVERGED, ConfigError, say

ATTEMPTS = 3
"""Number of times that the process of a command is started, if it dies;
one that diverges would do so again."""
GRACE_SECONDS = 60.0
"""Seconds for a process to end after SIGTERM, before it is killed."""
_SECONDS = 0.2
"""Seconds between two checks of the processes."""
_PIPE = "JAXRL_DIST_PIPE"
"""Environment variable with the descriptor of a pipe that closes as ``run_all`` ends."""


def run_all(
    commands: Sequence[Sequence[str]],
    logs: Sequence[pathlib.Path],
    jobs: int,
    stop: Callable[[], bool],
    ended: Callable[[int], None],
    failed: Callable[[int, str], None],
) -> None:
    """Runs every command to its end, or until ``stop``; however it ends, no process is left.

    Each process gets a share of this machine's cores, and of its GPUs' memory. If this one is
    killed, processes that have called ``end_with_parent`` also end.

    Args:
      commands: the words of each command.
      logs: for each command, the file that receives its output.
      ended: called with the number of each command that has ended with exit code 0.
      failed: called with the number of each command that is given up,
        and the last line of its output.

    Raises:
      ConfigError: a process has ended with exit code 2: its command is wrong.
      OSError: no process can be started.
    """
    waiting = list(reversed(range(len(commands))))
    attempts = [0] * len(commands)
    slots = min(jobs, len(commands))
    running = dict[int, tuple[int, subprocess.Popen[bytes]]]()
    reading, writing = os.pipe()  # only this process holds its writing end
    try:
        while (waiting or running) and not stop():
            for slot, (number, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                if process.returncode == 0:
                    ended(number)
                    continue
                why = _given_up(process.returncode, logs[number], attempts[number])
                if why is not None:
                    failed(number, why)
                else:
                    waiting.append(number)
            for slot in sorted(set(range(slots)) - running.keys()):
                if waiting:
                    number = waiting.pop()
                    attempts[number] += 1
                    process = _start(commands[number], logs[number], slot, slots, reading)
                    running[slot] = number, process
            time.sleep(_SECONDS)
    finally:
        _end([process for _, process in running.values()])
        os.close(reading)
        os.close(writing)


def _given_up(code: int, log: pathlib.Path, attempts: int) -> str | None:
    """Returns why a command whose process has died is given up; None: it starts again."""
    why = _last_line(log) or f"exit code {code}"
    if code == 2:
        raise ConfigError(f"{log.stem}: {why}")
    if attempts == ATTEMPTS or why.startswith(DIVERGED):
        return why
    say(f"{log.stem} died and starts again: {why}")
    return None


def end_with_parent() -> None:
    """Ends this process, as SIGTERM does, once the process whose
    ``run_all`` has started it ends; otherwise nothing.
    """

    def wait() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if (pipe := int(os.environ.pop(_PIPE, -1))) >= 0:
        threading.Thread(target=wait, name="parent", daemon=True).start()


def _start(
    words: Sequence[str], log: pathlib.Path, slot: int, slots: int, pipe: int
) -> subprocess.Popen[bytes]:
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / slots:.3f}"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**share, **os.environ, _PIPE: str(pipe)},
            pass_fds=[pipe],
            start_new_session=True,
        )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= slots:  # before its threads start, which inherit it
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, cores[slot::slots])
    return process


def _end(running: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ends processes gracefully: after SIGTERM they save what they have learnt."""
    processes = [process for process in running if process.poll() is None]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(log: pathlib.Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    if lines:
        return lines[-1].removeprefix("jaxrl-dist: error: ")
    return ""
