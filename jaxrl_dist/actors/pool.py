"""Actor threads that run alongside the learner: the store of their policies,
and the samples that they send.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device, host
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.actors.step import ActorJob, Stages
from jaxrl_dist.checks import counted
from jaxrl_dist.envs.base import EnvSlice, HostEnv
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.errors import EnvError, EnvWarning
from jaxrl_dist.flow import WAKE_SECONDS, Parallel
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import EnvSpec, EpisodeStats, Join, PyTree, Timestep, TrainState

JOINS = {"time/actor/": Join.SECONDS}
"""How members' metrics of the pool are joined, as ``Join`` says."""


class Snapshot(NamedTuple):
    """A version of the learner's state, for actors."""

    version: int
    state: TrainState
    """Without optimiser state and memory."""


class ParamStore:
    """The newest versions of the train state, on each device that acts.

    They are copies, because the learner donates its state to the next update.
    """

    def __init__(self, devices: Sequence[Mesh], keep: int = 1) -> None:
        """``devices`` are meshes of one device each; ``keep`` older versions stay available."""
        self._devices = list(dict.fromkeys(devices))
        self._versions: collections.deque[dict[Mesh, Snapshot]] = collections.deque(maxlen=keep + 1)
        self._changed = threading.Condition()
        self.version = -1

    def publish(self, state: TrainState) -> None:
        """Copies ``state`` as the newest version; the first is version 0."""
        slim = _copied(state._replace(opt_state=(), memory=()))
        version = self.version + 1
        copies = {
            device: Snapshot(version, meshes.put(slim, device, meshes.REPLICATED))
            for device in self._devices
        }
        jax.block_until_ready(list(copies.values()))
        with self._changed:
            self._versions.append(copies)
            self.version = version
            self._changed.notify_all()

    def latest(self, device: Mesh) -> Snapshot:
        """The newest version."""
        with self._changed:
            return self._versions[-1][device]

    def wake(self) -> None:
        """Wakes waiting threads so that they check whether to stop."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, version: int, device: Mesh, stopping: threading.Event) -> Snapshot | None:
        """Waits for a version; None if the pool is stopped first."""
        with self._changed:
            while self.version < version:
                if stopping.is_set():
                    return None
                self._changed.wait(WAKE_SECONDS)
            return self._versions[version - self.version - 1][device]


@jax.jit
def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


class Sample(NamedTuple):
    """One actor's processed rollout."""

    version: int
    """Of the policy that acted."""
    content: PyTree
    """The result of the actor's ``Deliver``."""
    episodes: Mapping[str, EpisodeStats]
    """Of each policy's episodes that ended in the rollout."""
    steps: np.ndarray
    """[2], the rollout's env steps and agent steps."""


Deliver = Callable[[Snapshot, PyTree, np.int32], PyTree]
"""``(snapshot, experience, number) -> content``: processes the ``Acted.experience`` of a rollout
before the actor sends it; no other rollout has that ``number``."""


class Acted(NamedTuple):
    """A rollout as it comes from the environments."""

    snapshot: Snapshot
    """The policy that acted."""
    experience: PyTree
    """The rollouts; from another process, a ``transport.Experience``."""
    episodes: PyTree
    steps: np.ndarray
    """As for ``Sample``."""


class PoolOptions(NamedTuple):
    """How actors run alongside the learner."""

    num_actors: int = 1
    """Actors of this process."""
    meshes: tuple[Mesh, ...] = ()
    """Meshes of one device each; actors take them in turn."""
    lag: int | None = None
    """Versions by which the acting policy lags behind the learner, exactly; None:
    actors use the newest."""
    gather: int | None = None
    """Number of samples that suffice once ``gather_deadline`` seconds have passed; None:
    one of every actor."""
    gather_deadline: float = 1.0
    free_running: bool = False
    """Learn from the replay memory while no new sample has arrived."""
    max_restarts: int = 0
    """How many times an actor's failed environments are recreated."""
    in_flight: int = 1
    """Samples of an actor that may wait while it fills the next rollout; with more, they get
    older."""
    first: int = 0
    """Number of this process's first actor among the actors of all processes."""
    all_actors: int | None = None
    """Actors of all processes; None: ``num_actors``."""


class ActorPool:
    """Runs each actor in a thread, until ``close``."""

    def __init__(
        self, job: ActorJob, options: PoolOptions, store: ParamStore, deliver: Sequence[Deliver]
    ) -> None:
        """``deliver`` has an entry for each actor."""
        self.stages = [Stages() for _ in range(options.num_actors)]
        self._job = job
        self._options = options
        self._store = store
        self._restarting: list[RestartingEnv] = []
        self._stopping = threading.Event()
        self._programs = [self._compile(on) for on in options.meshes]
        self._all_actors = options.all_actors or options.num_actors
        size = job.num_envs // self._all_actors
        firsts = ((options.first + index) * size for index in range(options.num_actors))
        shares = [EnvSlice(first, size, job.num_envs) for first in firsts]
        samples = [
            self._samples(index, share, deliver[index]) for index, share in enumerate(shares)
        ]
        self.streams: Parallel[Sample] = Parallel(
            samples, options.in_flight, self._stopping, "actor", job.stop
        )

    @property
    def restarts(self) -> int:
        """How many times environments have been recreated."""
        return sum(env.restarts for env in self._restarting)

    def seconds(self) -> dict[str, float]:
        """Mean seconds that an actor has spent on each stage; "start" ends with its first
        sample.
        """
        return mean_seconds([stages.seconds for stages in self.stages])

    def _compile(self, on: Mesh) -> Any:
        """Returns what the actors of a device share."""
        return compile_actor(self._job, on)

    def _make(self, index: int, share: EnvSlice) -> Any:
        """Makes an actor; called in the thread that will run it."""
        slot = index % len(self._options.meshes)
        max_restarts = self._options.max_restarts
        env = restarting_env(self._job, share, max_restarts, self._stopping, f"actor {index}")
        if env is not None:
            self._restarting.append(env)
        on = self._options.meshes[slot]
        return make_actor(self._job, on, self._programs[slot], share, self.stages[index], env)

    def _number(self, index: int, iteration: int) -> np.int32:
        """Returns the number of an actor's rollout, for ``Deliver``."""
        first = self._options.first + index
        return np.int32(iteration) * np.int32(self._all_actors) + np.int32(first)

    def _snapshot(self, index: int, iteration: int) -> Snapshot | None:
        """Waits for the policy of a rollout; None if the pool is stopped first."""
        on = self._options.meshes[index % len(self._options.meshes)]
        if self._options.lag is None:
            return self._store.latest(on)
        return self._store.wait_for(max(iteration - self._options.lag, 0), on, self._stopping)

    def _act(self, index: int, actor: Any, iteration: int) -> Acted | None:
        """Returns an actor's next rollout; None if the pool is stopped first."""
        stages = self.stages[index]
        stages.mark("other")
        snapshot = self._snapshot(index, iteration)
        stages.mark("parameters")
        if snapshot is None:
            return None
        rollouts, episodes, steps = actor.rollout(
            snapshot.state.variables, np.int32(iteration), snapshot.state.env_step
        )
        return Acted(snapshot, rollouts, episodes, steps)

    @in_32_bits
    def _samples(self, index: int, share: EnvSlice, deliver: Deliver) -> Iterator[Sample]:
        """Yields the samples of one actor, without end."""
        stages = self.stages[index]
        with contextlib.closing(self._make(index, share)) as actor:
            for iteration in itertools.count():
                acted = self._act(index, actor, iteration)
                if acted is None:
                    return
                number = self._number(index, iteration)
                content = jax.block_until_ready(deliver(acted.snapshot, acted.experience, number))
                stages.mark("sending")
                if not iteration:  # the first rollout has compiled the programs
                    stages.merge("start")
                try:
                    yield Sample(acted.snapshot.version, content, acted.episodes, acted.steps)
                finally:  # also if the pool is closed here
                    stages.mark("blocked")

    def close(self) -> None:
        """Ends the actors and closes their environments."""
        self._stopping.set()
        self._store.wake()
        self.streams.close()


def mean_seconds(actors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean over actors of their seconds on each stage, as metrics."""
    means = {}
    for name in dict.fromkeys(name for seconds in actors for name in list(seconds)):
        total = sum(seconds.get(name, 0.0) for seconds in actors)
        means[f"time/actor/{name}_s"] = total / len(actors)
    return means


def compile_actor(job: ActorJob, on: Mesh) -> Any:
    """Returns the programs of an actor on a device."""

    def compiled() -> Any:
        act_key, env_key = (rng.stream(job.seed, name) for name in (rng.Stream.ACT, rng.Stream.ENV))
        if job.source.is_pure:
            env = job.source.device()
            return device.compile_rollout(
                job.algorithm, env, on, job.rollout_length, act_key, env_key
            )
        return compile_acting(job.algorithm, job.source.spec, on, job.rollout_length, act_key)

    return job.once(("act", job.seed, on), compiled)


def make_actor(
    job: ActorJob,
    on: Mesh,
    programs: Any,
    share: EnvSlice,
    stages: Stages,
    env: RestartingEnv | None,
) -> host.HostActor | device.DeviceActor:
    """Returns an actor, which closes its environments.

    Args:
      programs: from ``compile_actor``.
      env: from ``restarting_env``.
    """
    if env is None:
        return device.DeviceActor(job, on, programs, share, stages)
    try:
        return host.HostActor(job.algorithm, env, on, job.rollout_length, programs, share, stages)
    except BaseException:
        env.close()
        raise


def restarting_env(
    job: ActorJob,
    share: EnvSlice,
    max_restarts: int,
    stopping: threading.Event,
    owner: str,
    restarts: int = 0,
) -> RestartingEnv | None:
    """Returns the environments of an actor, which have restarted so many times; None: they are pure
    functions.
    """
    if job.source.is_pure:
        return None

    def make(restarts: int) -> HostEnv:
        seed = rng.host_seed(job.seed, restarts) if restarts else job.seed
        return job.source.host(share, seed)

    return RestartingEnv(job.source.spec, share.size, make, max_restarts, stopping, owner, restarts)


@dataclasses.dataclass
class RestartingEnv:
    """A ``HostEnv`` that recreates its environments when they fail and loses unfinished episodes.

    The policy sees an unannounced reset: the failed step is invalid, and its observation is the
    first of the new environments. In the training data the episode is truncated there.
    """

    spec: EnvSpec
    num_envs: int
    make: Callable[[int], HostEnv]
    """Gets the number of restarts so far."""
    max_restarts: int
    stopping: threading.Event
    """Once it is set, each step raises an error, because a rollout may be long."""
    owner: str
    """Names the actor in messages."""
    restarts: int = 0
    _env: HostEnv | None = None

    def reset(self) -> PyTree:
        while True:
            self.close()
            try:
                self._env = self.make(self.restarts)
                return self._env.reset()
            except Exception as error:
                self._forgive(error)

    def step(self, action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
        assert self._env is not None, "reset comes first"
        if self.stopping.is_set():
            raise RuntimeError("the actors are being closed")
        try:
            return self._env.step(action)
        except Exception as error:
            self._forgive(error)

        def begun(spec: EnvSpec, obs: PyTree) -> tuple[Timestep, EpisodeStats]:
            rows = self.num_envs // self.spec.num_agents * spec.num_agents
            none = np.zeros(rows, bool)
            zero = np.zeros(rows, np.float32)
            step = Timestep(obs, zero, terminated=none, truncated=none, valid=none)
            return step, no_episodes(rows, self.spec.info_metrics)

        step, ended = over_policies(begun, 2)(self.spec.by_policy, self.spec.keyed(self.reset()))
        return self.spec.bare(step), self.spec.bare(ended)

    def _forgive(self, error: Exception) -> None:
        """Counts a restart.

        Raises:
          Exception: the error itself, if there have been too many, if the policy caused it (an
            invalid action), or if the pool is stopping.
        """
        if (
            self.restarts >= self.max_restarts
            or isinstance(error, ValueError)
            or self.stopping.is_set()
        ):
            owned = f"{counted(self.num_envs, 'environment')} of {self.owner}"
            if self.restarts:
                error.add_note(f"(of the {owned}, after {counted(self.restarts, 'restart')})")
            else:
                error.add_note(f"(of the {owned})")
            raise error
        self.restarts += 1
        if isinstance(error, EnvError | TimeoutError):
            failure = str(error)
        else:
            failure = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{self.owner} continues with new environments "
            f"(restart {self.restarts} of {self.max_restarts}): {failure}",
            EnvWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        env = self._env
        self._env = None
        if env is not None:
            with contextlib.suppress(Exception):  # it may be what failed
                env.close()
