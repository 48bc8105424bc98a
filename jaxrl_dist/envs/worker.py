"""The loop that makes and steps Gymnasium environments, in a thread or in a process of its own.

It imports neither JAX nor the rest of the package, so that a worker process starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

GO = b"go"
"""What the caller sends for a step of every environment; what is neither this nor ``DRAW`` ends the loop."""
DRAW = b"draw "
"""What it sends, with the index of an environment behind it, for a picture."""


class Task(NamedTuple):
    """What one worker has to do, in types that JSON can spell."""

    env: str
    """``ID`` of Gymnasium's registry or ``MODULE:NAME``."""
    options: Mapping[str, Any]
    first: int
    """Index of the worker's first environment; the others follow."""
    seeds: list[int]
    """One for each of its environments, for the first reset."""
    fields: list[Any]
    """Those of ``record_fields``."""
    action_repeat: int = 1
    time_limit: int | None = None
    """In steps of the environment's own."""


Records = Mapping[str, np.ndarray]
"""What caller and worker share, one row for each environment of the vector.

The caller writes ``action`` and ``reset``. The worker writes what the step leads to, and in ``since`` when it turned to
this environment (``time.monotonic``, a clock that all processes share).
"""


def record_fields(observation: Any, action: Any) -> list[Any]:
    """Names, dtypes and shapes of an environment's record, for spaces with ``dtype`` and ``shape``."""
    return [
        ["since", "f8", []],
        ["obs", observation.dtype.str, list(observation.shape)],
        ["action", action.dtype.str, list(action.shape)],
        ["reward", "f4", []],
        ["reset", "?", []],
        ["terminated", "?", []],
        ["truncated", "?", []],
    ]


def record_dtype(fields: list[Any]) -> np.dtype:
    """The numpy dtype of ``record_fields``."""
    return np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in fields], align=True)


def open_records(descriptor: int, fields: list[Any]) -> Records:
    """The records in a memory file; they keep it open."""
    records = np.frombuffer(mmap.mmap(descriptor, 0), record_dtype(fields))
    return {name: records[name] for name, *_ in fields}


def creator(env: str) -> tuple[Any, str]:
    """What ``MODULE:NAME`` stands for, after importing the module; and ``NAME``.

    None for an ``ID``, and for one that the module, being imported, may have registered.
    """
    module, _, name = env.rpartition(":")
    return (getattr(importlib.import_module(module), name, None) if module else None), name


def construct(env: str, options: Mapping[str, Any]) -> Any:
    """What an environment's name makes, of whatever kind.

    Raises:
      Exception: whatever the environment raises.
    """
    import gymnasium

    function, name = creator(env)
    if callable(function):
        return function(**options)
    # What Gymnasium's checker warns of is checked here at every step.
    return gymnasium.make(name, **{"disable_env_checker": True, **options})


def make(env: str, options: Mapping[str, Any]) -> Any:
    """A new ``gymnasium.Env``.

    Raises:
      TypeError: what was made is none.
      Exception: whatever the environment raises.
    """
    return checked(env, construct(env, options))


def checked(env: str, made: Any) -> Any:
    """What was made under a name, if it is a ``gymnasium.Env``.

    Raises:
      TypeError: it is none.
    """
    import gymnasium

    if not isinstance(made, gymnasium.Env):
        raise TypeError(f"{env} made a {type(made).__name__}, not a gymnasium.Env")
    return made


class _Env:
    """One environment, which resets where its record says so."""

    def __init__(self, env: Any, seed: int, index: int, records: Records, action_repeat: int) -> None:
        self._env, self._index, self._records, self._action_repeat = env, index, records, action_repeat
        self._seed: int | None = seed
        self._observation, self._action = env.observation_space, env.action_space

    def advance(self) -> None:
        index, records = self._index, self._records
        if records["reset"][index]:
            observation, _ = self._env.reset(seed=self._seed)
            self._seed = None
            reward, terminated, truncated = 0.0, False, False
        else:
            action, total = self._native(records["action"][index]), 0.0
            for _ in range(self._action_repeat):
                observation, reward, terminated, truncated, _ = self._env.step(action)
                reward = total = total + float(reward)
                if terminated or truncated:
                    break
        records["obs"][index] = self._checked(np.asarray(observation)).reshape(records["obs"].shape[1:])
        records["reward"][index] = float(reward)
        records["terminated"][index], records["truncated"][index] = bool(terminated), bool(truncated)

    def picture(self) -> bytes:
        """Its shape in JSON, a line of its own, and behind it the bytes ``[H, W, 3]``.

        Raises:
          TypeError: the environment draws something else.
          Exception: whatever it raises.
        """
        drawn = self._env.render()
        if not (isinstance(drawn, np.ndarray) and drawn.dtype == np.uint8 and drawn.shape[2:] == (3,)):
            shape = list(drawn.shape) if isinstance(drawn, np.ndarray) else ""
            raise TypeError(f"render() gave a {type(drawn).__name__}{shape} and not an array [H, W, 3] of uint8")
        return json.dumps({"shape": drawn.shape}).encode() + b"\n" + drawn.tobytes()

    def _native(self, action: Any) -> Any:
        """A copy of the action, as the environment's own space has it."""
        space = self._action
        action = action.astype(space.dtype).reshape(space.shape)
        return action + space.start if hasattr(space, "start") else action  # discrete spaces may begin anywhere

    def _checked(self, observation: np.ndarray) -> np.ndarray:
        """The observation, discrete ones counted from 0.

        Raises:
          ValueError: it is not of the environment's own space.
        """
        space, dtype = self._observation, observation.dtype
        if observation.shape != space.shape or (
            dtype is not space.dtype and not np.can_cast(dtype, space.dtype, "same_kind")
        ):
            raise ValueError(
                f"the observation has shape {observation.shape} and dtype {dtype}, where its space has {space.shape} "
                f"and {space.dtype}"
            )
        return observation - space.start if hasattr(space, "start") else observation


def serve(connection: Connection, task: Task, records: Records) -> None:
    """Makes the environments of a task, then steps them each time the caller says so.

    Sends an empty message when it is up, when the environments are made, and after each step; instead of one of the
    latter, ``{"index", "doing", "error", "traceback"}`` in JSON, and then it ends. A picture is answered as
    ``_Env.picture`` or, in the same way, by an error.
    """
    from gymnasium.wrappers import TimeLimit

    indices = range(task.first, task.first + len(task.seeds))
    envs: dict[int, _Env] = {}
    drawn: list[bytes] = []

    def each(work: Callable[[int], None], doing: Callable[[int], str], indices: Iterable[int] = indices) -> bytes:
        for index in indices:
            records["since"][index] = time.monotonic()
            try:
                work(index)
            except BaseException as error:  # SystemExit too: what an environment does ends no worker
                line = " ".join(traceback.format_exception_only(error)[-1].split())
                failure = {"index": index, "doing": doing(index), "error": line, "traceback": traceback.format_exc()}
                return json.dumps(failure).encode()
        return b""

    # The other end may close at any time: then there is nobody to tell.
    with connection, contextlib.ExitStack() as closing, contextlib.suppress(EOFError, OSError):

        def construct(index: int) -> None:
            made = make(task.env, task.options)
            if task.time_limit is not None:
                made = TimeLimit(made, task.time_limit)
            closing.callback(made.close)
            envs[index] = _Env(made, task.seeds[index - task.first], index, records, task.action_repeat)

        connection.send_bytes(b"")
        failure = each(construct, lambda index: "in its constructor")
        connection.send_bytes(failure)
        while not failure:
            asked = connection.recv_bytes()
            if asked == GO:
                failure = each(
                    lambda index: envs[index].advance(),
                    lambda index: "in reset" if records["reset"][index] else "in step",
                )
                connection.send_bytes(failure)
            elif asked.startswith(DRAW):
                one = [int(asked.removeprefix(DRAW))]
                failure = each(lambda index: drawn.append(envs[index].picture()), lambda index: "in render", one)
                connection.send_bytes(failure or drawn.pop())
            else:
                break


def _end_with_parent() -> None:
    """Ends this process when the other end of its standard input closes, even while an environment hangs."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """``python -m jaxrl_dist.envs.worker CONNECTION MEMORY``, both file descriptors; the task comes over the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches this process too; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor, memory = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    task = Task(**json.loads(connection.recv_bytes()))
    import gymnasium  # noqa: F401  before it says that it is up: this is not the environments' time

    serve(connection, task, open_records(memory, task.fields))


if __name__ == "__main__":
    main()
