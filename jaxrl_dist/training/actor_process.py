"""An actor in a process of its own, in a Ray cluster; ``actors.remote`` starts it."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist import plans, rng
from jaxrl_dist.actors import transport
from jaxrl_dist.actors.pool import Snapshot, compile_actor, make_actor, restarting_env
from jaxrl_dist.actors.recorded_policy import to_learn, with_probabilities
from jaxrl_dist.actors.step import ActorJob, Stages
from jaxrl_dist.actors.transport import Answer, Experience, Launch, Start
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.errors import ConfigError, EnvWarning
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.plans.job import ProgramCache
from jaxrl_dist.plans.session import Session
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.training.compile_cache import keep_programs
from jaxrl_dist.types import TrainState


def launch(session: Session) -> Launch:
    """Returns what an actor's process needs to act as a thread of the session would."""
    records = session.record is not None
    return Launch(ActorProcess, session.config, session.host_seed, records)


class ActorProcess:
    """The object that Ray makes in the process of an actor.

    Ray calls ``alive`` and ``end`` in another thread than the other methods.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._acting = threading.Lock()
        self._stages = Stages()
        self._actor: Any = None

    def alive(self) -> None:
        """Returns, which a process that is stopped does not."""

    def begin(self, versions: dict[str, str], launched: list[Any], start: Start) -> str:
        """Makes the environments and resets them.

        Args:
          versions: the learner's.
          launched: Ray's reference to the ``Launch``, which is read after the versions.

        Returns:
          Where the process is, for messages.

        Raises:
          ConfigError: a version differs, or a module of the user's is missing.
        """
        import ray

        for name, here in transport.versions().items():
            if versions[name] != here:
                raise ConfigError(
                    f"actors need the learner's versions, but {platform.node()} has {name} {here}, "
                    f"and the learner {versions[name]}; install the same"
                )
        with self._acting:
            try:
                self._begin(ray.get(launched[0]), start)
            except ConfigError as error:
                raise error.within(f"{start.owner} on {platform.node()}") from None
        return f"process {os.getpid()} on {platform.node()}"

    def _begin(self, launch: Launch, start: Start) -> None:
        config = launch.config
        if not config.actor_gpus:
            jax.config.update("jax_platforms", "cpu")
        for name, setting in launch.settings.items():
            jax.config.update(name, setting)
        if config.compile_cache:
            keep_programs()
        self._make(launch, start)

    @in_32_bits
    def _make(self, launch: Launch, start: Start) -> None:
        config = launch.config
        source = find_env(config)
        seed = launch.seed
        if start.restarts:
            seed = rng.host_seed(seed, start.restarts)
        job = ActorJob(
            make_algorithm(config, source.spec),
            source,
            start.share.total,
            config.rollout_length,
            seed,
            self._stopping.is_set,
            ProgramCache().once,
        )
        self._spec = source.spec
        self._records = launch.records
        self._sends_rollouts = launch.records or not PLANS[config.plan].sends_gradients
        self._on = meshes.make_mesh(jax.local_devices()[:1])
        self._digest = plans.digest(config.plan)(job, self._on)
        self._pack = jax.jit(lambda rollouts: transport.packed(source.spec, rollouts))
        if launch.records:
            job = job._replace(algorithm=with_probabilities(job.algorithm, source.spec))
        max_restarts = config.max_restarts if config.on_actor_error == "restart" else 0
        self._env = restarting_env(
            job, start.share, max_restarts, self._stopping, start.owner, start.restarts
        )
        self._restarts = start.restarts
        programs = compile_actor(job, self._on)
        self._actor = make_actor(job, self._on, programs, start.share, self._stages, self._env)

    def rollout(self, state: TrainState, iteration: int, number: np.int32) -> Answer:
        """Acts for a rollout.

        Args:
          state: the learner's, without optimiser state and memory.
          number: as for ``Deliver``.
        """
        self._stages.mark("parameters")
        with self._acting, _env_warnings() as caught:
            if self._stopping.is_set():
                raise RuntimeError("the actors are being closed")
            experience, episodes, steps = self._rollout(state, iteration, number)
        self._stages.mark("sending")
        if not iteration:  # the first rollout has compiled the programs
            self._stages.merge("start")
        if self._env is not None:
            self._restarts = self._env.restarts
        seconds = dict(self._stages.seconds)
        return Answer(experience, episodes, steps, self._restarts, seconds, caught)

    @in_32_bits
    def _rollout(self, state: TrainState, iteration: int, number: np.int32) -> tuple[Any, ...]:
        state = meshes.put(state, self._on, meshes.REPLICATED)
        rollouts, *counts = self._actor.rollout(
            state.variables, np.int32(iteration), state.env_step
        )
        learnt = to_learn(rollouts) if self._records else rollouts
        digest = None
        if self._digest is not None:
            digest = self._digest(Snapshot(0, state), learnt, number)
        sent = self._pack(rollouts) if self._sends_rollouts else None
        return jax.device_get(Experience(sent, digest)), *jax.device_get(counts)

    def end(self) -> None:
        """Closes the environments, as soon as a step that is under way has ended."""
        self._stopping.set()
        with self._acting:
            if self._actor is not None:
                self._actor.close()


@contextlib.contextmanager
def _env_warnings() -> Iterator[list[str]]:
    """Collects warnings about environments, which the learner shows; it changes a process's
    filters.
    """
    texts = list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EnvWarning)
        yield texts
    texts += [str(one.message) for one in caught if issubclass(one.category, EnvWarning)]
