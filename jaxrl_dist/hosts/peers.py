"""Exchanges values that all processes of a run must know before it continues.

Values travel through the key-value store of JAX's coordination service, on the host. No collective
of the devices waits for a process that is busy elsewhere, and each wait ends once a process is lost
or has failed. With one process, each function returns its argument.

All processes must call ``all_gather`` and the functions built on it in the same order;
the text ``about`` checks this.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from jaxrl_dist.errors import ProcessError

Result = TypeVar("Result")
Value = TypeVar("Value")
FAILED = "a failure"
WAIT_MS = 500
"""Milliseconds of a wait, after which a process checks whether the others are still alive."""


class World(NamedTuple):
    """The processes of a run, as one of them sees the others."""

    client: Any
    """Client of JAX's coordination service, a key-value store for text."""
    number: int
    """Number of this process."""
    size: int
    problem: Callable[[], ProcessError | None]
    """Returns why the run cannot continue, as soon as another process has failed."""


_world: World | None = None
_said = 0
_posts = 0


def join(world: World | None) -> None:
    """Makes this process one of the processes of a run; None: it is the only one again."""
    global _world, _said, _posts
    _world = world
    _said = 0
    _posts = 0


def world() -> World | None:
    """Returns the processes of the run; None: this is the only one."""
    return _world


def count() -> int:
    """Returns the number of processes."""
    return 1 if _world is None else _world.size


def index() -> int:
    """Returns the number of this process."""
    return 0 if _world is None else _world.number


def first() -> bool:
    """Returns whether this process writes the files, evaluates and shows progress."""
    return index() == 0


def all_gather(value: Value, about: str, within: float = math.inf) -> list[Value]:
    """Returns the values of all processes, in their order.

    Args:
      value: anything that JSON can hold.
      about: what the value is; all processes must agree on that.
      within: seconds to wait for the others.

    Raises:
      ProcessError: another process has failed, or is at another point of the program.
      TimeoutError: the others have not answered in time.
    """
    global _said
    if _world is None:
        return [value]
    _said += 1
    world = _world
    number = _said
    until = time.monotonic() + within
    message = json.dumps([about, value])
    if world.number:
        world.client.key_value_set(f"jaxrl/{number}/{world.number}", message)
        answer = _wait(world, f"jaxrl/{number}/all", until)
    else:
        others = [_wait(world, f"jaxrl/{number}/{other}", until) for other in range(1, world.size)]
        answer = f"[{','.join([message, *others])}]"
        world.client.key_value_set(f"jaxrl/{number}/all", answer)
        # all have read it, or they would not have answered
        world.client.key_value_delete(f"jaxrl/{number - 1}/")
    places, values = zip(*json.loads(answer), strict=True)
    if FAILED in places and about != FAILED:
        failed = places.index(FAILED)
        raise ProcessError(f"process {failed} has failed: {values[failed]}")
    for other, place in enumerate(places):
        if place != places[0]:
            raise ProcessError(
                f"the processes have lost each other: process {other} is at {place}, and process "
                f"0 at {places[0]}"
            )
    return list(values)


class Post:
    """Brings values of the other processes to process 0, from any thread, independently of
    ``all_gather``; see ``post``.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._name = f"jaxrl/post/{number}"

    def send(self, value: Any) -> None:
        """Sends process 0 this process's value, which JSON can hold."""
        self._world.client.key_value_set(f"{self._name}/{self._world.number}", json.dumps(value))

    def collect(self) -> dict[int, Any]:
        """Returns the value of each process but 0, and deletes them.

        Raises:
          ProcessError: another process has failed.
        """
        others = range(1, self._world.size)
        values = {
            other: json.loads(_wait(self._world, f"{self._name}/{other}", math.inf))
            for other in others
        }
        self._world.client.key_value_delete(f"{self._name}/")
        return values


def post() -> Post | None:
    """Returns the next ``Post``; all processes must ask in the same order. None:
    this is the only process.
    """
    global _posts
    _posts += 1
    if _world is None:
        return None
    return Post(_world, _posts)


def _wait(world: World, key: str, until: float) -> str:
    while True:
        try:
            return str(world.client.blocking_key_value_get(key, WAIT_MS))
        except Exception as error:  # jaxlib's own type
            if "DEADLINE_EXCEEDED" not in str(error):
                # if process 0 is lost, this process ends meanwhile, with a better line
                time.sleep(1.0)
                raise ProcessError(
                    f"the coordinator does not answer: {str(error).splitlines()[0]}"
                ) from None
        if (problem := world.problem()) is not None:
            raise problem
        if time.monotonic() > until:
            raise TimeoutError(f"the other processes did not reach {key}")


def run_everywhere(function: Callable[[], Result], about: str) -> Result:
    """Calls a function in all processes, and returns its result here;
    fails in all processes if it fails in one.

    Raises:
      Exception: what the function has raised here.
      ProcessError: it has failed in another process.
    """
    failed: Exception | None = None
    message = None
    try:
        result = function()
    except Exception as error:
        failed = error
        message = f"{type(error).__name__}: {error}"
    for process, problem in enumerate(all_gather(message, about)):
        if problem is not None and failed is None:
            raise ProcessError(f"process {process} has failed: {' '.join(problem.split())}")
    if failed is not None:
        raise failed
    return result


def any_of(wish: bool, about: str) -> bool:
    """Returns whether ``wish`` is True in any process."""
    return any(all_gather(bool(wish), about))


def minimum(number: int, about: str) -> int:
    """Returns the smallest ``number`` of all processes."""
    return int(min(all_gather(number, about)))


def broadcast(value: Value, about: str) -> Value:
    """Returns the value of process 0."""
    return all_gather(value, about)[0]


def fail_alike(message: str, within: float = 10.0) -> bool:
    """Returns whether all processes have failed at the same point,
    so that they can still save the run together.
    """
    try:
        all_gather(message, FAILED, within)
    except (ProcessError, TimeoutError):
        return False
    return True
