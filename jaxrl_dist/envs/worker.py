"""The loop that makes and steps Gymnasium environments, in a thread or in a process of its own.

It imports neither JAX nor what does, so that a worker process starts fast and stays small.
"""

from __future__ import annotations

import contextlib
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

from jaxrl_dist.envs.native import MASKS, construct, describe

GO = b"go"
"""What the caller sends for a step of every environment; what is neither this nor ``DRAW`` closes them all."""
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

The caller writes ``action`` and ``reset``. The worker writes what the step leads to, in ``masked`` whether the info of
a reset holds an action mask, and in ``since`` when it turned to this environment (``time.monotonic``, a clock that all
processes share).
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
        ["masked", "?", []],
    ]


def record_dtype(fields: list[Any]) -> np.dtype:
    """The numpy dtype of ``record_fields``."""
    return np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in fields], align=True)


def open_records(descriptor: int, fields: list[Any]) -> Records:
    """The records in a memory file; they keep it open."""
    records = np.frombuffer(mmap.mmap(descriptor, 0), record_dtype(fields))
    return {name: records[name] for name, *_ in fields}


def _number(what: str, value: Any) -> Any:
    """A reward, or a flag, if it is one number.

    Raises:
      TypeError: it is something else, such as a text, which Python would take for a number or for true.
    """
    if isinstance(value, bool | np.bool_ | int | float):
        return value
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "biuf":
        raise TypeError(f"{what} is {value!r:.80}, not a {'number' if what == 'the reward' else 'bool'}")
    return number.item()


def _flag(what: str, value: Any) -> bool:
    flag = _number(what, value)
    if flag not in (0, 1):
        raise TypeError(f"{what} is {value!r:.80}, not a bool")
    return bool(flag)


class _Env:
    """One environment, which resets where its record says so."""

    def __init__(self, env: Any, seed: int, index: int, records: Records, action_repeat: int) -> None:
        self._env, self._index, self._records, self._action_repeat = env, index, records, action_repeat
        self._seed: int | None = seed
        self._observation, self._action = env.observation_space, env.action_space

    def advance(self) -> None:
        index, records = self._index, self._records
        if records["reset"][index]:
            observation, info = self._env.reset(seed=self._seed)
            self._seed = None
            records["masked"][index] |= isinstance(info, dict) and any(name in info for name in MASKS)
            reward, terminated, truncated = 0.0, False, False
        else:
            action, total = self._native(records["action"][index]), 0.0
            for _ in range(self._action_repeat):
                observation, reward, terminated, truncated, _ = self._env.step(action)
                reward = total = total + _number("the reward", reward)
                terminated, truncated = _flag("terminated", terminated), _flag("truncated", truncated)
                if terminated or truncated:
                    break
        records["obs"][index] = self._checked(np.asarray(observation)).reshape(records["obs"].shape[1:])
        records["reward"][index] = reward
        records["terminated"][index], records["truncated"][index] = terminated, truncated

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
    """Makes the environments of a task, then steps them each time the caller says so, and in the end closes them.

    Sends an empty message when it is up, when the environments are made, after each step and when they are closed;
    instead of one of the latter, what ``failure_of`` gives, and after one in making or stepping only closing is left. A
    picture is answered as ``_Env.picture`` or, in the same way, by an error.
    """
    from gymnasium.wrappers import TimeLimit

    indices = range(task.first, task.first + len(task.seeds))
    made: list[Any] = []
    envs: dict[int, _Env] = {}
    drawn: list[bytes] = []

    def each(work: Callable[[int], None], doing: Callable[[int], str], indices: Iterable[int] = indices) -> bytes:
        for index in indices:
            records["since"][index] = time.monotonic()
            try:
                work(index)
            except BaseException as error:  # SystemExit too: what an environment does ends no worker
                return failure_of(error, index=index, doing=doing(index))
        return b""

    def make(index: int) -> None:
        env = construct(task.env, task.options)
        made.append(env)
        if not (description := describe(env)).gymnasium:
            raise TypeError(f"{task.env} made a {description.kind}, not a gymnasium.Env")
        if task.time_limit is not None:
            env = made[-1] = TimeLimit(env, task.time_limit)
        envs[index] = _Env(env, task.seeds[index - task.first], index, records, task.action_repeat)

    # The other end may close at any time: then there is nobody to tell.
    with connection:
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(b"")
            failure = each(make, lambda index: "in its constructor")
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
        answer = next(filter(None, [closed(env) for env in made]), b"")
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)


def failure_of(error: BaseException, **where: Any) -> bytes:
    """What was raised, in JSON: ``error`` in a line, ``traceback``, and ``where``."""
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    return json.dumps({**where, "error": line, "traceback": traceback.format_exc()}).encode()


def closed(env: Any) -> bytes:
    """Closes an environment, and gives what ``failure_of`` says if it raises, else nothing."""
    try:
        env.close()
    except BaseException as error:
        return failure_of(error)
    return b""


def look(connection: Connection, env: str, options: Mapping[str, Any]) -> None:
    """Makes one environment and closes it.

    Sends an empty message when it is up, a ``Description`` in JSON or what ``failure_of`` gives, with ``missing`` for
    whether something is not installed, and at last what ``closed`` gives.
    """
    import gymnasium

    with connection, contextlib.suppress(OSError):
        connection.send_bytes(b"")
        try:
            made = construct(env, options)
            description = describe(made)
        except BaseException as error:  # SystemExit too
            missing = isinstance(error, (ImportError, gymnasium.error.Error))
            connection.send_bytes(failure_of(error, missing=missing))
            return
        connection.send_bytes(json.dumps(description, default=np.ndarray.tolist).encode())
        connection.send_bytes(closed(made) if description.gymnasium else b"")


def _end_with_parent() -> None:
    """Ends this process when the other end of its standard input closes, even while an environment hangs."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """``python -m jaxrl_dist.envs.worker CONNECTION [MEMORY]``, file descriptors; over the first comes a task.

    Without ``MEMORY`` it is the arguments of ``look``.
    """
    # Whoever stops a run may signal all of its processes: a terminal, GNU timeout, systemd, Slurm. The parent decides,
    # and this process ends after it. A handler and not SIG_IGN, which programs started by an environment would inherit.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor, *memory = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    asked = json.loads(connection.recv_bytes())
    import gymnasium  # noqa: F401  before it says that it is up: this is not the environments' time

    if memory:
        task = Task(**asked)
        serve(connection, task, open_records(memory[0], task.fields))
    else:
        look(connection, *asked)


if __name__ == "__main__":
    main()
