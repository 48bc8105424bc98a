"""Functions shared by the plans with actor threads: for flags, and for joining and counting samples."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import ActorPool, Deliver, ParamStore, PoolOptions, Sample, Snapshot
from jaxrl_dist.actors.step import Rollouts, Stages, keys_of
from jaxrl_dist.checks import check_divides, flag, parse_devices
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.learners.sharded import compile_priority
from jaxrl_dist.plans import report as reports
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.devices import check_evenly, numbered
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import updates_of
from jaxrl_dist.types import Algorithms, PyTree, Report, TrainState


def replays(algorithm: Algorithms) -> bool:
    """Returns whether any policy replays experience."""
    return any(each.replay is not None for each in algorithm.values())


def prioritizes(algorithm: Algorithms) -> bool:
    """Returns whether any policy replays experience by priority."""
    return any(each.replay and each.replay.priority_exponent is not None for each in algorithm.values())


def content_specs(algorithm: Algorithms) -> list[Any]:
    """Returns the sharding of an actor's message: a rollout and, for prioritised replay, its priorities."""
    return [meshes.rollout_specs(algorithm), meshes.TIME_BATCH][: 1 + prioritizes(algorithm)]


def check(config: Train[Any], *divisors: tuple[int, str]) -> None:
    """Checks the flags that the plans with actor threads share.

    Args:
      divisors: numbers besides the actors that must divide the environments, as for ``check_divides``.

    Raises:
      ConfigError: the flags contradict each other.
    """
    assert config.num_actors is not None, "the preset has it"
    check_divides("num_envs", config.num_envs, *divisors, (config.num_actors, "actors (--num-actors)"))
    if config.gather is not None and config.gather > config.num_actors:
        raise ConfigError(f"--gather {config.gather} is more than --num-actors {config.num_actors}")
    for name in marked(config, timed=True):
        value = getattr(config, name)
        if config.lockstep and value is not None and value is not False:  # 0 is a lag
            raise ConfigError(f"{flag(name)} depends on the threads' timing, and --lockstep is to rule that out")


def pool_options(config: Train[Any], learners: Sequence[jax.Device]) -> PoolOptions:
    """Returns the options of the actor pool from a resolved config.

    Raises:
      ConfigError: a device does not exist, or there are more devices than actors.
    """
    assert config.num_actors is not None, "the preset has it"
    acting = learners
    if (numbers := parse_devices("actor_devices", config.actor_devices)) is not None:
        acting = numbered("actor_devices", numbers)
        if len(acting) > config.num_actors:
            raise ConfigError(
                f"--actor-devices {config.actor_devices} are more than --num-actors {config.num_actors} can use"
            )
    check_evenly(acting, "that act")
    num_actors = config.num_actors // peers.count()
    return PoolOptions(
        num_actors=num_actors,
        first=peers.index() * num_actors,
        all_actors=config.num_actors,
        meshes=tuple(meshes.make_mesh([device]) for device in arrays.own_devices(acting)[:num_actors]),
        lag=config.lag if config.lockstep else None,
        gather=config.gather,
        gather_deadline=config.gather_deadline,
        free_running=config.free_running,
        max_restarts=config.max_restarts if config.on_actor_error == "restart" else 0,
    )


def homes(mesh: Mesh, num_actors: int) -> list[Mesh]:
    """Returns the part of the mesh that holds each actor's rollouts.

    If neither the actors divide over the devices nor the devices over the actors, the first device holds all.
    """
    devices = list(mesh.devices.flat)
    if num_actors % len(devices) and len(devices) % num_actors:
        return [meshes.make_mesh(devices[:1])] * num_actors
    size = max(1, len(devices) // num_actors)
    firsts = (index * len(devices) // num_actors for index in range(num_actors))
    return [meshes.make_mesh(devices[first : first + size]) for first in firsts]


def sender(home: Mesh, specs: list[Any], priority: Deliver | None = None) -> Deliver:
    """Returns a function with which an actor sends its rollout to the learner, overlapping with updates there.

    It sends a list of the rollout and, with ``priority``, the rollout's priorities; arrays that are on its part of the
    mesh already are not copied.

    Args:
      home: the actor's entry of ``homes``.
      specs: from ``content_specs``.
    """
    shardings = meshes.shardings(home, specs)

    def send(snapshot: Snapshot, rollout: Rollouts, number: np.int32) -> list[PyTree]:
        extra = [] if priority is None else [priority(snapshot, rollout, number)]
        return [jax.device_put(x, where) for x, where in zip([rollout, *extra], shardings, strict=True)]

    return send


def prioritize(job: Job, on: Mesh) -> Deliver:
    """Returns a function that computes, on the device that acted, the initial priorities of a rollout's windows.

    They are those of the policies that need priorities.
    """
    stream = rng.stream(job.session_seed, rng.Stream.PRIORITIZE)
    keys = meshes.put(keys_of(job.algorithm, stream), on, meshes.REPLICATED)
    programs = {name: compile_priority(each, on) for name, each in job.algorithm.items() if prioritizes({name: each})}

    def priorities(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
        return {
            name: program(state_of(snapshot.state, name), rollouts[name], keys[name], number)
            for name, program in programs.items()
        }

    return priorities


def joiner(mesh: Mesh, num_actors: int, specs: list[Any]) -> Callable[[Sequence[Sample | None]], list[PyTree]]:
    """Returns a function that joins the actors' rollouts into one, sharded over the mesh.

    A missing rollout is replaced by zeros of the same shape, so its steps are invalid. Arrays already on the right
    device are not copied, unless the device holds several actors' environments.

    Args:
      specs: from ``content_specs``.
    """
    parts = homes(mesh, num_actors)
    joined_on = mesh if {*mesh.devices.flat} == {d for part in parts for d in part.devices.flat} else parts[0]
    blanks: dict[int, list[PyTree]] = {}

    def concatenate(contents: Sequence[list[PyTree]]) -> list[PyTree]:
        axes = jax.tree.map(_axis, specs, is_leaf=_is_spec)
        return jax.tree.map(lambda axis, *x: jax.tree.map(lambda *y: jnp.concatenate(y, axis), *x), axes, *contents)

    def put(content: list[PyTree], on: Mesh) -> list[PyTree]:
        return [jax.device_put(x, where) for x, where in zip(content, shardings[on], strict=True)]

    one, shardings = meshes.REPLICATED, {on: meshes.shardings(on, specs) for on in {*parts, mesh}}
    programs = {
        device: meshes.Program(concatenate, meshes.make_mesh([device]), (one,), one, mapped=meshes.whole)
        for device in joined_on.devices.flat
    }

    def join(samples: Sequence[Sample | None]) -> list[PyTree]:
        like = next(sample for sample in samples if sample is not None).content
        contents = []
        for index, sample in enumerate(samples):
            if sample is None and index not in blanks:
                blanks[index] = put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like), parts[index])
            content = blanks[index] if sample is None else sample.content
            contents.append(content if joined_on.size == 1 else put(content, parts[index]))
        if joined_on.size == 1:  # nothing to take apart
            joined = programs[joined_on.devices.flat[0]](contents) if len(contents) > 1 else contents[0]
            return joined if joined_on is mesh else put(joined, mesh)
        pieces = []
        for device in joined_on.devices.flat:
            here = [_shard(x, device) for x, part in zip(contents, parts, strict=True) if device in part.devices]
            pieces.append(programs[device](here) if len(here) > 1 else here[0])
        whole = jax.tree.map(lambda spec, *x: _whole(joined_on, spec, x), specs, *pieces, is_leaf=_is_spec)
        return whole if joined_on is mesh else put(whole, mesh)

    return join


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _axis(spec: PartitionSpec) -> int:
    """Returns the index of the sharded axis."""
    return tuple(spec).index(meshes.DATA)


def _shard(content: PyTree, device: jax.Device) -> PyTree:
    """Returns a device's shards of arrays, without copying."""
    return jax.tree.map(lambda x: next(s.data for s in x.addressable_shards if s.device == device), content)


def _whole(on: Mesh, spec: PartitionSpec, shards: Sequence[PyTree]) -> PyTree:
    """Assembles arrays over the mesh from each device's shards, without copying."""
    axis, sharding = _axis(spec), NamedSharding(on, spec)

    def join(*arrays: jax.Array) -> jax.Array:
        shape = list(arrays[0].shape)
        shape[axis] *= len(arrays)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(arrays))

    return jax.tree.map(join, *shards)


def may_lag(config: Train[Any]) -> bool:
    """Returns whether the learner may get experience of older policies than its own."""
    return 0 not in (config.lag if config.lockstep else None, config.max_lag)


class Tally(reports.HostInterval):
    """The ``HostInterval`` of plans with actor threads, which also counts samples and their lags."""

    def __init__(self, job: Job, pool: ActorPool, store: ParamStore, length: int) -> None:
        super().__init__(job, length)
        self._steps = np.array(job.steps)  # of samples learned from or dropped as too old
        self._pool, self._store, self._max_lag = pool, store, job.config.max_lag
        self._trained = 0
        self._restarts_before = 0 if job.resumed is None else job.resumed.progress.get("restarts", 0)
        self._lags: collections.Counter[int] = collections.Counter()  # of the samples learned from

    @property
    def env_steps(self) -> int:
        """Env steps of the run so far."""
        return int(self._steps[0])

    def fresh(self, sample: Sample) -> bool:
        """Returns True if a sample's policy is recent enough to learn from; otherwise counts its steps and episodes."""
        fresh = self._max_lag is None or self._lag(sample) <= self._max_lag
        if not fresh:
            self._count([sample])
        return fresh

    def _count(self, samples: Sequence[Sample]) -> None:
        """Counts the samples of each process's first actor, then of each one's next actor, and so on."""
        for sample in samples:
            for steps, episodes in reports.of_all(sample.steps, sample.episodes):
                self._steps += steps
                self.ended(episodes)

    def _lag(self, sample: Sample) -> int:
        return self._store.version - sample.version

    def learn(self, samples: Sequence[Sample | None]) -> None:
        """Begins an iteration that learns from these samples."""
        self.iterations += 1
        there = [sample for sample in samples if sample is not None]
        self._count(there)
        for sample in there:  # those of other processes, in lockstep, have the same lag
            self._trained += peers.count()
            self._lags[self._lag(sample)] += peers.count()

    def counts(self) -> dict[str, float]:
        """Returns what has become of this session's samples, of all processes."""
        sent, queued = map(sum, zip(*peers.all_gather(self._pool.streams.count(), "the samples"), strict=True))
        # Nothing was learned from these: too old, of a round that was cut short, or left when the pool was closed.
        dropped = sent - queued - self._trained
        numbers = {"queue": queued, "sent": sent, "trained": self._trained, "dropped": dropped}
        return {f"async/{name}": float(number) for name, number in numbers.items()}

    def done(self) -> bool:
        """Returns whether the run was done before this session."""
        return self._job.ended_by(self.env_steps, self.score) is not None

    def report(self, state: TrainState, clock: Clock, stages: Stages, programs: Sequence[Any]) -> Report:
        """Returns the report of the interval since the last report; all processes must call it.

        Args:
          stages: of the learner's thread; its "updating" includes the compilation of ``programs``.
        """
        pool, lags = self._pool, self._lags
        # Of the whole run, like its env steps and updates.
        restarts = self._restarts_before + sum(peers.all_gather(pool.restarts, "the restarts"))
        compiling = sum(program.compile_seconds for program in programs)
        seconds = dict(stages.seconds)
        seconds |= {"updating": seconds.get("updating", 0.0) - compiling, "compiling": compiling}
        acting, made = pool.seconds(), updates_of(state)
        idle = sum(acting.get(f"time/actor/{stage}_s", 0.0) for stage in ("parameters", "blocked"))
        metrics: dict[str, float | None] = {
            "async/lag": sum(lag * count for lag, count in lags.items()) / lags.total() if lags else None,
            "async/lag_max": float(max(lags)) if lags else None,
            **{f"async/lag/{lag}": float(count) for lag, count in sorted(lags.items())},
            **self.counts(),
            "async/restarts": float(restarts),
            **{f"{name}/updates": float(count) for name, count in made.items() if name},
            "async/learner_idle": seconds.get("waiting", 0.0) / max(sum(seconds.values()), 1e-9),
            "async/actor_idle": idle / max(sum(acting.values()), 1e-9),
        }
        times = {f"time/learner/{stage}_s": value for stage, value in seconds.items()} | acting
        extra_metrics, kept = {**metrics, **times}, {"restarts": restarts}
        numbers = self._job, state, self._steps, clock, self.since()
        report = reports.report(*numbers, due=self.due, score=self.score, extra_metrics=extra_metrics, kept=kept)
        self.restart()
        self._lags.clear()
        return report
