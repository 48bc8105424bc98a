"""A stand-in for Ray within one process: its actors are threads, and what they send is pickled."""

from __future__ import annotations

import pickle
import queue
import threading
import time
import types
from collections.abc import Callable
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ActorDiedError(RayError):
    def __init__(self, text: str = "it died", *, actor_init_failed: bool = False) -> None:
        super().__init__(text)
        self.actor_init_failed = actor_init_failed


class Reference:
    """A value that may not be there yet."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._value: bytes | Exception = b""
        self.bytes = 0

    def set(self, value: Any) -> None:
        if self._ready.is_set():
            return
        if isinstance(value, Exception):
            self._value = value
        else:
            self._value = pickle.dumps(value, protocol=5)
            self.bytes = len(self._value)
        self._ready.set()

    def wait(self, seconds: float | None) -> bool:
        return self._ready.wait(seconds)

    def get(self) -> Any:
        self._ready.wait()
        if isinstance(self._value, Exception):
            raise self._value
        return pickle.loads(self._value)


class Process:
    """An actor of Ray's."""

    def __init__(self, ray: Ray, kind: type, number: int) -> None:
        self.ray = ray
        self.number = number
        self.instance = kind()
        self.dead = False
        self.calls = list[str]()
        self._pending = set[Reference]()
        self._queues = {group: queue.Queue[Any]() for group in ("", "aside")}
        for calls in self._queues.values():
            threading.Thread(target=self._work, args=(calls,), daemon=True).start()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, group: str, args: tuple[Any, ...]) -> Reference:
        reference = Reference()
        if self.dead:
            reference.set(ActorDiedError())
        else:
            self._pending.add(reference)
            self.calls.append(name)
            self._queues[group].put((name, args, reference))
        return reference

    def _work(self, calls: queue.Queue[Any]) -> None:
        while not self.dead:
            name, args, reference = calls.get()
            values = [x.get() if isinstance(x, Reference) else x for x in args]
            if self.ray.before(self, name):
                continue
            try:
                reference.set(getattr(self.instance, name)(*values))
            except Exception as error:
                reference.set(RayTaskError(error))
            self._pending.discard(reference)

    def kill(self) -> None:
        self.dead = True
        self.instance._stopping.set()  # its threads cannot be killed, and end soon
        for reference in list(self._pending):
            reference.set(ActorDiedError())


class Method:
    def __init__(self, process: Process, name: str, group: str = "") -> None:
        self._process = process
        self._name = name
        self._group = group

    def options(self, concurrency_group: str) -> Method:
        return Method(self._process, self._name, concurrency_group)

    def remote(self, *args: Any) -> Reference:
        return self._process.call(self._name, self._group, args)


class Ray(types.ModuleType):
    """The parts of the module ``ray`` that the package uses."""

    __version__ = "2.60.0"

    def __init__(self, cpus: float = 4.0) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(
            RayError=RayError, RayTaskError=RayTaskError, ActorDiedError=ActorDiedError
        )
        self.processes = list[Process]()
        self.before: Callable[[Process, str], bool] = lambda process, name: False
        """Called before each method: True leaves it undone and unanswered."""
        self.addresses = list[str]()
        self.cpus = cpus
        self.sizes = list[int]()
        """Bytes of what was taken."""
        self._initialized = False
        self._lock = threading.Lock()

    def init(self, address: str, **options: Any) -> None:
        self.addresses.append(address)
        self._initialized = True

    def is_initialized(self) -> bool:
        return self._initialized

    def shutdown(self) -> None:
        self._initialized = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.cpus / 2}} for _ in range(2)]

    def put(self, value: Any) -> Reference:
        reference = Reference()
        reference.set(value)
        return reference

    def get(self, reference: Reference) -> Any:
        value = reference.get()
        self.sizes.append(reference.bytes)
        return value

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Any], list[Any]]:
        ready = references[0].wait(timeout)
        return (references, []) if ready else ([], references)

    def kill(self, process: Process) -> None:
        process.kill()

    def remote(self, **options: Any) -> Callable[[type], Any]:
        def kind(made: type) -> Any:
            def start() -> Process:
                with self._lock:
                    self.processes.append(Process(self, made, len(self.processes)))
                    return self.processes[-1]

            return types.SimpleNamespace(remote=start)

        return kind


def dies(rollouts: dict[int, int]) -> Callable[[Process, str], bool]:
    """Returns ``Ray.before`` by which processes die before one of their rollouts."""

    def before(process: Process, name: str) -> bool:
        if name != "rollout":
            return False
        done = process.__dict__.setdefault("done", 0)
        process.done = done + 1
        if rollouts.get(process.number) != done:
            return False
        process.kill()
        return True

    return before


def stays_silent(number: int) -> Callable[[Process, str], bool]:
    """Returns ``Ray.before`` by which a process answers nothing after its first rollout."""

    def before(process: Process, name: str) -> bool:
        if name == "rollout" and process.number == number:
            process.stopped = process.__dict__.get("stopped", -1) + 1
        return process.number == number and process.__dict__.get("stopped", 0) > 0

    return before


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not hold"
        time.sleep(0.01)
