"""Measures a policy against the exact truth of a table."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, MAX_EPISODE_STEPS
from jaxrl_dist.actors.step import read_by
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import games, heat, solve
from jaxrl_dist.exact.listing import discrete, of_source
from jaxrl_dist.exact.table import Table
from jaxrl_dist.protocols import Traits
from jaxrl_dist.types import Algorithm, Context, PyTree, Variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 4096
"""States whose actions and values are computed at a time."""
TIE = 1e-6
"""Part of the range of optimal values within which an action counts as optimal."""


class Truth(NamedTuple):
    """A table with its optimum, computed once for all policies that are measured against it."""

    table: Table
    discount: float
    steps: int
    """After which episodes are cut."""
    q: np.ndarray
    """[S, A] optimal values."""
    best: float
    """The best return of an episode, undiscounted."""

    @classmethod
    def of(cls, table: Table, discount: float, limit: int | None) -> Truth:
        """Solves a table.

        Args:
          limit: steps after which episodes are truncated; None: as in evaluations.

        Raises:
          ConfigError: as ``solve.optimal``.
        """
        steps = limit or MAX_EPISODE_STEPS
        q = solve.optimal(table, discount)
        # Value iteration stops a little before its end; the values of its policy have no residual.
        if discount < 1:
            values = solve.values(table, solve.greedy(table, q), discount)
            q = solve.action_values(table, values, discount)
        return cls(table, discount, steps, q, solve.episode_return(table, None, steps))

    @property
    def optimum(self) -> float:
        """The best discounted return from the first states."""
        return solve.start_value(self.table, solve.state_values(self.table, self.q))

    def value(self, policy: np.ndarray) -> float | None:
        """Returns a policy's discounted return from the first states; None if it does not exist."""
        try:
            return solve.start_value(self.table, solve.values(self.table, policy, self.discount))
        except solve.NoValues:
            return None

    def sought(self, learnt: Learnt) -> np.ndarray:
        """Returns the optimal action values ``[S, A]``, with the algorithm's entropy."""
        if learnt.temperature > 0:
            return solve.optimal(self.table, self.discount, temperature=learnt.temperature)
        return self.q

    def agreement(self, policy: np.ndarray) -> np.ndarray:
        """Returns the probability ``[S]`` with which a policy takes an optimal action."""
        q = solve.masked(self.table, self.q)
        slack = TIE * max(np.ptp(self.q[self.table.legal]), 1e-9)
        return np.sum(policy * (q >= q.max(axis=1, keepdims=True) - slack), axis=1)


class Learnt(NamedTuple):
    """What an algorithm does and believes in each state."""

    greedy: np.ndarray
    """[S, A] probabilities, 1 for the action that it takes."""
    sampled: np.ndarray | None
    """[S, A] probabilities of its drawn actions, at the end of its schedules; None: not known."""
    q: np.ndarray | None
    """[S, A] its action values; None: it has none."""
    temperature: float
    """Weight of the entropy in its values."""


class Measure:
    """Asks an algorithm what it does in all states of a table, and compares it with the truth."""

    def __init__(
        self,
        algorithm: Algorithm,
        table: Table,
        vary: Callable[[Mapping[str, Any]], Algorithm] | None = None,
    ) -> None:
        """Traces the algorithm's functions.

        Args:
          vary: returns the algorithm with other hyperparameters, which may be traced scalars.

        Raises:
          ConfigError: its actions depend on more than the observation.
        """
        self.table = table
        states, actions = table.shape
        size = min(states, BATCH)
        core = algorithm.initial_core(size)
        rows = np.arange(-(-states // size) * size).reshape(-1, size) % states
        self._rows = rows
        chosen = np.tile(np.arange(actions, dtype=np.int32)[:, None], (1, size))

        def act(algorithm: Algorithm, variables: Variables, obs: PyTree, core: PyTree) -> jax.Array:
            return algorithm.policy(
                variables, obs, core, Context(None, jnp.float32(END_OF_SCHEDULES))
            )[0]

        def log_probs(
            algorithm: Algorithm, variables: Variables, obs: PyTree, core: PyTree
        ) -> jax.Array:
            assert algorithm.log_prob is not None
            context = Context(
                jax.random.split(jax.random.key(0), size), jnp.float32(END_OF_SCHEDULES)
            )
            columns = [
                algorithm.log_prob(variables, obs, core, jnp.asarray(action), context)
                for action in chosen
            ]
            return jnp.stack(columns, axis=-1)

        shapes = jax.eval_shape(algorithm.init, jax.random.key(0)), self._batch(rows[0]), core
        memory = slice(len(jax.tree.leaves(shapes[:2])), None)
        if any(read_by(partial(act, algorithm), *shapes)[memory]):
            raise ConfigError("this policy has a memory, which the states of a table do not hold")
        samples = algorithm.log_prob is not None and not any(
            read_by(partial(log_probs, algorithm), *shapes)[memory]
        )

        @jax.jit
        def ask(hyper: Mapping[str, Any], variables: Variables, obs: PyTree) -> tuple[Any, ...]:
            member = algorithm
            if hyper and vary is not None:
                member = vary(hyper)
            action = act(member, variables, obs, core)
            log_prob = log_probs(member, variables, obs, core) if samples else None
            if member.action_values is None:
                return action, log_prob, None, None
            q, temperature = member.action_values(variables, obs)
            return action, log_prob, q, temperature

        self._ask = ask

    def _batch(self, rows: np.ndarray) -> PyTree:
        return jax.tree.map(lambda x: x[rows], self.table.obs)

    def learnt(self, variables: Variables, hyper: Mapping[str, Any] = {}) -> Learnt:
        """Returns what the algorithm does and believes with these variables and hyperparameters."""
        states, actions = self.table.shape
        batches = list[tuple[Any, ...]]()
        for rows in self._rows:
            *arrays, temperature = self._ask(dict(hyper), variables, self._batch(rows))
            batches.append(jax.device_get(tuple(arrays)))
        action, log_prob, q = jax.tree.map(lambda *x: np.concatenate(x)[:states], *batches)
        sampled = None
        if log_prob is not None:
            weight = np.exp(log_prob.astype(np.float64)) * self.table.legal
            sampled = weight / weight.sum(axis=1, keepdims=True)
        q = None if q is None else q.astype(np.float64)
        return Learnt(np.eye(actions)[action], sampled, q, float(temperature or 0.0))

    def __call__(
        self, variables: Variables, truth: Truth, hyper: Mapping[str, Any] = {}
    ) -> dict[str, float]:
        """Returns the numbers, by name, of what ``learnt`` returns.

        ``optimum`` and ``return`` are returns of episodes; ``value``, ``value_optimal`` and
        ``regret``, their difference, are discounted. Numbers of a policy are missing where they do
        not exist, as with discount 1 if episodes need not end. ``return_sampled`` and
        ``value_sampled`` are for sampled actions, if their probabilities are known. ``q_error_max``
        is the largest over states and legal actions, and ``q_error`` the mean over the actions that
        the greedy policy takes, weighted by its discounted visits. ``agreement`` is the share of
        states where the greedy action is optimal, and ``agreement_visited`` the share of visits.
        """
        return numbers(truth, self.learnt(variables, hyper))


def numbers(truth: Truth, learnt: Learnt) -> dict[str, float]:
    """Returns the numbers of ``Measure``."""
    table = truth.table
    discount = truth.discount
    visits = None
    agreement = truth.agreement(learnt.greedy)
    measured = {
        "optimum": truth.best,
        "return": solve.episode_return(table, learnt.greedy, truth.steps),
        "value_optimal": truth.optimum,
        "agreement": float(agreement.mean()),
    }
    if (value := truth.value(learnt.greedy)) is not None:
        visits = solve.visits(table, learnt.greedy, discount)
        share = visits.sum(axis=1) / visits.sum()
        measured |= {
            "value": value,
            "regret": truth.optimum - value,
            "agreement_visited": float(share @ agreement),
        }
    if learnt.sampled is not None:
        measured["return_sampled"] = solve.episode_return(table, learnt.sampled, truth.steps)
        if (value := truth.value(learnt.sampled)) is not None:
            measured["value_sampled"] = value
    if learnt.q is not None:
        best = truth.sought(learnt)
        error = np.where(table.legal, np.abs(learnt.q - best), 0)
        if visits is not None:
            measured["q_error"] = float((error * visits).sum() / visits.sum())
        measured["q_error_max"] = float(error.max())
        measured["q_largest"] = float(np.abs(best[table.legal]).max())
        if learnt.temperature > 0:
            measured["temperature"] = learnt.temperature
    return measured


def errors(truth: Truth, learnt: Learnt, measured: Mapping[str, float]) -> dict[str, float]:
    """Returns the standard errors of ``numbers`` for a finite number of tries: ``NAME_error``."""
    table = truth.table
    steps = truth.steps
    discount = truth.discount
    best = solve.greedy(table, truth.q)

    def value(policy: np.ndarray) -> Callable[[Table], float]:
        return lambda part: solve.start_value(part, solve.values(part, policy, discount))

    def episode(policy: np.ndarray) -> Callable[[Table], float]:
        return lambda part: solve.episode_return(part, policy, steps)

    number_of = {
        "optimum": lambda part: solve.return_of_best(table, part, steps),
        "return": episode(learnt.greedy),
        "value_optimal": value(best),
        "value": value(learnt.greedy),
    }
    if learnt.sampled is not None:
        number_of |= {
            "return_sampled": episode(learnt.sampled),
            "value_sampled": value(learnt.sampled),
        }
    by_name = {}
    for name, number in number_of.items():
        error = solve.standard_error(table, number) if name in measured else None
        if error is not None:
            by_name[f"{name}_error"] = error
    return by_name


class Measured(NamedTuple):
    """A trained policy beside the truth."""

    env: str
    truth: Truth
    learnt: Learnt
    numbers: dict[str, float]
    """As ``Measure`` returns them, and their ``errors``."""

    @property
    def known(self) -> str:
        """Whether the table is exact, for reading."""
        sampled = self.truth.table.sampled
        if sampled:
            return f"sampled: {sampled}"
        return "exact"

    def summary(self) -> dict[str, Any]:
        """Returns the numbers as JSON."""
        states, actions = self.truth.table.shape
        table = self.truth.table
        about = {"env": self.env, "states": states, "actions": actions, "sampled": table.sampled}
        return {
            **about,
            "alike": table.mixed(),
            "discount": self.truth.discount,
            "steps": self.truth.steps,
            **self.numbers,
        }

    def figure(self, grid: tuple[int, ...] | None = None) -> Figure:
        """Draws maps of optimal values, of the greedy policy's values and visits,
        and of the errors of action values.

        Raises:
          ConfigError: as ``heat.cells``.
        """
        table, discount = self.truth.table, self.truth.discount
        maps = {
            "optimal value": (solve.state_values(table, self.truth.q), False),
            "value of the policy": (solve.values(table, self.learnt.greedy, discount), False),
            "its visits": (solve.visits(table, self.learnt.greedy, discount).sum(axis=1), True),
        }
        if self.learnt.q is not None:
            error = np.where(table.legal, np.abs(self.learnt.q - self.truth.sought(self.learnt)), 0)
            maps["largest error of Q"] = error.max(axis=1), False
        return heat.figure(maps, heat.cells(table.obs, grid))

    def draw(self, path: str | pathlib.Path, grid: tuple[int, ...] | None = None) -> None:
        """Writes the ``figure`` as an image file; its extension sets the format."""
        self.figure(grid).savefig(path)


def of_policy(policy: Any, *, discount: float | None = None, **limits: int) -> Measured:
    """Measures a trained policy in its environment.

    Args:
      policy: as ``load_policy`` returns it.
      discount: of values; None: as in its training.
      limits: as for ``listing.table_of``.

    Raises:
      ConfigError: its environment has no table, it acts by a memory, or there is no discount.
    """
    if not hasattr(policy, "source"):
        raise ConfigError(f"exact.measure takes load_policy(run_dir), not {policy!r:.80}")
    spec = policy.source.spec
    discrete(spec)
    learnt_with = Traits.of(policy.config.algorithm).discount
    discount = learnt_with if discount is None else discount
    if discount is None:
        raise ConfigError("this algorithm has no discount; set --discount")
    table = of_source(policy.source, **limits)
    measure = Measure(policy.algorithm, table)
    learnt = measure.learnt(policy.variables)
    truth = Truth.of(table, discount, spec.max_episode_steps)
    if discount != learnt_with:
        learnt = learnt._replace(q=None)  # its values are of another discount
    measured = numbers(truth, learnt)
    measured |= errors(truth, learnt, measured)
    return Measured(label_of(spec), truth, learnt, measured)


class Played(NamedTuple):
    """How much the best answers win against the policies of a game of two sides, as a mean over
    both seats.
    """

    env: str
    histories: int
    sampled: str
    """As in ``Table``."""
    greedy: float
    """Against the newest policy's best actions."""
    drawn: float | None
    """Against its drawn actions; None: their probabilities are not known."""
    mixture: float | None
    """Against one of all policies, drawn for each game; None: there is one policy."""
    policies: int


def exploited(game: games.Game, learnt: Learnt) -> dict[str, float]:
    """Returns the ``exploitability`` of a policy's best actions, and ``exploitability_sampled`` if
    the probabilities of its drawn actions are known.
    """
    numbers = {"exploitability": game.exploitability(learnt.greedy)}
    if learnt.sampled is not None:
        numbers["exploitability_sampled"] = game.exploitability(learnt.sampled)
    return numbers


def of_game(policies: Sequence[Any], **limits: int) -> Played:
    """Measures the exploitability of policies of a game in which one agent moves for both sides.

    Args:
      policies: as ``load_policy`` returns them, the newest last.
      limits: as for ``listing.table_of``.

    Raises:
      ConfigError: it is another game, or a policy acts by a memory.
    """
    source = policies[-1].source
    table = of_source(source, **limits)
    game = games.Game(table)
    measure = Measure(policies[-1].algorithm, table)
    learnt = [measure.learnt(policy.variables) for policy in policies]
    newest = exploited(game, learnt[-1])
    plays = list[np.ndarray]()
    for one in learnt:
        plays.append(one.greedy if one.sampled is None else one.sampled)
    mixture = None
    if len(policies) > 1:
        mixture = game.exploitability(np.stack(plays))
    return Played(
        label_of(source.spec),
        sum(len(level.state) for level in game.levels),
        table.sampled,
        newest["exploitability"],
        newest.get("exploitability_sampled"),
        mixture,
        len(policies),
    )
