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
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from jaxrl_dist.envs import episodes, masks, native
from jaxrl_dist.envs.host.records import Records, open_records
from jaxrl_dist.envs.making import construct, describe
from jaxrl_dist.envs.native import NO_MASK, Mask, picture
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves, paths, too_wide

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
    fields: list[Any]
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


class _Env:
    """One environment, which resets when its record requests it."""

    def __init__(self, env: Any, index: int, task: Task, records: Records) -> None:
        self._env = env
        self._index = index
        self._records = records
        self._action_repeat = task.action_repeat
        self._seed: int | None = task.seeds[index - task.first]
        self._observation = env.observation_space
        self._action = env.action_space
        self._mask = Mask(*task.mask)
        self._metrics = task.metrics
        self._agents = task.agents
        self._known = set[str]()
        apart = bool(self._mask.where) and f"obs/{masks.PART}" in records
        wrapped = apart and native.named_spaces(self._observation) is self._observation
        self._spaces = leaves(
            native.named_spaces(self._observation), "obs/observation" if wrapped else "obs"
        )
        self._actions = leaves(native.named_spaces(self._action), "action")
        self._paths = paths(native.named_spaces(self._action), "action")

    def advance(self) -> None:
        index, records = self._index, self._records
        if records["reset"][index]:
            observation, info = native.returned(
                "reset", self._env.reset(seed=self._seed), native.RESET
            )
            self._seed = None
            reward = 0.0
            terminated = False
            truncated = False
        else:
            total = 0.0
            metrics: Mapping[str, Any] = dict.fromkeys(self._metrics, np.float32(np.nan))
            for _ in range(self._action_repeat):
                # for each repeat: an environment may change its copy in place
                action = self._native(index)
                values = native.returned("step", self._env.step(action), native.STEP)
                observation, reward, terminated, truncated, info = values
                metrics = self._metrics_after(info, metrics)
                reward = total = total + native.number("the reward", reward)
                terminated = native.flag("terminated", terminated)
                truncated = native.flag("truncated", truncated)
                if terminated or truncated:
                    episodes.check_known(self._metrics, self._known, "the environment")
                    break
            for metric, value in metrics.items():
                records[f"info/{metric}"][index] = value
        parts = leaves(native.named(self._observation, observation))
        for (path, space), value in zip(self._spaces.items(), parts.values(), strict=True):
            record = records[path]
            checked = _checked(path, np.asarray(value), space, record.dtype).reshape(
                record.shape[1:]
            )
            # a number beyond float32 becomes infinite, which is an error later
            with np.errstate(over="ignore"):
                record[index] = checked
        if self._mask.where:
            records[f"obs/{masks.PART}"][index] = self._legal(info)
        with np.errstate(over="ignore"):
            records["reward"][index] = reward
        records["terminated"][index] = terminated
        records["truncated"][index] = truncated

    def _metrics_after(self, info: Any, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds the numbers of an info to those from the action's earlier repeats."""
        if not before:
            return before
        known = episodes.numbers(info, self._agents)
        shape = -1 if self._agents else ()
        self._known |= known.keys()
        values = {
            name: np.asarray(known.get(episodes.field(name), np.nan), np.float32) for name in before
        }
        return episodes.advanced(before, {name: x.reshape(shape) for name, x in values.items()})

    def picture(self) -> bytes:
        """Draws the environment: returns a JSON line with the shape, then the bytes ``[H, W, 3]``.

        Raises:
          TypeError: the environment draws something else.
          Exception: any error that the environment raises.
        """
        drawn = picture(self._env.render())
        return json.dumps({"shape": drawn.shape}).encode() + b"\n" + drawn.tobytes()

    def _native(self, index: int) -> Any:
        """Returns a copy of the action, converted to the environment's action space."""
        parts = {}
        for path, space in self._actions.items():
            part = self._records[path][index].astype(space.dtype).reshape(space.shape)
            if hasattr(space, "low"):  # which float32 may have rounded, outwards too
                part = np.clip(part, space.low, space.high)
            # may start at any number
            if hasattr(space, "start"):
                parts[path] = part + space.start
            else:
                parts[path] = part
        return native.unnamed(self._action, _filled(self._paths, parts))

    def _legal(self, info: Any) -> np.ndarray:
        """Returns which actions are legal, ``[n]`` bool.

        Raises:
          ValueError: the environment's mask is missing or has changed its size.
        """
        name = self._mask.name
        record = self._records[f"obs/{masks.PART}"]
        if self._mask.where == "method":
            mask = self._env.get_wrapper_attr(name)()
        else:
            mask = info.get(name)
        if (flags := masks.flat(mask, record.shape[1])) is None:
            if self._mask.where == "method":
                source = f"the method {name}"
            else:
                source = f"info[{name!r}]"
            raise ValueError(
                f"{source} gave {mask!r:.80}, not {record.shape[1]} zeros and ones that say what is legal"
            )
        return flags


def _filled(tree: Any, parts: Mapping[str, Any]) -> Any:
    """Returns nested dicts with each path replaced by its part, the inverse of ``paths``."""
    if isinstance(tree, dict):
        return {name: _filled(x, parts) for name, x in tree.items()}
    return parts[tree]


def _checked(path: str, observation: np.ndarray, space: Any, record: np.dtype) -> np.ndarray:
    """Returns an observation, or a part of one; discrete ones count from 0.

    Args:
      record: the dtype that policies see.

    Raises:
      ValueError: shape or dtype differ from the environment's observation space,
        or ``record`` cannot hold a number.
    """
    dtype = observation.dtype
    part = path.removeprefix("obs").removeprefix("/")
    if observation.shape != space.shape or (
        dtype is not space.dtype and not np.can_cast(dtype, space.dtype, "same_kind")
    ):
        raise ValueError(
            f"the observation{part and f' part {part}'} has shape {observation.shape} and dtype {dtype}, where its "
            f"space has {space.shape} and {space.dtype}"
        )
    if (
        dtype.itemsize > record.itemsize
        and hasattr(space, "low")
        and (wide := too_wide(observation, record))
    ):
        raise ValueError(f"the observation{part and f' part {part}'} {wide}")
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
    import gymnasium
    from gymnasium.wrappers import TimeLimit

    indices = range(task.first, task.first + len(task.seeds))
    made: list[Any] = []
    envs: dict[int, _Env] = {}
    drawn: list[bytes] = []

    def for_all(
        work: Callable[[int], None], doing: Callable[[int], str], indices: Iterable[int] = indices
    ) -> bytes:
        for index in indices:
            records["since"][index] = time.monotonic()
            try:
                work(index)
            except BaseException as error:  # SystemExit too: an environment must not end the worker
                return failure_of(error, index=index, doing=doing(index))
        return b""

    def make(index: int) -> None:
        env = construct(task.env, task.options)
        made.append(env)
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{task.env} made a {type(env).__name__}, not a gymnasium.Env")
        if task.time_limit is not None:
            env = made[-1] = TimeLimit(env, task.time_limit)
        envs[index] = _Env(env, index, task, records)

    # The caller may close its end at any time: then errors have no recipient.
    with connection:
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(b"")
            failure = for_all(make, lambda index: "in its constructor")
            connection.send_bytes(failure)
            while not failure:
                message = connection.recv_bytes()
                if message == GO:
                    failure = for_all(
                        lambda index: envs[index].advance(),
                        lambda index: "in reset" if records["reset"][index] else "in step",
                    )
                    connection.send_bytes(failure)
                elif message.startswith(DRAW):
                    one = [int(message.removeprefix(DRAW))]
                    failure = for_all(
                        lambda index: drawn.append(envs[index].picture()),
                        lambda index: "in render",
                        one,
                    )
                    connection.send_bytes(failure or drawn.pop())
                else:
                    break
        answer = next(filter(None, [closed(env) for env in made]), b"")
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)


def failure_of(error: BaseException, **where: Any) -> bytes:
    """Encodes an exception as JSON: ``error`` (one line),
    ``refused`` (a ``ConfigError``), ``traceback``, ``where``.
    """
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    refused = error.with_flags if isinstance(error, ConfigError) else ""
    return json.dumps(
        {**where, "refused": refused, "error": line, "traceback": traceback.format_exc()}
    ).encode()


def closed(env: Any) -> bytes:
    """Closes an environment; returns ``failure_of`` its error, or an empty message."""
    try:
        env.close()
    except BaseException as error:
        return failure_of(error)
    return b""


def send_description(connection: Connection, env: str, options: Mapping[str, Any]) -> None:
    """Makes one environment and closes it.

    Sends an empty message when the worker is up, then a ``Description`` in JSON or ``failure_of``
    the error, with ``missing`` True if a library is not installed, and finally the result of
    ``closed``.
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
    import gymnasium  # noqa: F401  imported before the worker is up, so it does not count as the environments' time

    if memory:
        task = Task(**request)
        serve(connection, task, open_records(memory[0], task.fields))
    else:
        send_description(connection, *request)


if __name__ == "__main__":
    main()
