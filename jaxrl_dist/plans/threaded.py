"""What the plans with actor threads share: checks of flags,
and the way of rollouts from the actors to the learner.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import Deliver, PoolOptions, Sample, Snapshot
from jaxrl_dist.actors.step import ActorJob, Rollouts, keys_of
from jaxrl_dist.checks import check_divides, flag, parse_devices
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.learners.sharded import compile_priority
from jaxrl_dist.plans.dataflow import Exchange, Send
from jaxrl_dist.plans.devices import check_evenly, numbered
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Algorithms, PyTree

Specs = list[PyTree]
"""The sharding of what an actor sends: a rollout, and its priorities if they are needed."""


def prioritizes(algorithm: Algorithms) -> bool:
    """Returns whether any policy replays experience by priority."""
    return any(
        policy.replay and policy.replay.priority_exponent is not None
        for policy in algorithm.values()
    )


def check_actors(config: Train, *divisors: tuple[int, str]) -> None:
    """Checks the flags that the plans with actor threads share.

    Args:
      divisors: numbers besides the actors that must divide the environments,
        as for ``check_divides``.

    Raises:
      ConfigError: the flags contradict each other.
    """
    assert config.num_actors is not None, "the preset has it"
    check_divides(
        "num_envs", config.num_envs, *divisors, (config.num_actors, "actors (--num-actors)")
    )
    if config.gather is not None and config.gather > config.num_actors:
        raise ConfigError(f"--gather {config.gather} is more than --num-actors {config.num_actors}")
    for name in marked(config, timed=True):
        value = getattr(config, name)
        if config.lockstep and value is not None and value is not False:  # 0 is a lag
            raise ConfigError(
                f"{flag(name)} depends on the threads' timing, which --lockstep excludes; remove one"
            )


def pool_options(config: Train, learners: Sequence[jax.Device]) -> PoolOptions:
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
                f"--actor-devices {config.actor_devices} names more devices than --num-actors "
                f"{config.num_actors} can use"
            )
    check_evenly(acting, "that act")
    if config.actors_on is not None:
        _check_remote(config)
    num_actors = config.num_actors // peers.count()
    return PoolOptions(
        num_actors=num_actors,
        first=peers.index() * num_actors,
        all_actors=config.num_actors,
        meshes=tuple(
            meshes.make_mesh([device]) for device in arrays.own_devices(acting)[:num_actors]
        ),
        lag=config.lag if config.lockstep else None,
        gather=config.gather,
        gather_deadline=config.gather_deadline,
        free_running=config.free_running,
        max_restarts=config.max_restarts if config.on_actor_error == "restart" else 0,
    )


def _check_remote(config: Train) -> None:
    """Raises ``ConfigError`` for what actors in other processes cannot do."""
    if peers.count() > 1:
        raise ConfigError(
            f"--actors-on {config.actors_on} needs one process that learns, but there are "
            f"{peers.count()}; remove it, or --processes"
        )
    if config.actor_devices is not None:
        raise ConfigError(
            "--actor-devices names devices of this process, where --actors-on "
            f"{config.actors_on} has no actors; remove one"
        )
    restarts = config.on_actor_error == "restart"
    if config.record is not None and restarts and PLANS[config.plan].sends_gradients:
        raise ConfigError(
            f"--record under --plan {config.plan} does not support --on-actor-error restart with "
            f"--actors-on {config.actors_on} yet; remove one"
        )


def exchange(session: Session) -> Exchange:
    """Returns the exchange of rollouts: each travels to its actor's part of the mesh,
    where those of a round join.

    With prioritised replay, a rollout's priorities travel with it.
    A trainer gets a list of one or both.
    """
    job = session.job
    mesh = arrays.own_part(job.mesh)
    num_actors = job.pool.num_actors
    prioritized = prioritizes(job.algorithm)
    specs = [meshes.rollout_specs(job.algorithm), meshes.TIME_BATCH][: 1 + prioritized]
    send = [sender(home, specs) for home in homes(mesh, num_actors)]
    join = job.once("join", lambda: Joiner(mesh, num_actors, specs))
    return Exchange(
        digest, send, lambda samples: arrays.as_global(join(samples), job.mesh, specs), num_actors
    )


def homes(mesh: Mesh, num_actors: int) -> list[Mesh]:
    """Returns the part of the mesh that holds each actor's rollouts.

    If neither the actors divide over the devices nor the devices over the actors,
    the first device holds all.
    """
    devices = list(mesh.devices.flat)
    if num_actors % len(devices) and len(devices) % num_actors:
        return [meshes.make_mesh(devices[:1])] * num_actors
    size = max(1, len(devices) // num_actors)
    firsts = (index * len(devices) // num_actors for index in range(num_actors))
    return [meshes.make_mesh(devices[first : first + size]) for first in firsts]


def sender(home: Mesh, specs: Specs) -> Send:
    """Returns a function with which an actor sends its rollout to the learner,
    overlapping with updates there.

    It sends a list of the rollout and, if there are any, the rollout's priorities; arrays that are
    on its part of the mesh already are not copied.

    Args:
      home: the actor's entry of ``homes``.
      specs: the sharding of what is sent.
    """
    shardings = meshes.shardings(home, specs)

    def send(rollout: Rollouts, priorities: PyTree) -> list[PyTree]:
        content: list[PyTree] = [rollout]
        if priorities is not None:
            content.append(priorities)
        placed = zip(content, shardings, strict=True)
        return [jax.device_put(x, sharding) for x, sharding in placed]

    return send


def digest(job: ActorJob, on: Mesh) -> Deliver | None:
    """Returns a function that computes, on the device that acted,
    the initial priorities of a rollout's windows; None: no policy needs priorities.

    They are those of the policies that need priorities.
    """
    if not prioritizes(job.algorithm):
        return None
    stream = rng.stream(job.seed, rng.Stream.PRIORITIZE)
    keys = meshes.put(keys_of(job.algorithm, stream), on, meshes.REPLICATED)
    programs = job.once(
        ("priorities", on),
        lambda: {
            name: compile_priority(part, on)
            for name, part in job.algorithm.items()
            if prioritizes({name: part})
        },
    )

    def priorities(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
        return {
            name: program(state_of(snapshot.state, name), rollouts[name], keys[name], number)
            for name, program in programs.items()
        }

    return priorities


class Joiner:
    """Joins the actors' rollouts into one, sharded over the mesh.

    A missing rollout is replaced by zeros of the same shape, so its steps are invalid. Arrays
    already on the right device are not copied, unless the device holds several actors'
    environments.
    """

    def __init__(self, mesh: Mesh, num_actors: int, specs: Specs) -> None:
        """``specs`` is the sharding of what is sent."""
        self._mesh = mesh
        self._specs = specs
        self._homes = homes(mesh, num_actors)
        """The part of the mesh that holds each actor's rollouts."""
        covered = {device for home in self._homes for device in home.devices.flat}
        self._joined_on = mesh if {*mesh.devices.flat} == covered else self._homes[0]
        """Where the rollouts join; the whole is then spread over the mesh."""
        self._shardings = {on: meshes.shardings(on, specs) for on in {*self._homes, mesh}}
        self._blanks: dict[int, list[PyTree]] = {}
        """Each actor's missing rollout."""
        one = meshes.REPLICATED
        self._programs = {
            device: meshes.Program(
                self._concatenate, meshes.make_mesh([device]), (one,), one, mapped=meshes.whole
            )
            for device in self._joined_on.devices.flat
        }

    def __call__(self, samples: Sequence[Sample | None]) -> list[PyTree]:
        """Joins one sample of each actor; None: it is missing."""
        like = next(sample for sample in samples if sample is not None).content
        contents = []
        for actor, sample in enumerate(samples):
            content = self._blank(actor, like) if sample is None else sample.content
            if self._joined_on.size > 1:
                # in order of arrival, it may lie on the part of another actor
                content = self._put(content, self._homes[actor])
            contents.append(content)
        whole = self._whole(contents)
        if self._joined_on is self._mesh:
            return whole
        return self._put(whole, self._mesh)

    def _blank(self, actor: int, like: list[PyTree]) -> list[PyTree]:
        if actor not in self._blanks:
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
            self._blanks[actor] = self._put(zeros, self._homes[actor])
        return self._blanks[actor]

    def _put(self, content: list[PyTree], on: Mesh) -> list[PyTree]:
        placed = zip(content, self._shardings[on], strict=True)
        return [jax.device_put(x, sharding) for x, sharding in placed]

    def _whole(self, contents: Sequence[list[PyTree]]) -> list[PyTree]:
        """Joins contents that are on their actors' homes."""
        on = self._joined_on
        if on.size == 1:  # nothing to take apart
            return self._on_device(on.devices.flat[0], contents)
        pieces = []
        for device in on.devices.flat:
            shards = [
                _shard(content, device)
                for content, home in zip(contents, self._homes, strict=True)
                if device in home.devices
            ]
            pieces.append(self._on_device(device, shards))
        return jax.tree.map(lambda spec, *x: _assemble(on, spec, x), self._specs, *pieces)

    def _on_device(self, device: jax.Device, contents: Sequence[list[PyTree]]) -> list[PyTree]:
        if len(contents) > 1:
            return self._programs[device](contents)
        return contents[0]

    def _concatenate(self, contents: Sequence[list[PyTree]]) -> list[PyTree]:
        def along(axis: int, *parts: PyTree) -> PyTree:
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)

        return jax.tree.map(along, jax.tree.map(_axis, self._specs), *contents)


def _axis(spec: PartitionSpec) -> int:
    """Returns the index of the sharded axis."""
    return tuple(spec).index(meshes.DATA)


def _shard(content: PyTree, device: jax.Device) -> PyTree:
    """Returns a device's shards of arrays, without copying."""
    return jax.tree.map(
        lambda x: next(s.data for s in x.addressable_shards if s.device == device), content
    )


def _assemble(on: Mesh, spec: PartitionSpec, shards: Sequence[PyTree]) -> PyTree:
    """Assembles arrays over the mesh from each device's shards, without copying."""
    axis = _axis(spec)
    sharding = NamedSharding(on, spec)

    def join(*arrays: jax.Array) -> jax.Array:
        shape = list(arrays[0].shape)
        shape[axis] *= len(arrays)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(arrays))

    return jax.tree.map(join, *shards)
