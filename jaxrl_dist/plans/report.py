"""Reports of the plans: sums over an interval, and the numbers of a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.config.values import varied
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.sgd import MAX_SKIPPED
from jaxrl_dist.mesh import flat, over_policies
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.window import Window, merged, sums_of_json
from jaxrl_dist.types import Array, Checkpoint, EpisodeStats, Join, PyTree, Report, TrainState

if TYPE_CHECKING:
    from jaxrl_dist.plans.session import Session

JOINS = {
    "episode/count": Join.SUM,
    "episode/return_min": Join.MIN,
    "episode/return_max": Join.MAX,
}
"""How members' statistics of episodes are joined, as ``Join`` says."""


class Counts(NamedTuple):
    """Counts of a ``TrainState``; the first and last are dicts keyed by policy."""

    updates: Any
    iteration: Any
    skipped: Any

    @staticmethod
    def of(state: TrainState) -> Counts:
        return Counts(state.updates, state.iteration, state.skipped)


class IntervalSums(NamedTuple):
    """Sums over the interval since the last report, held by programs, checkpoints and reports.

    ``HostInterval`` computes them for plans whose iterations begin and end on the host. All fields
    except ``iterations`` are dicts keyed by policy.
    """

    iterations: Array
    """Int32 scalar."""
    learned: Mapping[str, Array]
    """Int32 scalar, iterations that made updates; none while a replay memory fills."""
    sums: Mapping[str, Mapping[str, Array]]
    """Of each metric, over the iterations that made updates; scalars."""
    episodes: Mapping[str, EpisodeStats]
    """[devices], or [1] on the host."""

    def to_json(self) -> dict[str, Any]:
        """Returns the checkpoint's JSON, without names for a single policy.

        Numbers are in hexadecimal, which is exact and can represent infinity.
        """

        def of_policy(
            learned: Array, sums: Mapping[str, Array], episodes: EpisodeStats
        ) -> tuple[Any, ...]:
            def exact(x: Array) -> list[str]:
                return [float(part).hex() for part in np.atleast_1d(x)]

            ended: list[Any] = [exact(field) for field in episodes[:-1]]
            if episodes.info:
                ended.append(
                    {metric: [exact(x) for x in pair] for metric, pair in episodes.info.items()}
                )
            return int(learned), {name: float(value).hex() for name, value in sums.items()}, ended

        fields = (
            int(self.iterations),
            *(part.get("", part) for part in over_policies(of_policy, 3)(*self[1:])),
        )
        return dict(zip(self._fields, fields, strict=True))

    @staticmethod
    def of(progress: Mapping[str, Any], policies: Iterable[str]) -> IntervalSums:
        """Returns the sums in a checkpoint's progress, as numpy arrays; zeros if it has none."""
        if progress.get("since") is not None:
            return IntervalSums.from_json(progress["since"])
        none: Any = dict.fromkeys(policies, (np.int32(0), {}, no_episodes(1)))
        return IntervalSums(np.int32(0), *over_policies(lambda zeros: zeros, 3)(none))

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> IntervalSums:
        """The inverse of ``to_json``."""

        def of_policy(
            learned: int, sums: Mapping[str, str], episodes: list[Any]
        ) -> tuple[Any, ...]:
            def exact(field: list[str]) -> np.ndarray:
                return np.array([float.fromhex(part) for part in field], np.float32)

            fields = episodes[:5]
            info = dict(*episodes[5:])
            pairs = {name: (exact(total), exact(count)) for name, (total, count) in info.items()}
            ended = EpisodeStats._make([*map(exact, fields), pairs])
            values = {name: np.float64(float.fromhex(value)) for name, value in sums.items()}
            return np.int32(learned), values, ended

        parts = [stored[name] for name in IntervalSums._fields[1:]]
        if not isinstance(stored["learned"], dict):
            parts = [{"": part} for part in parts]
        return IntervalSums(np.int32(stored["iterations"]), *over_policies(of_policy, 3)(*parts))


def check_progress(progress: Mapping[str, Any]) -> None:
    """Checks the progress in a checkpoint.

    Raises:
      LookupError, TypeError, ValueError: no run can have written it.
    """
    if progress["since"] is not None:
        IntervalSums.from_json(progress["since"])
    sums_of_json(progress.get("window", []))
    counts = progress["reported"]
    names = ("iteration", "env_steps", "agent_steps", "updates")
    numbers = [progress["env_steps"], progress["agent_steps"], *(counts[x] for x in names)]
    numbers += [progress.get("evaluated", 0), progress.get("restarts", 0)]
    seconds = [progress["wall_time_s"], progress["compile_s"], counts["seconds"]]
    seconds += [*progress.get("hyper", {}).values(), float.fromhex(progress.get("score", "0"))]
    if not all(isinstance(x, int) and x >= 0 for x in numbers) or not all(
        isinstance(x, float) for x in seconds
    ):
        raise ValueError("counts that no run has")


class HostInterval:
    """Sums an interval's iterations on the host, as ``on_device`` does on the devices."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begin(session.progress)

    def _begin(self, progress: Mapping[str, Any]) -> None:
        job = self._session.job
        since = IntervalSums.of(progress, job.algorithm)
        none = no_episodes(1, job.source.spec.info_metrics).merge()

        def of_policy(sums: Mapping[str, Array], episodes: EpisodeStats) -> tuple[Any, ...]:
            return {name: float(value) for name, value in sums.items()}, with_info(
                episodes.merge(), none
            )

        self.iterations = int(since.iterations)
        self._learned = since.learned
        self._sums, episodes = over_policies(of_policy, 2)(since.sums, since.episodes)
        self._episodes = [episodes]
        self._metrics: list[tuple[Any, Any]] = []  # not on the host yet

    def ended(self, episodes: Mapping[str, EpisodeStats]) -> None:
        """Adds each policy's statistics of finished episodes."""
        self._episodes.append(episodes)

    def learned(self, metrics: Mapping[str, Any], counts: Mapping[str, bool]) -> None:
        """Adds an iteration's metrics; ``counts`` is False if it made no update,
        as while a replay memory fills.

        Both are dicts keyed by policy, without those that have not had their turn.
        """
        self._metrics.append((counts, metrics))
        if len(self._metrics) == _FETCH:
            self._fetch()

    def _fetch(self) -> None:
        def added(
            counts: bool, learned: Array, sums: dict[str, float], metrics: Mapping[str, Array]
        ) -> Any:
            new = {}
            for name, value in metrics.items():
                addend = float(value) if counts else 0.0
                new[name] = sums.get(name, 0.0) + addend
            return np.int32(learned + counts), {**sums, **new}

        for counts, metrics in jax.device_get(self._metrics):
            learned, sums = over_policies(added, 2)(counts, self._learned, self._sums, metrics)
            self._learned = {**self._learned, **learned}
            self._sums = {**self._sums, **sums}
        self._metrics = []

    def since(self) -> IntervalSums:
        """Returns the sums so far."""
        self._fetch()
        self._episodes = [over_policies(EpisodeStats.merge)(EpisodeStats.stack(self._episodes))]
        return IntervalSums(np.int32(self.iterations), self._learned, self._sums, self._episodes[0])

    def restart(self) -> None:
        """Begins the next interval."""
        self._begin({})


_FETCH = 1000
"""Iterations after which metrics are fetched from the devices."""


def updates_of(state: TrainState) -> Any:
    """Returns the number of updates so far; of all policies, a dict keyed by policy."""
    return jax.tree.map(int, state.updates)


def of_all(
    steps: np.ndarray, episodes: Mapping[str, EpisodeStats]
) -> list[tuple[np.ndarray, Mapping[str, EpisodeStats]]]:
    """Returns the env steps and agent steps, ``[2]``, and the finished episodes of one rollout per
    process.
    """
    values, structure = jax.tree.flatten(episodes)
    rollout = [steps.tolist(), [value.tolist() for value in values]]
    return [
        (
            np.array(steps),
            jax.tree.unflatten(structure, [np.array(value, np.float32) for value in values]),
        )
        for steps, values in peers.all_gather(rollout, "a rollout")
    ]


def with_info(episodes: EpisodeStats, none: EpisodeStats) -> EpisodeStats:
    """Returns the statistics with the metrics of ``none``, whose values replace missing ones."""
    return episodes._replace(
        info={metric: episodes.info.get(metric, zeros) for metric, zeros in none.info.items()}
    )


def _ratio(total: Array, number: Array, count: Array) -> float | None:
    if not count:
        return None
    mean = float(total) / float(number)
    return None if math.isnan(mean) else mean  # NaN: losses of an update that was skipped


def episode_metrics(episodes: EpisodeStats, ratio: Callable[..., Any] = _ratio) -> dict[str, Any]:
    """Returns means over the finished episodes; None if there are none.

    Args:
      ratio: ``(total, number, count) -> total / number``,
        or what stands for no value where ``count`` is 0.
    """
    count, total, length, least, most, info = episodes
    return {
        "episode/count": count if isinstance(count, jax.Array) else float(count),
        "episode/return": ratio(total, count, count),
        "episode/length": ratio(length, count, count),
        "episode/return_min": ratio(least, 1, count),
        "episode/return_max": ratio(most, 1, count),
        **{f"info/{name}": ratio(x, n, n) for name, (x, n) in info.items()},
    }


def metrics_of(
    since: IntervalSums, xp: Any = np, ratio: Callable[..., Any] = _ratio
) -> dict[str, Any]:
    """Returns an interval's means: of all episodes, and each policy's metrics and episodes.

    The names are like ``prey/loss/q``, or ``loss/q`` for a policy without a name.

    Args:
      xp: ``jax.numpy`` in a program.
      ratio: as for ``episode_metrics``.
    """

    def of_policy(
        learned: Array, sums: Mapping[str, Array], episodes: EpisodeStats
    ) -> dict[str, Any]:
        means = {name: ratio(value, learned, learned) for name, value in sums.items()}
        return {**episode_metrics(episodes.merge(), ratio), **means}

    policies = flat(over_policies(of_policy)(dict(sorted(since.learned.items())), *since[2:]))
    if "" in since.episodes:
        return policies
    return {**episode_metrics(merged(since.episodes, xp), ratio), **policies}


def report(
    session: Session,
    state: TrainState,
    steps: np.ndarray,
    clock: Clock,
    since: IntervalSums,
    *,
    due: bool,
    window: Window,
    extra_metrics: Mapping[str, float | None] = {},
    actor: PyTree = (),
    row: int | None = None,
    extra_progress: Mapping[str, Any] = {},
) -> Report:
    """Makes the report of an interval from its numbers on the host.

    Args:
      steps: env steps and agent steps of the run so far, ``[2]``.
      due: True if the interval is complete; otherwise a resumed run repeats the report.
      window: the episodes of the newest complete intervals, with this one if it is ``due``.
      extra_metrics: metrics in addition to the learner's.
      actor: the actors' state, for a checkpoint; () if environments run on the host.
      row: as for ``copied``.
      extra_progress: more JSON for a checkpoint's progress.
    """
    job = session.job
    config = session.config
    acting = dataclasses.replace(config, algorithm=varied(config.algorithm, session.hyper))
    copy = partial(copied, row=row)
    failed = diverged(state.skipped)
    iteration = int(state.iteration)
    updates = sum(map(int, jax.tree.leaves(state.updates)))  # of all policies
    step = updates if config.clock == "updates" else int(steps[0])
    env_steps, agent_steps = map(int, steps)
    rates = clock.rates(env_steps, agent_steps, updates, config.clock)
    if not jax.tree.leaves(state.memory):
        del rates["replay/ratio"]  # the algorithm has no replay
    if due:
        clock.reported(iteration, env_steps, agent_steps, updates)
    progress = {
        "env_steps": env_steps,
        "agent_steps": agent_steps,
        "updates": updates,
        "iteration": iteration,
        **clock.to_json(),
        "since": None if due else since.to_json(),
        "score": window.score.hex(),
        "window": window.to_json(),
        "data": job.data_identity,
        **extra_progress,
    }

    def checkpoint() -> Checkpoint:
        held = Checkpoint(job.bare(saved(session, state)), actor, {})
        copied: Checkpoint = copy(held, "checkpoint", arrays.pieces)
        return copied._replace(progress=progress)

    return Report(
        env_steps=env_steps,
        updates=updates,
        iteration=iteration,
        wall_time_s=clock.wall_time(),
        metrics={
            **metrics_of(since),
            **window.metrics(None if due else since.episodes),
            **extra_metrics,
            **rates,
        },
        variables=lambda: job.source.spec.bare(copy(state.variables, "variables")),
        checkpoint=checkpoint,
        ended_by=None if failed else session.ended_by(step, window.score),
        diverged=failed,
        config=acting,
        agent_steps=agent_steps if job.source.spec.num_agents > 1 else None,
        clock=config.clock,
    )


def diverged(skipped: Any) -> bool:
    """Returns whether too many gradients in a row were not finite, by a state's counts."""
    return max(map(int, jax.tree.leaves(skipped))) >= MAX_SKIPPED


def saved(session: Session, state: TrainState) -> TrainState:
    """Returns the part of a state that checkpoints hold, still on the devices."""
    if session.config.checkpoint_replay is False:
        return state._replace(memory=())
    return state


def held(checkpoints: Mapping[int, Checkpoint], member: int) -> Checkpoint:
    """Returns a member's checkpoint that has been copied.

    Raises:
      RuntimeError: as ``copied``.
    """
    if member not in checkpoints:
        raise _past("checkpoint")
    return checkpoints[member]


def _past(method: str) -> RuntimeError:
    return RuntimeError(
        f"this report is past: ask for report.{method}() before taking the next one"
    )


def copied(
    tree: Any, method: str, to_host: Callable[[Any], Any] = arrays.copied, *, row: int | None = None
) -> Any:
    """Copies the arrays of a report to the host.

    Args:
      method: the function of the report that asks for them.
      to_host: ``arrays.copied`` or ``arrays.pieces``.
      row: the member whose part of the arrays on the devices is copied; None: they have no axis of
        members.

    Raises:
      RuntimeError: training has continued and has overwritten them.
    """
    leaves, structure = jax.tree.flatten(tree)
    on_devices = {at: x for at, x in enumerate(leaves) if isinstance(x, jax.Array)}
    if any(x.is_deleted() for x in on_devices.values()):
        raise _past(method)
    if row is not None and on_devices:
        parts = _row_of(on_devices, np.int32(row))
        leaves = [parts.get(at, x) for at, x in enumerate(leaves)]
    return to_host(jax.tree.unflatten(structure, leaves))


_row_of = jax.jit(lambda arrays, row: jax.tree.map(lambda x: x[row], arrays))
