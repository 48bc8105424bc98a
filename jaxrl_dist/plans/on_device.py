"""Environment, acting and learning in one compiled program over the whole mesh.

This is Anakin of the Podracer architectures (Hessel et al. 2021, https://arxiv.org/abs/2104.06272): nothing goes
through the host while the program runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import device
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans.evolve import Selection
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Clock, IntervalSums, check_there, mean_return, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Report, TrainState

DISPATCH_SECONDS = 1.0
"""Approximate duration of one dispatch, so that the run stops soon after a request. Results do not depend on it."""


def on_device(job: Job) -> Iterator[Report]:
    """Runs ``job`` on environments that are pure functions, many iterations per dispatch: a population of one."""
    return Population([job]).reports(0, job)


class Population:
    """Runs that differ in seed and ``hyper`` only, the members, in one program.

    Every array of the program has a leading axis of members. A member learns what it would learn as a single run, up to
    rounding. Once it is done, what the program still computes for it is ignored.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        training: Collection[int] | None = None,
        selection: Selection | None = None,
        numbers: Sequence[int] | None = None,
        average_every: int | None = None,
    ) -> None:
        """Prepares the program.

        Args:
          jobs: of the members; resumed ones that are not done are at the same iteration.
          training: the members whose reports will be taken; None: all.
          selection: how the members that are not done are selected after some of the reports; None: not at all.
          numbers: of the members in their whole population, for reports; None: there are no others.
          average_every: iterations after which the members' networks become their mean; None: never.
        """
        self._names = range(len(jobs)) if numbers is None else numbers
        self._jobs, self._selection, self._average_every = list(jobs), selection, average_every
        self._rows = list(range(len(jobs)))  # the members of the program's arrays
        self._parents = list(range(len(jobs)))  # whose parameters each member had after the last selection
        self._scores = [job.score for job in jobs]
        self.halved: set[int] = set()
        """The members that a selection has ended."""
        self._due: dict[int, Report] = {}
        kept = range(len(jobs)) if training is None else training
        self._done = [at not in kept or bool(job.ended_by(job.env_steps, job.score)) for at, job in enumerate(jobs)]
        self._started = False

    def reports(self, member: int, job: Job) -> Iterator[Report]:
        """Yields the reports of a member; ``job`` is its job, with functions of its own run.

        The members advance together: the caller takes the next report of every member before it takes a second one of
        any. Those of members that are done stay valid.
        """
        self._jobs[member] = job._replace(hyper=self._jobs[member].hyper)  # which a selection may have changed
        if not self._started:
            self._start()
        job.offer(lambda: self._now(member, self._numbers()))
        if self._done[member] and member not in self._due:  # before this session
            self._due[member] = self._now(member, self._numbers())
        try:
            while not self._done[member] or member in self._due:
                while member not in self._due:
                    self._advance()
                yield self._due.pop(member)
        finally:
            self._done[member] = True  # though the caller may have left earlier

    def _start(self) -> None:
        jobs, self._started = self._jobs, True
        job = jobs[0]
        self._clocks = [Clock(job.resumed, partial(self._away, at)) for at, job in enumerate(jobs)]
        self._put_inputs()
        self._state = compiled.initial_state(jobs, self._hyper, equal=self._average_every is not None)
        self._actor = compiled.initial_actor(jobs, self._hyper)
        inputs = self._state, self._actor, self._keys, self._hyper
        iterate = self._iteration()
        blank = job.once(("sums", len(jobs)), lambda job: compiled.blank_sums(job, *iterate, *inputs))
        self._blank = compiled.stack([blank] * len(jobs))
        self._since: IntervalSums = compiled.stack(
            [compiled.parted(IntervalSums.of(job.resumed), blank) for job in jobs]
        )
        self._compile(*iterate)
        self._env_steps = [job.env_steps for job in jobs]
        self._iterations = max((int(self._since.iterations[k]) for k in self._running()), default=0)
        self._per_dispatch = 1

    def _put_inputs(self) -> None:
        """Puts the keys and hyperparameters of the program's members on the mesh."""
        jobs = [self._jobs[member] for member in self._rows]
        self._keys = tuple(compiled.member_keys(jobs, stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN))
        hyper = {name: np.array([job.hyper[name] for job in jobs], np.float32) for name in jobs[0].hyper}
        self._hyper = meshes.put(hyper, jobs[0].mesh, compiled.MEMBERS)

    def _iteration(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        members = len(self._rows)
        return self._jobs[0].once(("iteration", members), lambda job: compiled.make_iteration(job, members))

    def _compile(self, act: Callable[..., Any], learn: Callable[..., Any]) -> None:
        every = self._average_every
        name = "program", len(self._rows), every
        self.program = self._jobs[0].once(name, lambda job: compiled.make_program(job, act, learn, every))
        """The compiled program; see ``compiled.make_program``."""
        for clock in self._clocks:
            clock.ready(self.program)

    def inputs(self, count: int) -> tuple[Any, ...]:
        """Returns the arguments with which ``program`` makes ``count`` iterations; it uses up the first three."""
        mesh = self._jobs[0].mesh
        running = meshes.put(np.array([not self._done[member] for member in self._rows]), mesh, compiled.MEMBERS)
        limit = meshes.put(np.int32(count), mesh, meshes.REPLICATED)
        return self._state, self._actor, self._since, self._keys, self._hyper, running, limit

    def _away(self, member: int) -> float:
        return self._jobs[member].away()

    def _running(self) -> list[int]:
        return [member for member, done in enumerate(self._done) if not done]

    def _advance(self) -> None:
        """Makes some iterations, and the reports that are due after them."""
        running, job, clock = self._running(), self._jobs[0], self.program
        assert not any(member in self._due for member in running), "a report has not been taken"
        rollout = job.num_envs * job.rollout_length
        # No member reaches its end before the last of so many iterations.
        left = min(-(-(self._jobs[member].total_env_steps - self._env_steps[member]) // rollout) for member in running)
        count = min(self._per_dispatch, max(1, job.iterations_per_report - self._iterations), left)
        began = time.perf_counter() - clock.compile_seconds
        self._state, self._actor, self._since, *outputs = self.program(*self.inputs(count))
        steps, fault = arrays.fetch(outputs)
        for row, member in enumerate(self._rows):
            self._env_steps[member] += 0 if self._done[member] else int(steps[row])
        for row in (row for row, member in enumerate(self._rows) if not self._done[member]):
            # The program stops before the faulty iteration, so that a resumed run meets the fault again.
            found = device.Fault(fault.iteration[row], fault.where[row])
            device.check_fault(job.source.spec, found, job.num_envs, job.rollout_length)
        seconds = time.perf_counter() - clock.compile_seconds - began
        fitting = max(1, min(2 * self._per_dispatch, int(DISPATCH_SECONDS * count / seconds)))
        self._per_dispatch = peers.least(fitting, "iterations of a dispatch")
        self._iterations += count
        self._report(running)

    def _report(self, running: Sequence[int]) -> None:
        """Makes the reports of members that are done, and of all members after an interval."""
        interval_over = self._iterations >= self._jobs[0].iterations_per_report
        numbers = self._numbers() if interval_over else None
        for member in running:
            job = self._jobs[member]
            if numbers is not None:
                row = self._rows.index(member)
                episodes = jax.tree.map(lambda x, row=row: x[row], numbers[0].episodes)
                self._scores[member] = mean_return(episodes, self._scores[member])
            ended = job.ended_by(self._env_steps[member], self._scores[member]) is not None
            self._done[member] = ended or job.stop()
        due = [member for member in running if interval_over or self._done[member]]
        if not due:
            return
        numbers = numbers or self._numbers()
        if interval_over:
            self._select(numbers[1])
        for member in due:
            last = self._done[member] and any(not done for done in self._done)
            self._due[member] = self._now(member, numbers, keep=last)
        if self.halved.intersection(due):
            self._shrink()
        if interval_over:
            self._since, self._iterations = self._blank, 0

    def _select(self, state: TrainState) -> None:
        """Selects among the members that are not done, if it is time: after an interval, before its reports."""
        members, selection = self._running(), self._selection
        iteration = int(state.iteration[self._rows.index(members[0])]) if members else 0
        self._parents = list(range(len(self._jobs)))
        if selection is None or len(members) < 2 or not selection.due(iteration):
            return
        jobs = self._jobs
        hyper = {name: np.array([jobs[x].hyper[name] for x in members]) for name in jobs[0].hyper}
        scores = np.array([self._scores[member] for member in members])
        source, chosen = selection.evolve(selection.rng(iteration), scores, hyper)
        if len(source) < len(members):
            self.halved |= set(members) - {members[x] for x in source}
            for member in self.halved:
                self._done[member] = True
            return
        for place, member in enumerate(members):
            job, self._parents[member] = jobs[member], members[source[place]]
            values = {name: float(x[place]) for name, x in chosen.items()}
            jobs[member] = job._replace(hyper=values if selection.valid(job.config, values) else job.hyper)
        index = np.array([self._rows.index(self._parents[member]) for member in self._rows])
        memory = self._state.memory  # each keeps its experience
        self._state = self._gathered(self._state._replace(memory=()), index)._replace(memory=memory)
        self._put_inputs()

    def _gathered(self, tree: Any, index: np.ndarray) -> Any:
        """Returns rows of arrays of members; ``tree`` has the placement of the state without its memory."""
        shardings = jax.tree.map(lambda x: x.sharding, tree)
        return jax.jit(lambda tree, index: jax.tree.map(lambda x: x[index], tree), out_shardings=shardings)(tree, index)

    def _shrink(self) -> None:
        """Removes the members that are done from the program, which is compiled again."""
        index = np.array([row for row, member in enumerate(self._rows) if not self._done[member]])
        if len(index) % self._jobs[0].mesh.shape[meshes.AGENT]:
            return  # the rest does not divide over the devices: all are computed
        self._rows = [self._rows[row] for row in index]
        self._state, self._actor = self._gathered((self._state, self._actor), index)
        self._blank = jax.tree.map(lambda x: x[index], self._blank)
        self._put_inputs()
        self._compile(*self._iteration())

    def _numbers(self) -> tuple[IntervalSums, TrainState]:
        """Fetches what reports show of all members, with one transfer."""
        state = self._state
        counts = state.updates, state.iteration, state.skipped
        since, (updates, iteration, skipped) = arrays.fetch((self._since, counts))
        return since, state._replace(updates=updates, iteration=iteration, skipped=skipped)

    def _now(self, member: int, numbers: tuple[IntervalSums, TrainState], *, keep: bool = False) -> Report:
        """Returns a member's report; ``keep`` copies its state at once, so that the others can advance."""
        job, (since, counts), row = self._jobs[member], numbers, self._rows.index(member)
        since = jax.tree.map(lambda x: x[row], since)
        updates, iteration, skipped = jax.tree.map(lambda x: x[row], (counts.updates, counts.iteration, counts.skipped))
        state = self._state._replace(updates=updates, iteration=iteration, skipped=skipped)
        actor, copy = self._actor, partial(_copied, row=row)
        if keep:
            state, actor = copy((state, actor), "checkpoint")
        return report(
            job,
            state,
            self._env_steps[member],
            self._clocks[member],
            since,
            due=since.iterations >= job.iterations_per_report,
            score=self._scores[member],
            actor=actor,
            copy=copy,
            extra_metrics=self._selected(member),
            kept={"hyper": dict(job.hyper), "halved": member in self.halved} if job.hyper or self._selection else {},
        )

    def _selected(self, member: int) -> Mapping[str, float]:
        """Returns the metrics of selection: whose parameters the member has, and its hyperparameters from now on."""
        if self._selection is None:
            return {}
        hyper = {f"hyper/{name}": value for name, value in self._jobs[member].hyper.items()}
        return {"population/parent": float(self._names[self._parents[member]]), **hyper}


def _copied(tree: Any, what: str, row: int) -> Any:
    """Copies a member's part of the arrays on the devices to the host; other values stay. Raises as ``copied``."""
    leaves, structure = jax.tree.flatten(tree)
    here = [x for x in leaves if isinstance(x, jax.Array)]
    check_there(here, what)
    parts = iter(_part(here, row))
    return jax.tree.unflatten(structure, [next(parts) if isinstance(x, jax.Array) else np.array(x) for x in leaves])


def _part(parts: Sequence[jax.Array], row: int) -> list[np.ndarray]:
    if parts and len(parts[0]) > 1:
        return [np.array(x) for x in arrays.whole(_taken(parts, np.int32(row)))]
    return [np.array(x)[0] for x in arrays.whole(parts)]


_taken = jax.jit(lambda arrays, row: [x[row] for x in arrays])
