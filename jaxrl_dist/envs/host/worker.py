"""The loop that makes and steps Gymnasium environments, in a thread or in a worker process.

This module never imports JAX, so a worker process starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from jaxrl_dist.envs import episodes, masks, native
from jaxrl_dist.envs.host.records import Field, Records, open_records
from jaxrl_dist.envs.making import construct, describe
from jaxrl_dist.envs.native import NO_MASK, Mask, picture
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves, paths, too_wide
from jaxrl_dist.types import Array, PyTree

Result = TypeVar("Result")

GO = b"go"
"""Message that steps every environment; any message except this and ``DRAW`` closes them all."""
DRAW = b"draw "
"""Message, followed by the index of an environment, that requests a picture."""


class Task(NamedTuple):
    """The task of one worker, in types that JSON can store."""

    env: str
    """``ID`` of Gymnasium's registry or ``MODULE:NAME``."""
    options: Mapping[str, Any]
    first: int
    """Index of the worker's first environment; the others follow."""
    seeds: list[int]
    """One per environment, for the first reset."""
    fields: Sequence[Field]
    """From ``records.record_fields``."""
    action_repeat: int = 1
    time_limit: int | None = None
    """In raw environment steps, before action repeat."""
    mask: Sequence[str] = NO_MASK
    """The ``Mask`` of an environment whose mask is not part of its observation."""
    metrics: Sequence[str] = ()
    """Entries of the info; each has a column such as ``info/success``,
    NaN where a step reports no value."""
    agents: Sequence[str] = ()
    """Names of several agents, each with a place in these columns."""


class _Outcome(NamedTuple):
    """What a reset or a step has returned."""

    observation: object
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, object]


class _Env:
    """One environment, which resets when its record requests it."""

    def __init__(self, env: gymnasium.Env, index: int, task: Task, records: Records) -> None:
        self._env = env
        self._index = index
        self._records = records
        self._action_repeat = task.action_repeat
        self._seed: int | None = task.seeds[index - task.first]
        self._mask = Mask(*task.mask)
        self._metrics = task.metrics
        self._agents = task.agents
        self._reported = set[str]()
        """Entries that its infos have had."""
        observations = native.named_spaces(env.observation_space)
        actions = native.named_spaces(env.action_space)
        mask_apart = bool(self._mask.where) and f"obs/{masks.PART}" in records
        wrapped = mask_apart and observations is env.observation_space
        self._spaces = leaves(observations, "obs/observation" if wrapped else "obs")
        self._actions = leaves(actions, "action")
        self._paths = paths(actions, "action")

    def advance(self) -> None:
        """Resets or steps the environment, and records what it returns."""
        index, records = self._index, self._records
        if records["reset"][index]:
            outcome = self._reset()
        else:
            outcome = self._step()
        self._write_observation(outcome.observation)
        if self._mask.where:
            records[f"obs/{masks.PART}"][index] = self._legal(outcome.info)
        with np.errstate(over="ignore"):
            records["reward"][index] = outcome.reward
        records["terminated"][index] = outcome.terminated
        records["truncated"][index] = outcome.truncated

    def _reset(self) -> _Outcome:
        observation, info = native.returned("reset", self._env.reset(seed=self._seed), native.RESET)
        self._seed = None
        return _Outcome(observation, 0.0, False, False, info)

    def _step(self) -> _Outcome:
        """Steps the environment, repeatedly if the action repeats, and records its metrics."""
        total = 0.0
        metrics: Mapping[str, Array] = dict.fromkeys(self._metrics, np.float32(np.nan))
        for _ in range(self._action_repeat):
            # for each repeat: an environment may change its copy in place
            values = self._env.step(self._native_action())
            observation, reward, terminated, truncated, info = native.returned(
                "step", values, native.STEP
            )
            metrics = self._metrics_after(info, metrics)
            total += native.number("the reward", reward)
            terminated = native.flag("terminated", terminated)
            truncated = native.flag("truncated", truncated)
            if terminated or truncated:
                episodes.check_known(self._metrics, self._reported, "the environment")
                break
        for metric, value in metrics.items():
            self._records[f"info/{metric}"][self._index] = value
        return _Outcome(observation, total, terminated, truncated, info)

    def _write_observation(self, observation: object) -> None:
        parts = leaves(native.named(self._env.observation_space, observation))
        for (path, space), value in zip(self._spaces.items(), parts.values(), strict=True):
            record = self._records[path]
            checked = _checked(path, np.asarray(value), space, record.dtype)
            # a number beyond float32 becomes infinite, which is an error later
            with np.errstate(over="ignore"):
                record[self._index] = checked.reshape(record.shape[1:])

    def _metrics_after(
        self, info: Mapping[str, object], before: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """Adds the numbers of an info to the metrics of the action's earlier repeats."""
        if not before:
            return before
        numbers = episodes.numbers(info, self._agents)
        shape = -1 if self._agents else ()
        self._reported |= numbers.keys()
        values = {
            metric: np.asarray(numbers.get(episodes.field(metric), np.nan), np.float32)
            for metric in before
        }
        return episodes.advanced(
            before, {metric: value.reshape(shape) for metric, value in values.items()}
        )

    def picture(self) -> bytes:
        """Draws the environment: returns a JSON line with the shape, then the bytes ``[H, W, 3]``.

        Raises:
          TypeError: the environment draws something else.
          Exception: any error that the environment raises.
        """
        drawn = picture(self._env.render())
        return json.dumps({"shape": drawn.shape}).encode() + b"\n" + drawn.tobytes()

    def _native_action(self) -> PyTree:
        """Returns a copy of the action, converted to the environment's action space."""
        parts = {}
        for path, space in self._actions.items():
            part = self._records[path][self._index].astype(space.dtype).reshape(space.shape)
            if hasattr(space, "low"):  # which float32 may have rounded outwards
                part = np.clip(part, space.low, space.high)
            if hasattr(space, "start"):  # it may start at any number
                part = part + space.start
            parts[path] = part
        return native.unnamed(self._env.action_space, _filled(self._paths, parts))

    def _legal(self, info: Mapping[str, object]) -> np.ndarray:
        """Returns which actions are legal, ``[n]`` bool.

        Raises:
          ValueError: the environment's mask is missing or has changed its size.
        """
        name = self._mask.name
        size = self._records[f"obs/{masks.PART}"].shape[1]
        if self._mask.where == "method":
            source = f"{name}()"
            mask = self._env.get_wrapper_attr(name)()
        else:
            source = f"info[{name!r}]"
            mask = info.get(name)
        flags = masks.flat(mask, size)
        if flags is None:
            raise ValueError(
                f"{source} gave {mask!r:.80}, not {size} zeros and ones that say what is legal"
            )
        return flags


def _filled(tree: PyTree, parts: Mapping[str, np.ndarray]) -> PyTree:
    """Returns nested dicts with each path replaced by its part, the inverse of ``paths``."""
    if isinstance(tree, dict):
        return {name: _filled(inner, parts) for name, inner in tree.items()}
    return parts[tree]


def _checked(
    path: str, observation: np.ndarray, space: gymnasium.Space, record: np.dtype
) -> np.ndarray:
    """Returns an observation, or a part of one; discrete ones count from 0.

    Args:
      record: the dtype that policies see.

    Raises:
      ValueError: shape or dtype differ from the environment's observation space,
        or ``record`` cannot hold a number.
    """
    dtype = observation.dtype
    wanted = np.dtype(space.dtype)
    part = path.removeprefix("obs").removeprefix("/")
    subject = f"the observation part {part}" if part else "the observation"
    if observation.shape != space.shape or (
        dtype is not wanted and not np.can_cast(dtype, wanted, "same_kind")
    ):
        raise ValueError(
            f"{subject} has shape {observation.shape} and dtype {dtype}, where its space has "
            f"{space.shape} and {wanted}"
        )
    may_be_wide = dtype.itemsize > record.itemsize and hasattr(space, "low")
    if may_be_wide and (wide := too_wide(observation, record)):
        raise ValueError(f"{subject} {wide}")
    if hasattr(space, "start"):
        return observation - space.start
    return observation


def serve(connection: Connection, task: Task, records: Records) -> None:
    """Makes the environments of a task, steps them at each message of the caller,
    and closes them at the end.

    Sends an empty message when the worker is up, when the environments are made, after each step
    and when they are closed. On an error it sends ``failure_of`` instead, closes the environments
    and ends. It answers a request to draw with ``_Env.picture`` or, in the same way, with an error.
    """
    share = _Share(task, records)
    # The caller may close its end at any time: then errors have no recipient.
    with connection:
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(b"")
            try:
                share.make()
                connection.send_bytes(b"")
                while (message := connection.recv_bytes()) == GO or message.startswith(DRAW):
                    if message == GO:
                        share.advance()
                        connection.send_bytes(b"")
                    else:
                        index = int(message.removeprefix(DRAW))
                        connection.send_bytes(share.picture(index))
            except _Failure as failure:
                connection.send_bytes(failure.answer)
        answer = share.close()
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)


class _Failure(Exception):
    """An environment has raised an error."""

    def __init__(self, answer: bytes) -> None:
        """``answer``: from ``failure_of``."""
        self.answer = answer


class _Share:
    """The environments of one worker; its methods raise ``_Failure``."""

    def __init__(self, task: Task, records: Records) -> None:
        self._task = task
        self._records = records
        self._to_close: list[gymnasium.Env] = []
        self._envs: dict[int, _Env] = {}

    def make(self) -> None:
        first = self._task.first
        for index in range(first, first + len(self._task.seeds)):
            self._envs[index] = self._call(index, "in its constructor", partial(self._made, index))

    def advance(self) -> None:
        for index, env in self._envs.items():
            doing = "in reset" if self._records["reset"][index] else "in step"
            self._call(index, doing, env.advance)

    def picture(self, index: int) -> bytes:
        return self._call(index, "in render", self._envs[index].picture)

    def close(self) -> bytes:
        """Closes the environments; returns the first error, as ``closed`` reports it."""
        return next(filter(None, [closed(env) for env in self._to_close]), b"")

    def _call(self, index: int, doing: str, function: Callable[[], Result]) -> Result:
        self._records["since"][index] = time.monotonic()
        try:
            return function()
        except BaseException as error:  # SystemExit too: an environment must not end the worker
            raise _Failure(failure_of(error, index=index, doing=doing)) from None

    def _made(self, index: int) -> _Env:
        task = self._task
        env = construct(task.env, task.options)
        self._to_close.append(env)
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{task.env} made a {type(env).__name__}, not a gymnasium.Env")
        if task.time_limit is not None:
            env = self._to_close[-1] = TimeLimit(env, task.time_limit)
        return _Env(env, index, task, self._records)


def failure_of(error: BaseException, **where: object) -> bytes:
    """Encodes an exception as JSON: ``error`` (one line),
    ``refused`` (a ``ConfigError``), ``traceback``, ``where``.
    """
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    refused = error.with_flags if isinstance(error, ConfigError) else ""
    return json.dumps(
        {**where, "refused": refused, "error": line, "traceback": traceback.format_exc()}
    ).encode()


def closed(env: gymnasium.Env) -> bytes:
    """Closes an environment; returns ``failure_of`` its error, or an empty message."""
    try:
        env.close()
    except BaseException as error:
        return failure_of(error)
    return b""


def send_description(connection: Connection, env: str, options: Mapping[str, object]) -> None:
    """Makes one environment and closes it.

    Sends an empty message when the worker is up, then a ``Description`` in JSON or ``failure_of``
    the error, with ``missing`` True if a library is not installed, and finally the result of
    ``closed``.
    """
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
    """Lets the kernel end this process by SIGIO when the parent's end of its standard input closes.

    A thread could not do so while an environment's code in C holds Python's lock.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it has closed before
        os._exit(1)


def main() -> None:
    """Runs ``python -m jaxrl_dist.envs.host.worker CONNECTION [MEMORY]``;
    both are file descriptors.

    Reads a ``Task`` from the connection; without ``MEMORY``, the arguments of ``send_description``.
    """
    # A terminal, GNU timeout, systemd or Slurm may signal all processes of a run. The parent
    # decides, and this process ends after it. A handler, not SIG_IGN: programs started by an
    # environment would inherit SIG_IGN.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    _end_with_parent()
    descriptor, *memory = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    request = json.loads(connection.recv_bytes())

    if memory:
        task = Task(**request)
        serve(connection, task, open_records(memory[0], task.fields))
    else:
        send_description(connection, *request)


if __name__ == "__main__":
    main()
