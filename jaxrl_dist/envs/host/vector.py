"""Gymnasium environments side by side, stepped by worker threads or worker processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_dist.envs.base import UNWRAPPED, Wrappers, label_of, outcome
from jaxrl_dist.envs.checking import check_finite, checked_action
from jaxrl_dist.envs.episodes import EpisodeCounter
from jaxrl_dist.envs.host import records, runners
from jaxrl_dist.envs.host import worker as env_worker
from jaxrl_dist.envs.host.runners import Worker, process, warn_of_closing
from jaxrl_dist.envs.making import creator, parameters_of
from jaxrl_dist.envs.native import NO_MASK, Mask
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.spaces import Box, leaves, num_choices, paths
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep


def drawn(
    spec: EnvSpec, seeds: Sequence[int], options: Mapping[str, object], **settings: Any
) -> Gymnasium:
    """Makes ``Gymnasium`` with environments that can be drawn.

    Raises:
      ConfigError: they cannot be drawn.
    """
    function, _ = creator(spec.id)
    if not callable(function) or any(
        x.name == "render_mode" or x.kind is x.VAR_KEYWORD for x in parameters_of(function)
    ):
        # other functions may draw without the argument
        options = {"render_mode": "rgb_array", **options}
    try:
        return Gymnasium(spec, seeds, options, **settings)
    except EnvError as error:  # making one without render_mode has worked before
        hint = "; it must accept render_mode" if "render_mode" in str(error) else ""
        raise ConfigError(f"{label_of(spec)} cannot be drawn: {error}{hint}") from error


class Gymnasium:
    """``num_envs`` Gymnasium environments: a ``HostEnv``.

    One worker per CPU core steps a share of the environments. Data goes through shared memory;
    calls and errors go through a pipe. After an error, only ``close`` works.
    """

    def __init__(
        self,
        spec: EnvSpec,
        seeds: Sequence[int],
        options: Mapping[str, object],
        workers: Literal["threads", "processes"] = "threads",
        timeout: float = 120.0,
        wrappers: Wrappers = UNWRAPPED,
        mask: Mask = NO_MASK,
        agents: Sequence[str] = (),
    ) -> None:
        """Makes the environments.

        Args:
          seeds: one per environment.
          options: keyword arguments of the environment.
          timeout: seconds within which each call of an environment must return.
          wrappers: applied here, except ``frame_stack``.
          mask: where the environment says which actions are legal.
          agents: the agents of a ``pettingzoo.Parallel``, each with metrics of its own.

        Raises:
          EnvError: an environment cannot be made.
          TimeoutError: making one takes too long.
        """
        self.spec = spec
        self._name = label_of(spec)
        self.num_envs = len(seeds)
        self._timeout = timeout
        self._steps = 0
        self._agents = [*map(str, agents)]
        self._workers: list[Worker] = []
        self._pending: list[Worker] = []
        task = env_worker.Task(
            spec.id,
            options,
            first=0,
            seeds=list(seeds),
            fields=records.record_fields(
                spec.observation, spec.action, spec.info_metrics, self._agents
            ),
            action_repeat=wrappers.action_repeat,
            time_limit=wrappers.own_limit,
            mask=NO_MASK if mask.where == "part" else mask,
            metrics=spec.info_metrics,
            agents=self._agents,
        )
        try:
            self._start(task, workers)
            self._collect(max(timeout, runners.START_SECONDS))
            self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, task: env_worker.Task, workers: Literal["threads", "processes"]) -> None:
        """Starts a worker per CPU core, each with a share of the environments of ``task``."""
        descriptor = os.memfd_create("environments")
        try:
            os.truncate(descriptor, self.num_envs * records.record_dtype(task.fields).itemsize)
            self._records = records.open_records(descriptor, task.fields)
            cores = len(os.sched_getaffinity(0))
            for part in np.array_split(np.arange(self.num_envs), min(self.num_envs, cores)):
                indices = range(int(part[0]), int(part[-1]) + 1)
                share = task._replace(
                    first=indices.start, seeds=task.seeds[indices.start : indices.stop]
                )
                if workers == "threads":
                    self._workers.append(Worker(indices, *self._thread(share)))
                else:
                    self._workers.append(Worker(indices, *process(share._asdict(), descriptor)))
        finally:
            os.close(descriptor)

    def _thread(self, task: env_worker.Task) -> tuple[Connection, threading.Thread]:
        ours, theirs = multiprocessing.Pipe()
        name = f"{self._name}[{task.first}:{task.first + len(task.seeds)}]"
        thread = threading.Thread(
            target=env_worker.serve, args=(theirs, task, self._records), name=name, daemon=True
        )
        thread.start()
        return ours, thread

    def _observations(self) -> PyTree:
        return jax.tree.map(
            lambda path: self._records[path].copy(), paths(self.spec.observation, "obs")
        )

    def reset(self) -> PyTree:
        self._ended = np.ones(self.num_envs, bool)
        self._advance()
        self._ended = np.zeros(self.num_envs, bool)
        self._episodes = EpisodeCounter(self.num_envs, self.spec.info_metrics, self._agents)
        return self._observations()

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        for path, part in leaves(checked_action(self.spec, action, self._steps), "action").items():
            self._records[path][:] = part
        self._advance()
        self._steps += 1
        reward, *flags = (
            self._records[name].copy() for name in ("reward", "terminated", "truncated")
        )
        valid, terminated, truncated = outcome(self._ended, *flags)
        self._ended = terminated | truncated
        info = {metric: self._records[f"info/{metric}"] for metric in self.spec.info_metrics}
        episodes = self._episodes.add(reward, valid, self._ended, info)
        return Timestep(self._observations(), reward, terminated, truncated, valid), episodes

    def render(self, index: int) -> np.ndarray:
        worker = next(worker for worker in self._workers if index in worker.indices)
        try:
            worker.connection.send_bytes(env_worker.DRAW + str(index).encode())
            drawn = worker.receive(self._timeout)
        except (EOFError, OSError):
            raise self._dead(worker) from None
        if drawn is None:
            self._pending = [worker]
            raise TimeoutError(
                f"{self._name}: environment {index} has not drawn itself within {self._timeout:g} s"
            )
        answer, _, pixels = drawn.partition(b"\n")
        head = json.loads(answer)
        if "error" in head:
            raise ConfigError(f"{self._name} cannot be drawn: {head['error']}")
        return np.frombuffer(pixels, np.uint8).reshape(head["shape"])

    def close(self) -> None:
        workers = self._workers
        self._workers = []
        patience = 1.0 if self._pending else runners.CLOSE_SECONDS
        deadline = time.monotonic() + patience

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        for worker in workers:
            worker.stop()
        answers = [worker.last_words(left()) for worker in workers]
        for worker in workers:
            worker.connection.close()
            worker.join(left())
        failures = [answer for answer in answers if answer != b""]
        if failures and not self._pending:
            warn_of_closing(self._name, failures[0])

    def _advance(self) -> None:
        """Steps each environment, or resets it if the last step ended its episode."""
        if self._pending or not self._workers:
            raise RuntimeError(
                f"{self._name}: these environments have failed or are closed; make new ones"
            )
        self._records["reset"][:] = self._ended
        for worker in self._workers:
            with contextlib.suppress(OSError):  # ``_collect`` reports a dead worker
                worker.connection.send_bytes(env_worker.GO)
        self._collect(self._timeout)
        self._check()

    def _collect(self, limit: float) -> None:
        """Waits until every worker has answered once.

        Raises:
          EnvError: an environment raised an error, or a worker process died.
          TimeoutError: an environment takes longer than ``limit`` seconds.
        """
        began = now = time.monotonic()
        # ``stopped``: seconds that this process, and perhaps its workers, spent stopped
        stopped = nap = 0.0
        self._pending = list(self._workers)
        while self._pending:
            before = now
            now = time.monotonic()
            stopped += max(0.0, now - before - nap)
            # A worker steps its environments one after the other, and each has the full time limit.
            turns = [max(began, self._since(worker).max()) for worker in self._pending]
            patience = min(turns) + limit + stopped - now
            nap = min(max(patience, 0.0), 1.0)
            ready = wait([worker.connection for worker in self._pending], nap)
            if not ready and patience <= 0:
                latest = [
                    str(worker.indices[int(self._since(worker).argmax())])
                    for worker in self._pending
                ]
                raise TimeoutError(
                    f"{self._name}: no answer from environment {', '.join(latest)} at step "
                    f"{self._steps} within {limit:g} s (--env-timeout)"
                )
            for worker in [worker for worker in self._pending if worker.connection in ready]:
                self._check_answer(worker)
                self._pending.remove(worker)

    def _check_answer(self, worker: Worker) -> None:
        """Receives a worker's answer, and raises what it reports,
        or ``EnvError`` if the worker has died.
        """
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            raise self._dead(worker) from None
        if answer:
            failure = json.loads(answer)
            if failure["refused"]:
                raise ConfigError(failure["refused"].replace("the environment", self._name, 1))
            raise EnvError(
                f"{self._name}: environment {failure['index']} at step {self._steps}, "
                f"{failure['doing']}: {failure['error']}",
                failure["traceback"],
            )

    def _since(self, worker: Worker) -> np.ndarray:
        return self._records["since"][worker.indices.start : worker.indices.stop]

    def _dead(self, worker: Worker) -> EnvError:
        return EnvError(
            f"{self._name}: the worker of environments {worker.indices[0]} to "
            f"{worker.indices[-1]} {worker.end()} at step {self._steps}"
        )

    def _check(self) -> None:
        """Raises ``EnvError`` if a number is not finite,
        or an observation is outside a discrete space.
        """
        check_finite(self.spec, self._steps, "reward", self._records["reward"])
        for path, space in leaves(self.spec.observation, "obs").items():
            obs = self._records[path]
            part = path.removeprefix("obs").removeprefix("/")
            check_finite(self.spec, self._steps, "observation", {part: obs} if part else obs)
            if isinstance(space, Box):
                continue
            wrong = np.argwhere((obs < 0) | (obs >= np.asarray(num_choices(space))))
            if len(wrong):
                index = wrong[0, 0]
                subject = f"the observation {part}" if part else "the observation"
                raise EnvError(
                    f"{self._name}: environment {index} at step {self._steps} gave {subject} "
                    f"{obs[index]}, outside {space}"
                )
