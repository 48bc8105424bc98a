"""Gymnasium environments, registered ones and the user's own, stepped by worker threads or worker processes."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config import BACKENDS
from jaxrl_dist.envs import worker as env_worker
from jaxrl_dist.envs.base import UNWRAPPED, EpisodeCounter, Wrappers, check_finite, checked_action, parse_option
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import EnvSpec, EpisodeStats, Timestep

_START_SECONDS = 60.0
"""In which a worker process must be up, on a machine that is busy; its environments' own time counts from there."""
_CLOSE_SECONDS = 5.0
"""In which environments must close; one second where they have stopped answering before."""


def ids() -> list[str]:
    """The ids in Gymnasium's registry, in its order; not all have what they need installed."""
    import gymnasium  # here, not above: it takes half a second, which other backends need not wait

    # Those left out run any environment of the older Gym that an option names: code that a file could choose.
    return [name for name in gymnasium.registry if not name.startswith(("GymV21", "GymV26"))]


Description = TypeVar("Description")


def look(env_id: str, texts: Mapping[str, str], timeout: float, describe: Callable[[Any], Description]) -> Description:
    """Makes a first environment, and gives what ``describe`` says of it.

    Args:
      env_id: ``ID`` of Gymnasium's registry, or ``MODULE:NAME``: a function or class of the module that makes an
        environment, or an id that importing it registers.
      texts: ``--env-options``.
      timeout: seconds.

    Raises:
      ConfigError: there is none of that name or with these options, a library that it needs is not installed, or its
        spaces are such as no policy handles.
      EnvError: its code raised something else.
      TimeoutError: it did not come back in time.
    """
    from gymnasium.error import Error

    answer: Future[Description] = Future()

    def run() -> None:
        try:
            answer.set_result(describe(env_worker.construct(env_id, options(env_id, texts))))
        except BaseException as error:
            answer.set_exception(error)

    # In a thread, because the user's code may hang.
    threading.Thread(target=run, name=f"gymnasium:{env_id}", daemon=True).start()
    if not futures.wait([answer], timeout).done:
        raise TimeoutError(f"gymnasium:{env_id}: making an environment has taken longer than {timeout:g} s")
    try:
        return answer.result()
    except (ConfigError, EnvError):
        raise
    except (Error, ImportError) as error:
        raise ConfigError(f"gymnasium:{env_id} cannot be made here: {error}") from error
    except BaseException as error:  # SystemExit too
        line = f"{type(error).__name__}: {error}"
        raise EnvError(f"gymnasium:{env_id} cannot be made: {line}", traceback.format_exc()) from error


def describe(env_id: str, made: Any, wrappers: Wrappers) -> EnvSpec:
    """What a ``gymnasium.Env`` says of itself; closes it.

    Raises:
      ConfigError: its spaces are such as no policy handles.
      TypeError: it is no ``gymnasium.Env``.
    """
    env = env_worker.checked(env_id, made)
    try:
        observation, action = (
            space_of(getattr(env, f"{name}_space"), env_id, f"{name}s") for name in ("observation", "action")
        )
        if isinstance(action, Box) and not np.issubdtype(action.dtype, np.floating):
            raise ConfigError(f"gymnasium:{env_id} has Box actions of {action.dtype}; a Box of floats works")
        limit = env.get_wrapper_attr("_max_episode_steps") if env.has_wrapper_attr("_max_episode_steps") else None
        return EnvSpec(env_id, "gymnasium", _family(env), observation, action, wrappers.limit(limit))
    finally:
        env.close()


def _family(env: Any) -> str:
    for kind in type(env.unwrapped).__mro__:  # the user's class may extend one of Gymnasium's
        match kind.__module__.split("."):
            case ["gymnasium", "envs", family, _, *_]:
                return family
            case ["ale_py", *_]:
                return "atari"
    return "gymnasium"


def space_of(space: Any, env_id: str, what: str) -> Space:
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return MultiDiscrete(tuple(int(n) for n in space.nvec.flat))
    if kind == "MultiBinary":
        return MultiDiscrete((2,) * math.prod(space.shape))
    if kind == "Box":
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(space.dtype))  # 64 bits become 32
        low, high = space.low, space.high
        if np.issubdtype(dtype, np.integer):
            low, high = (np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max) for bound in (low, high))
        with np.errstate(over="ignore"):  # what does not fit float32 is infinite
            return Box(tuple(space.shape), dtype, low.astype(dtype), high.astype(dtype))
    raise ConfigError(
        f"gymnasium:{env_id} has {kind} {what}; Discrete, MultiDiscrete, MultiBinary and Box work, and wrappers such "
        "as FlattenObservation make a Box of others"
    )


def options(env_id: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments from ``--env-options``.

    They are read as the type of the argument's default; where it has none, as the first of int, float, bool and str
    that fits.

    Raises:
      ConfigError: no such environment, no such option, one that is missing, or an unreadable value.
      Exception: whatever importing the environment's module raises.
    """
    name = f"gymnasium:{env_id}"
    function, defaults = _function(env_id)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some that are written in C have none
        parameters = inspect.signature(lambda **options: None).parameters.values()
    named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    defaults = {x.name: x.default for x in named} | defaults
    for key in texts:
        if key not in defaults and all(x.kind is not x.VAR_KEYWORD for x in parameters):
            known = ", ".join(sorted(defaults)) or "none"
            raise ConfigError(f"{name} has no option {key!r}{did_you_mean(key, defaults)}; it has: {known}")
    for key, default in defaults.items():
        if default is inspect.Parameter.empty and key not in texts:
            raise ConfigError(f"{name} needs an option: --env-options {key}=...")
    unknown = (None, inspect.Parameter.empty)
    return {
        key: _guess(text) if defaults.get(key) in unknown else parse_option(name, key, text, defaults[key])
        for key, text in texts.items()
    }


def _function(env_id: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes the environment, and arguments whose defaults its signature does not show.

    Raises:
      ConfigError: there is no such environment.
      Exception: whatever importing its module raises.
    """
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    module, _, _ = env_id.rpartition(":")
    try:
        function, name = env_worker.creator(env_id)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another
        near = did_you_mean(module, BACKENDS)
        raise ConfigError(
            f"--env {env_id}: unknown backend {module!r}{near}, and no module of that name can be imported"
        ) from None
    if callable(function):
        return function, {}
    if name in gymnasium.registry:
        spec = gymnasium.registry[name]
        entry = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        limit = spec.max_episode_steps or -1  # Gymnasium's spelling of none
        return entry or gymnasium.make, {"max_episode_steps": limit, **spec.kwargs}
    near = did_you_mean(name, [key for key, value in vars(sys.modules[module]).items() if callable(value)])
    raise ConfigError(f"--env {env_id}: the module {module} has no function {name!r}{near}")


def _guess(text: str) -> int | float | bool | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def drawn(spec: EnvSpec, num_envs: int, seed: int, options: Mapping[str, Any], *how: Any) -> Gymnasium:
    """As ``Gymnasium``, of environments that are to be drawn.

    Raises:
      ConfigError: they cannot be.
    """
    function, _ = env_worker.creator(spec.id)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    named = any(x.name == "render_mode" or x.kind is x.VAR_KEYWORD for x in parameters.values())
    if named or not callable(function):  # others may know how to draw without being told
        options = {"render_mode": "rgb_array", **options}
    try:
        return Gymnasium(spec, num_envs, seed, options, *how)
    except EnvError as error:  # without these options one has been made before
        hint = "; it has to take render_mode" if "render_mode" in str(error) else ""
        raise ConfigError(f"gymnasium:{spec.id} cannot be drawn: {error}{hint}") from error


class _Worker(NamedTuple):
    indices: range
    connection: Connection
    runner: threading.Thread | subprocess.Popen[bytes]

    def stop(self) -> None:
        """Tells the worker to end."""
        with contextlib.suppress(OSError):  # it may have ended already
            self.connection.send_bytes(b"")
        self.connection.close()

    def join(self, patience: float) -> None:
        """Waits until the worker has ended; a thread that hangs in foreign code is left behind, a process is killed."""
        if isinstance(self.runner, threading.Thread):
            self.runner.join(patience)
            return
        try:
            self.runner.wait(patience)
        except subprocess.TimeoutExpired:
            self.runner.kill()
            self.runner.wait(_CLOSE_SECONDS)
        assert self.runner.stdin is not None
        self.runner.stdin.close()


class Gymnasium:
    """``num_envs`` Gymnasium environments: a ``HostEnv``.

    As many workers as there are CPU cores, each with a share of the environments. Data goes through memory that they
    share with the caller; over a pipe go the calls, and what went wrong. After an error, all that is left is
    ``close``.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        seed: int,
        options: Mapping[str, Any],
        workers: Literal["threads", "processes"] = "threads",
        timeout: float = 120.0,
        wrappers: Wrappers = UNWRAPPED,
    ) -> None:
        """``seed`` and an environment's index make that environment's seed.

        Args:
          options: keyword arguments of the environment.
          timeout: seconds in which each call of an environment must come back.
          wrappers: of these, frames are not stacked here.

        Raises:
          EnvError: an environment cannot be made.
          TimeoutError: making one takes too long.
        """
        self.spec = spec
        self.num_envs = num_envs
        self._timeout = timeout
        self._steps = 0
        self._ended = np.zeros(num_envs, bool)
        self._episodes = EpisodeCounter(num_envs)
        seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs) & 0x7FFFFFFF]
        fields = env_worker.record_fields(spec.observation, spec.action)
        descriptor = os.memfd_create("environments")
        self._workers: list[_Worker] = []
        self._pending: list[_Worker] = []
        try:
            os.truncate(descriptor, num_envs * env_worker.record_dtype(fields).itemsize)
            self._records = env_worker.open_records(descriptor, fields)
            cores = len(os.sched_getaffinity(0))
            for part in np.array_split(np.arange(num_envs), min(num_envs, cores)):
                indices = range(int(part[0]), int(part[-1]) + 1)
                own = [seeds[i] for i in indices]
                extra = wrappers.action_repeat, wrappers.own_limit
                task = env_worker.Task(spec.id, options, indices.start, own, fields, *extra)
                start = self._thread if workers == "threads" else self._process
                self._workers.append(_Worker(indices, *start(task, descriptor)))
            self._collect(max(timeout, _START_SECONDS))
            self._collect(timeout)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _thread(self, task: env_worker.Task, _: int) -> tuple[Connection, threading.Thread]:
        ours, theirs = multiprocessing.Pipe()
        name = f"{self._name}[{task.first}:{task.first + len(task.seeds)}]"
        thread = threading.Thread(target=env_worker.serve, args=(theirs, task, self._records), name=name, daemon=True)
        thread.start()
        return ours, thread

    def _process(self, task: env_worker.Task, descriptor: int) -> tuple[Connection, subprocess.Popen[bytes]]:
        # Not by multiprocessing: it would import the caller's script once more in each process, and forking a process
        # that runs JAX's threads may hang.
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", env_worker.__name__, str(theirs.fileno()), str(descriptor)],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(), descriptor),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        with contextlib.suppress(OSError):
            ours.send_bytes(json.dumps(task._asdict()).encode())
        return ours, process

    @property
    def _name(self) -> str:
        return f"{self.spec.backend}:{self.spec.id}"

    def reset(self) -> np.ndarray:
        self._ended[:] = True
        self._advance()
        self._ended = np.zeros(self.num_envs, bool)
        self._episodes = EpisodeCounter(self.num_envs)
        return self._records["obs"].copy()

    def step(self, action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
        self._records["action"][:] = checked_action(self.spec, action, self._steps)
        self._advance()
        self._steps += 1
        valid = ~self._ended
        obs, reward, terminated = (self._records[name].copy() for name in ("obs", "reward", "terminated"))
        truncated = self._records["truncated"] & ~terminated
        self._ended = terminated | truncated
        episodes = self._episodes.add(reward, valid, self._ended)
        return Timestep(obs, reward, terminated, truncated, valid), episodes

    def render(self, index: int) -> np.ndarray:
        worker = next(worker for worker in self._workers if index in worker.indices)
        try:
            worker.connection.send_bytes(env_worker.DRAW + str(index).encode())
            there = worker.connection.poll(self._timeout)
            answer, _, pixels = (worker.connection.recv_bytes() if there else b"").partition(b"\n")
        except (EOFError, OSError):
            raise self._dead(worker) from None
        if not there:
            self._pending = [worker]
            raise TimeoutError(f"{self._name}: environment {index} has not drawn itself within {self._timeout:g} s")
        what = json.loads(answer)
        if "error" in what:
            raise ConfigError(f"{self._name} cannot be drawn: {what['error']}")
        return np.frombuffer(pixels, np.uint8).reshape(what["shape"])

    def close(self) -> None:
        deadline = time.monotonic() + (1.0 if self._pending else _CLOSE_SECONDS)
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._workers = []

    def _advance(self) -> None:
        """Steps each environment, or resets it where the last step has ended its episode."""
        if self._pending or not self._workers:
            raise RuntimeError(f"{self._name}: these environments have failed or are closed; make new ones")
        self._records["reset"][:] = self._ended
        for worker in self._workers:
            with contextlib.suppress(OSError):  # one that has died is met below
                worker.connection.send_bytes(env_worker.GO)
        self._collect(self._timeout)
        self._check()

    def _collect(self, limit: float) -> None:
        """Waits until every worker has answered once.

        Raises:
          EnvError: an environment has raised something, or a worker process has died.
          TimeoutError: an environment takes longer than ``limit`` seconds.
        """
        began = time.monotonic()
        self._pending = list(self._workers)
        while self._pending:
            # A worker's environments come one after the other, and each has the full time.
            turned = [max(began, self._since(worker).max()) for worker in self._pending]
            patience = min(turned) + limit - time.monotonic()
            if patience <= 0:
                stuck = ", ".join(str(w.indices[int(self._since(w).argmax())]) for w in self._pending)
                raise TimeoutError(
                    f"{self._name}: no answer from environment {stuck} at step {self._steps} within {limit:g} s "
                    "(--env-timeout)"
                )
            ready = wait([worker.connection for worker in self._pending], patience)
            for worker in [worker for worker in self._pending if worker.connection in ready]:
                try:
                    failure = worker.connection.recv_bytes()
                except (EOFError, OSError):
                    raise self._dead(worker) from None
                if failure:
                    what = json.loads(failure)
                    line = f"environment {what['index']} at step {self._steps}, {what['doing']}: {what['error']}"
                    raise EnvError(f"{self._name}: {line}", what["traceback"])
                self._pending.remove(worker)

    def _since(self, worker: _Worker) -> np.ndarray:
        return self._records["since"][worker.indices.start : worker.indices.stop]

    def _dead(self, worker: _Worker) -> EnvError:
        how = "has ended"
        if isinstance(worker.runner, subprocess.Popen):
            code = worker.runner.wait(_CLOSE_SECONDS)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        first, last = worker.indices[0], worker.indices[-1]
        return EnvError(f"{self._name}: the worker of environments {first} to {last} {how} at step {self._steps}")

    def _check(self) -> None:
        """Looks at what the environments gave back.

        Raises:
          EnvError: something that is no finite number, or an observation outside a discrete space.
        """
        obs, space = self._records["obs"], self.spec.observation
        check_finite(self.spec, self._steps, "observation", obs)
        check_finite(self.spec, self._steps, "reward", self._records["reward"])
        if not isinstance(space, Box):
            wrong = (obs < 0) | (obs >= np.asarray(space.n if isinstance(space, Discrete) else space.nvec))
            if wrong.any():
                index = int(np.argwhere(wrong)[0, 0])
                where = f"environment {index} at step {self._steps}"
                raise EnvError(f"{self._name}: {where} gave the observation {obs[index]}, outside {space}")
