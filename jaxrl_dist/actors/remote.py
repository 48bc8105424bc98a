"""Actors in processes of a Ray cluster: each has its share of the environments, and acts on a
device of its node.

Source: RLlib's actors (Liang et al. 2018, https://arxiv.org/abs/1712.09381). The learner's process
has a thread for each, so that lags, rounds, counts and errors are as with actors in threads. A
version of the policy is put into Ray's object store once, and rollouts come back through it, each
frame once.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import cluster, transport
from jaxrl_dist.actors.pool import (
    Acted,
    ActorPool,
    Deliver,
    ParamStore,
    PoolOptions,
    Snapshot,
    mean_seconds,
)
from jaxrl_dist.actors.step import ActorJob, Rollouts
from jaxrl_dist.actors.transport import Answer, Launch, Start
from jaxrl_dist.checks import counted
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning, ProcessError, first_line
from jaxrl_dist.flow import WAKE_SECONDS

AHEAD_SECONDS = 0.02
"""Longest single wait for a rollout while the next one cannot be asked for yet: its policy is not
there."""
START_SECONDS = 20.0
"""Seconds without a process after which a warning says why that may be."""
END_SECONDS = 2.0
"""Seconds that a process has to close its environments."""

# --- One actor ------------------------------------------------------------------------------------


class Lost(Exception):
    """An actor's process has died, or does not answer."""


class Asked(NamedTuple):
    """A rollout that an actor has been asked for."""

    iteration: int
    snapshot: Snapshot
    number: np.int32
    answer: Any
    """Ray's reference to the ``Answer``."""


class RemoteActor:
    """An actor in another process, which a new one replaces if it is lost and ``max_restarts``
    allows it.
    """

    def __init__(
        self, pool: RemotePool, launch: Launch, launched: Any, start: Start, max_restarts: int
    ) -> None:
        """``launched`` is Ray's reference to the ``launch``."""
        self.restarts = 0
        """Times that the process or its environments have been replaced."""
        self.replaced = False
        """Whether no rollout of a new process has arrived since the last one was lost."""
        self.seconds = collections.defaultdict[str, float](float)
        """Seconds on each stage, of lost processes and of this one."""
        self.asked = collections.deque[Asked]()
        self._pool = pool
        self._launch = launch
        self._launched = launched
        self._start = start
        self._max_restarts = max_restarts
        self._seconds: Mapping[str, float] = {}
        """Of this process."""
        self._begin()

    def _begin(self) -> None:
        """Starts a process."""
        import ray

        config = self._launch.config
        kind = ray.remote(
            num_cpus=config.actor_cpus,
            num_gpus=config.actor_gpus,
            max_restarts=0,  # Ray's own would repeat seeds
            concurrency_groups={"aside": 1},
            scheduling_strategy="SPREAD",
        )(self._launch.process)
        self._process = kind.remote()
        self._where = ""
        self._alive: Any = None
        self._silent = 0.0
        self._seconds = {}
        start = self._start._replace(restarts=self.restarts)
        self._begun = self._process.begin.remote(transport.versions(), [self._launched], start)

    def ask(self, snapshot: Snapshot, iteration: int, number: np.int32) -> None:
        """Asks for a rollout, which the process makes after those that it was asked for before."""
        variables = self._pool.sent(snapshot)
        answer = self._process.rollout.remote(variables, iteration, number)
        self.asked.append(Asked(iteration, snapshot, number, answer))

    def take(self, ahead: Callable[[], bool]) -> tuple[Asked, Answer]:
        """Waits for the oldest rollout that has been asked for.

        Args:
          ahead: asks for the next one, and returns False if that cannot be done yet.

        Raises:
          ProcessError: the process is lost, once too often.
          Exception: what the process has raised.
        """
        while True:
            try:
                if self._begun is not None:
                    self._where = self._wait(self._begun, lambda: True)
                    self._begun = None
                answer: Answer = self._wait(self.asked[0].answer, ahead)
                break
            except Lost as lost:
                self._replace(lost)
        asked = self.asked.popleft()
        for text in answer.warnings:
            warnings.warn(text, EnvWarning, stacklevel=2)
        self.restarts = answer.restarts
        for name, seconds in answer.seconds.items():
            self.seconds[name] += seconds - self._seconds.get(name, 0.0)
        self._seconds = answer.seconds
        return asked, answer

    def _wait(self, reference: Any, ahead: Callable[[], bool]) -> Any:
        """Waits for a result of the process.

        Raises:
          Lost: the process has died, or is silent.
          Exception: what it has raised.
        """
        import ray

        while True:
            seconds = WAKE_SECONDS if ahead() else AHEAD_SECONDS
            try:
                ready, _ = ray.wait([reference], timeout=seconds)
                if self._pool.stopping:
                    raise RuntimeError("the actors are being closed")
                if ready:
                    return ray.get(reference)
                self._check_alive(seconds)
            except ray.exceptions.RayTaskError as error:
                raise self._cause(error) from None
            except ray.exceptions.RayError as error:
                if getattr(error, "actor_init_failed", False):
                    raise ConfigError(
                        f"{self._start.owner} cannot start in the Ray cluster: {_last_line(error)}; "
                        "install the same packages on each node"
                    ) from None
                raise Lost(f"its process has died ({type(error).__name__})") from None

    def _cause(self, error: Any) -> Exception:
        """Returns what the process has raised."""
        if isinstance(error.cause, Exception):
            cause = error.cause
        else:
            cause = EnvError(first_line(error), str(error))
        if self._where:
            cause.add_note(f"(in {self._name})")
        return cause

    def _check_alive(self, waited: float) -> None:
        """Asks whether the process answers; ``waited`` seconds have passed since the last call.

        They are counted, because a clock continues while this process is suspended.

        Raises:
          Lost: it does not answer.
        """
        import ray

        if self._alive is None:
            aside = self._process.alive.options(concurrency_group="aside")
            self._alive = aside.remote()
            self._silent = 0.0
        elif ray.wait([self._alive], timeout=0)[0]:
            ray.get(self._alive)
            self._alive = None
            self._silent = 0.0
        else:
            self._silent += waited
        if self._where:
            if self._silent > self._launch.config.lost_process_timeout:
                raise Lost(f"its process has not answered for {self._silent:.0f} s")
        elif self._silent > START_SECONDS:
            self._pool.warn_of_start()

    def _replace(self, lost: Lost) -> None:
        """Starts another process in place of a lost one.

        Raises:
          ProcessError: too many were lost.
        """
        self.close()
        if self.restarts >= self._max_restarts > 0:
            raise ProcessError(
                f"{self._name} is lost after {counted(self.restarts, 'restart')}: {lost}; a higher "
                "--max-restarts allows more"
            )
        if not self._max_restarts:
            raise ProcessError(
                f"{self._name} is lost: {lost}; with --on-actor-error restart, another process "
                "replaces it"
            )
        self.restarts += 1
        self.replaced = True
        warnings.warn(
            f"{self._name} continues in a new process (restart {self.restarts} of "
            f"{self._max_restarts}): {lost}",
            EnvWarning,
            stacklevel=2,
        )
        self._begin()
        oldest = self.asked[0]
        self.asked.clear()
        self.ask(oldest.snapshot, oldest.iteration, oldest.number)

    @property
    def _name(self) -> str:
        if self._where:
            return f"{self._start.owner}, {self._where}"
        return self._start.owner

    def close(self) -> None:
        """Ends the process, which closes its environments before."""
        import ray

        with contextlib.suppress(Exception):
            if self._where and self._silent < END_SECONDS:
                ended = self._process.end.options(concurrency_group="aside").remote()
                ray.wait([ended], timeout=END_SECONDS)
            ray.kill(self._process)


def _last_line(error: Exception) -> str:
    """Returns the last line of an error's message, which names the reason in a traceback."""
    return [line for line in str(error).strip().splitlines() if line.strip()][-1].strip()


# --- All of them ----------------------------------------------------------------------------------


class RemotePool(ActorPool):
    """An ``ActorPool`` with a thread that waits for each actor in another process."""

    def __init__(
        self,
        job: ActorJob,
        options: PoolOptions,
        store: ParamStore,
        deliver: Sequence[Deliver],
        launch: Launch,
        *,
        continuous: bool,
    ) -> None:
        """``continuous``: an actor's rollouts must follow each other without a gap."""
        import ray

        settings = {name: jax.config.values[name] for name in transport.SETTINGS}
        self._launch = launch._replace(settings=settings)
        try:
            self._launched = ray.put(self._launch)
        except TypeError as error:
            raise ConfigError(
                f"--actors-on ray cannot send the run's config to other processes: {error.__cause__}; "
                "name environments and networks by MODULE:NAME"
            ) from None
        self._continuous = continuous and options.max_restarts > 0
        self._actors = dict[int, RemoteActor]()
        self._lock = threading.Lock()
        self._warned = False
        self._sent = collections.OrderedDict[int, Any]()
        self._last = dict[int, Rollouts]()
        """The ``last_step`` of each actor, if there must be no gap."""
        self._held = dict[int, Acted]()
        """The first rollouts of new processes, after a ``gap``."""
        super().__init__(job, options, store, deliver)

    @property
    def restarts(self) -> int:
        """How many times actors have restarted, as processes or their environments."""
        return sum(actor.restarts for actor in list(self._actors.values()))

    @property
    def stopping(self) -> bool:
        """Whether the pool is being closed."""
        return self._stopping.is_set()

    def seconds(self) -> dict[str, float]:
        """As ``ActorPool.seconds``, of the actors' own processes: "parameters" are the seconds
        without a request.
        """
        actors = list(self._actors.values())
        return mean_seconds([actor.seconds for actor in actors])

    def sent(self, snapshot: Snapshot) -> Any:
        """Puts a version into Ray's object store, unless it is there, and returns its reference."""
        import ray

        with self._lock:
            if snapshot.version not in self._sent:
                self._sent[snapshot.version] = ray.put(jax.device_get(snapshot.state))
                if len(self._sent) > 1 + (self._options.lag or 0):
                    self._sent.popitem(last=False)
            return self._sent[snapshot.version]

    def warn_of_start(self) -> None:
        """Warns once that an actor's process has not started."""
        with self._lock:
            if self._warned:
                return
            self._warned = True
        needed = cluster.needs(self._launch.config)
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
        warnings.warn(
            f"an actor has not started for {START_SECONDS:g} s: either its process still imports, or "
            f"no node of the Ray cluster ({cluster.find_nodes()}) has {amounts or 'room'} free; "
            "`ray status` shows what is in use",
            EnvWarning,
            stacklevel=2,
        )

    def _compile(self, on: Mesh) -> Any:
        """Returns the program that unpacks rollouts on a device."""
        place = meshes.shardings(on, meshes.REPLICATED)
        return jax.jit(transport.unpacked, out_shardings=place)

    def _make(self, index: int, share: EnvSlice) -> RemoteActor:
        start = Start(share, f"actor {self._options.first + index}", 0)
        actor = RemoteActor(self, self._launch, self._launched, start, self._options.max_restarts)
        self._actors[index] = actor
        return actor

    def _act(self, index: int, actor: RemoteActor, iteration: int) -> Acted | None:
        if index in self._held:
            return self._held.pop(index)
        if not actor.asked:
            snapshot = self._snapshot(index, iteration)
            if snapshot is None:
                return None
            actor.ask(snapshot, iteration, self._number(index, iteration))
        asked, answer = actor.take(lambda: self._ask_ahead(index, actor, iteration + 1))
        rollouts = answer.experience.rollouts
        if rollouts is not None:
            rollouts = self._programs[index % len(self._programs)](rollouts)
        experience = answer.experience._replace(rollouts=rollouts)
        acted = Acted(asked.snapshot, experience, answer.episodes, answer.steps)
        following = acted
        if self._broken(index, actor):
            self._held[index] = acted
            following = self._blank(self._last[index], acted)
        actor.replaced = False
        if self._continuous and rollouts is not None:
            self._last[index] = transport.last_step(rollouts)
        return following

    def _broken(self, index: int, actor: RemoteActor) -> bool:
        """Returns whether the next rollout does not follow an actor's last one, but should."""
        return actor.replaced and index in self._last

    def _ask_ahead(self, index: int, actor: RemoteActor, iteration: int) -> bool:
        """Asks for the rollout after the one that is under way, so that the process does not wait
        while that one travels. Returns False if the policy for it is not there yet.
        """
        if len(actor.asked) > 1 or self._options.in_flight == 0 or self._broken(index, actor):
            return True
        lag = self._options.lag
        if lag is not None and self._store.version < iteration - lag:
            return False
        snapshot = self._snapshot(index, iteration)
        if snapshot is not None:
            actor.ask(snapshot, iteration, self._number(index, iteration))
        return True

    def _blank(self, last: Rollouts, following: Acted) -> Acted:
        """Returns what comes between the last rollout of a lost process and the first of the next
        one.
        """
        rollouts, digest = following.experience
        spec = self._job.source.spec
        return Acted(
            following.snapshot,
            transport.Experience(
                transport.gap(last, rollouts),
                # the priority of a window that nobody has computed
                jax.tree.map(lambda x: np.full_like(x, np.nan), digest),
            ),
            {
                name: no_episodes(1, part.info_metrics).merge()
                for name, part in spec.by_policy.items()
            },
            np.zeros_like(following.steps),
        )
