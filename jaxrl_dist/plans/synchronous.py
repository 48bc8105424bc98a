"""Acting and learning in turn: environments on the host, learning on the mesh, no policy lag."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import host, programs
from jaxrl_dist.actors.step import Rollouts
from jaxrl_dist.envs.host.calls import Caller
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans import compiled, initial, recording
from jaxrl_dist.plans.population import Population
from jaxrl_dist.plans.report import HostInterval, IntervalSums, of_all
from jaxrl_dist.plans.session import Session
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Join, PyTree, Report

JOINS = {
    "time/update_s": Join.SECONDS,
    "time/acting_s": Join.SECONDS,
    "time/env_s": Join.SECONDS,
}
"""How members' times are joined, as ``Join`` says."""


def synchronous(session: Session) -> Iterator[Report]:
    """Runs ``session`` with one batch of host environments;
    experience always comes from the newest policy.
    """
    with contextlib.closing(HostPopulation([session])) as population:
        yield from population.reports(0, session)


class HostPopulation(Population):
    """A population on one batch of host environments, the first member's first."""

    _thread: Caller | None = None
    """Fills the rollouts of environments whose every step would need a thread otherwise."""

    def _begin(self) -> None:
        job = self.job
        sessions = self.sessions
        first = sessions[0]
        # A single run acts without the axis: XLA fuses other operations with it, which round
        # differently. A program without the axis has no hyperparameters as inputs.
        self._axis = len(sessions) > 1 or bool(job.hyper)
        self._here = arrays.own_part(job.mesh)
        self._env = job.source.host(job.share, [session.host_seed for session in sessions])
        # which holds for this thread only
        if self._env.spec.backend == "envpool" and not meshes.jit_disabled():
            self._thread = Caller("the environments")
        members = []
        if self._axis:
            members = [job.variant(session.hyper)[0] for session in sessions]
        self._acting = host.HostActor(
            recording.acting(first),
            self._env,
            self._here,
            job.rollout_length,
            self._compile(),
            job.share,
            members=members,
        )
        if self._axis:
            equal = self._average_every is not None
            self._state = initial.states(sessions, self._hyper, equal=equal, restarted=True)
        else:
            self._state = first.initial_state()
        self._intervals = [HostInterval(session) for session in sessions]
        self._data = job.put_data()
        self._record = recording.recorder(first, job.share.first)
        self._update_seconds = 0.0
        self._key = first.key(Stream.LEARN)
        self._act_compiled = 0.0  # seconds, of programs that have been replaced

    def _compile(self) -> programs.Programs:
        job = self.job
        first = self.sessions[0]
        members = len(self._rows)
        every = self._average_every
        mesh, length, spec = self._here, job.rollout_length, job.source.spec
        if self._axis:
            acting = job.once(
                ("act", members),
                lambda: programs.compile_members(
                    lambda hyper: job.variant(hyper)[0], spec, mesh, length
                ),
            )
            self._update = job.once(
                ("update", members, every), lambda: compiled.compile_update(job, every)
            )
        else:
            key = meshes.put(rng.stream(first.config.seed, Stream.ACT), mesh, meshes.REPLICATED)
            acting = job.once(
                ("act", first.config.seed, first.record is not None),
                lambda: programs.compile_acting(recording.acting(first), spec, mesh, length, key),
            )
            self._update = job.once(
                "update",
                lambda: compile_update(job.learner, job.mesh, with_data=job.data is not None),
            )
        self._act = acting.act
        self._ready(self._update, *acting)
        return acting

    def _iterate(self, running: Sequence[int]) -> int:
        mesh = self.job.mesh
        state = self._state
        member_inputs: list[PyTree] = []
        inputs: list[PyTree] = [self._key]
        if self._axis:
            member_inputs = [(self._keys[0], self._hyper)]
            inputs = [self._keys[-1], self._hyper, self._running_mask(), self._data]
        elif self._data:
            inputs.append(self._data)
        updates = arrays.fetch(state.updates)
        variables, iteration, env_step = arrays.as_local(
            (state.variables, state.iteration, state.env_step), mesh
        )
        rollout, episodes, steps = peers.run_everywhere(
            partial(self._rollout, variables, iteration, env_step, *member_inputs),
            "the environments",
        )
        rollout = self._record(rollout)
        began = time.perf_counter()
        specs = meshes.rollout_specs(self.job.algorithm)
        self._state, metrics = self._update(state, arrays.as_global(rollout, mesh, specs), *inputs)
        jax.block_until_ready(self._state)
        self._update_seconds += time.perf_counter() - began
        grew = jax.tree.map(operator.gt, self._state.updates, updates)
        metrics, grew = arrays.fetch((metrics, grew))
        counts = np.zeros((len(self._intervals), 2), int)
        for row, interval in enumerate(self._intervals):
            count, ended, learned, grown = self._part((steps, episodes, metrics, grew), row)
            rollouts = of_all(count, ended)
            counts[row] = sum(count for count, _ in rollouts)
            interval.iterations += 1
            for _, ended in rollouts:
                interval.ended(ended)
            interval.learned(learned, counts=jax.tree.map(bool, grown))
        self._count(counts)
        return 1

    def _rollout(self, *inputs: PyTree) -> tuple[Rollouts, PyTree, np.ndarray]:
        fill = partial(self._acting.rollout, *inputs)
        if self._thread is None:
            return fill()
        return self._thread.call(fill)

    def _sums(self) -> Sequence[IntervalSums]:
        return [interval.since() for interval in self._intervals]

    def _restart(self) -> None:
        for interval in self._intervals:
            interval.restart()

    def _keep(self, index: np.ndarray) -> None:
        self._intervals = [self._intervals[row] for row in index]
        self._update_seconds -= self._update.compile_seconds
        self._act_compiled += self._act.compile_seconds
        self._acting.keep(index, self._compile())

    def _times(self) -> Mapping[str, float]:
        stages = self._acting.stages.seconds
        return {
            "time/update_s": self._update_seconds - self._update.compile_seconds,
            "time/acting_s": stages.get("acting", 0.0)
            - self._act_compiled
            - self._act.compile_seconds,
            "time/env_s": stages.get("env", 0.0),
        }

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        super().close()
