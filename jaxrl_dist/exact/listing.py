"""Lists the states of a compiled environment, breadth first, and makes a table of them.

What belongs to a state is read from the program of a step: those parts of the environment's own
state on which rewards, ends or observations depend, now or later. So clocks of a time limit and
statistics do not tell states apart, and a card that nobody sees does. A program that reads no
random key is deterministic, and its table is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxrl_dist.actors.step import read_by
from jaxrl_dist.envs.base import DeviceEnv, label_of
from jaxrl_dist.envs.host import gymnasium
from jaxrl_dist.envs.making import construct
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact.table import Table, as_bytes
from jaxrl_dist.nn import observations
from jaxrl_dist.spaces import Discrete, describe
from jaxrl_dist.types import EnvSpec, PyTree

PARTS = 10
"""Parts of the tries, from which the errors of numbers are estimated."""
ROWS = 8192
"""Steps of a dispatch."""
PLAUSIBLE = 1e-3
"""Start states count as equally likely if their counts are at least so probable when they are."""


def table_of(
    env: DeviceEnv,
    max_states: int = 100_000,
    tries: int = 1000,
    starts: int = 10_000,
    seed: int = 0,
) -> Table:
    """Finds all states that an episode of a compiled environment, with all its wrappers, can reach.

    Args:
      tries: number for each action in each state, if steps are random and the environment does not
        name their outcomes.
      starts: number of resets, if they are random and the environment does not name its first
        states.

    Raises:
      ConfigError: there are more than ``max_states``, its actions are not discrete, several agents
        act in it, or it has no simulator.
    """
    return _Listing(env, max_states, tries, starts, jax.random.key(seed)).table()


def of_source(source: EnvSource, **limits: int) -> Table:
    """Returns the table of an environment: of its states that can be listed, or Gymnasium's ``P``.

    Args:
      limits: as for ``table_of``.

    Raises:
      ConfigError: it has no table.
    """
    spec = source.spec
    wrappers = source.wrappers
    if source.pure is not None:
        return table_of(source.pure, **limits)
    discrete(spec)
    if spec.backend != "gymnasium":
        raise ConfigError(f"{label_of(spec)} runs outside JAX, where its states cannot be listed")
    if wrappers.hide or wrappers.frame_stack or wrappers.action_repeat > 1:
        raise ConfigError(
            f"{label_of(spec)} has a table only without --hide, --frame-stack and --action-repeat"
        )
    env = construct(spec.id, gymnasium.options(spec.id, source.options))
    try:
        return Table.of_gymnasium(env, mask=spec.mask)
    except ConfigError as error:
        raise ConfigError(
            f"{label_of(spec)} runs outside JAX, where only a table P can be read: {error}"
        ) from None
    finally:
        env.close()


def discrete(spec: EnvSpec) -> int:
    """Returns the number of actions of the only agent.

    Raises:
      ConfigError: they are not discrete, or there are several agents.
    """
    if spec.policies or spec.num_agents > 1:
        raise ConfigError(
            f"{label_of(spec)} has several agents, but a table describes one; in a game of two use "
            "opponents=self"
        )
    if not isinstance(spec.action, Discrete):
        raise ConfigError(
            f"{label_of(spec)} has actions {describe(spec.action)}, but a table needs discrete ones"
        )
    return spec.action.n


class _Listing:
    """The states so far, numbered as they were found."""

    def __init__(self, env: DeviceEnv, most: int, tries: int, starts: int, key: jax.Array) -> None:
        self.env = env
        self.actions = discrete(env.spec)
        self.most = most
        self.key = key
        self.number: dict[bytes, int] = {}
        self.listed: list[tuple[PyTree, np.ndarray]] = []
        """Observations and legal actions of the states, in their order."""
        simulate = env.simulate
        keys = jax.random.split(key, 1)
        if simulate is None:
            raise ConfigError(
                f"{label_of(env.spec)} cannot be simulated, so its states cannot be listed"
            )

        def reset(keys: jax.Array) -> tuple[PyTree, PyTree]:
            state, obs = env.reset(keys)
            return simulate(state).state, obs

        self.reset = reset
        self.step = jax.vmap(simulate(jax.eval_shape(lambda keys: env.reset(keys)[0], keys)).step)
        state, _ = jax.eval_shape(reset, keys)
        self.own = _keys_in(state)
        random = self._read(keys, state)
        self.sampled = random and env.outcomes is None
        self.tries = tries if self.sampled else 1
        draws_starts = any(read_by(reset, keys)) and env.starts is None
        self.starts = starts if draws_starts else 1
        self.branch = jax.jit(self._branch)

    def _read(self, keys: jax.Array, state: PyTree) -> bool:
        """Finds the parts that belong to a state; returns whether steps are random."""
        leaves, structure = jax.tree.flatten(state)

        def step(leaves: list[jax.Array], action: jax.Array, keys: jax.Array) -> list[Any]:
            state, *rest = self.step(jax.tree.unflatten(structure, leaves), action, keys)
            return [jax.tree.leaves(state), rest]

        program = jax.make_jaxpr(step)(leaves, jax.ShapeDtypeStruct((1,), np.int32), keys).jaxpr
        wanted = [False] * len(leaves)
        more = [True] * (len(program.outvars) - len(leaves))
        while True:
            used = partial_eval.dce_jaxpr(program, wanted + more)[1]
            new = [a or b for a, b in zip(wanted, used[: len(leaves)], strict=True)]
            if new == wanted:
                break
            wanted = new
        self.parts = [i for i, belongs in enumerate(wanted) if belongs and i not in self.own]
        return used[-1] or any(wanted[i] for i in self.own)

    def _branch(self, state: PyTree, action: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        """Returns the probabilities ``[n, K]`` of the outcomes of ``n`` actions, and the outcomes,
        ``[n * K, ...]``.
        """
        if self.env.outcomes is not None:
            redrawn = self._redrawn(state, jax.random.split(key, len(action)))
            probability, after = jax.vmap(self.env.outcomes)(redrawn, action)
            return probability, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), after)
        state, rows = jax.tree.map(lambda x: jnp.repeat(x, self.tries, axis=0), (state, action))
        keys = jax.random.split(key, (2, len(rows)))
        after = self.step(self._redrawn(state, keys[1]), rows, keys[0])
        return jnp.full((len(action), self.tries), 1 / self.tries), *after

    def _redrawn(self, state: PyTree, keys: jax.Array) -> PyTree:
        """Replaces the keys in a state, which are chance and do not belong to it."""
        leaves, structure = jax.tree.flatten(state)
        for i, typed in self.own.items():
            own = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys)
            leaves[i] = own if typed else jax.random.key_data(own)
        return jax.tree.unflatten(structure, leaves)

    def numbered(self, state: PyTree, obs: PyTree) -> tuple[np.ndarray, PyTree]:
        """Returns the numbers ``[N]`` of states, and the new states with their legal actions.

        Raises:
          ConfigError: there are too many.
        """
        leaves = jax.tree.leaves(state)
        before = len(self.number)
        if not len(leaves[0]):
            return np.zeros(0, np.int64), (state, np.zeros((0, self.actions), bool))
        rows = as_bytes([*(leaves[i] for i in self.parts), *jax.tree.leaves(obs)])
        names, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(names), np.int64)
        for i, name in zip(order, names[order].tolist(), strict=True):
            number[i] = self.number.setdefault(name, len(self.number))
        if len(self.number) > self.most:
            raise ConfigError(
                f"{label_of(self.env.spec)} has more than {self.most:,} states, too many for exact "
                "answers; raise the limit of states or use a smaller environment"
            )
        new = first[order[number[order] >= before]]
        obs = _rows(obs, new)
        mask = observations.legal(self.env.spec, obs)
        if mask is None:
            legal = np.ones((len(new), self.actions), bool)
        else:
            legal = np.asarray(mask, bool)
        self.listed.append((obs, legal))
        return number[inverse.reshape(-1)], (_rows(state, new), legal)

    def begin(self) -> tuple[np.ndarray, str, PyTree]:
        """Returns the probabilities of the first states, what is sampled, and the states."""
        if self.env.starts is not None:
            probability, *first = _to_host(self.env.starts())
            _check_probabilities(self.env, "starts", probability[None])
        else:
            keys = jax.random.split(jax.random.fold_in(self.key, 1), self.starts)
            first = _to_host(jax.jit(self.reset)(keys))
            probability = np.ones(self.starts)
        numbers, new = self.numbered(*first)
        share = np.bincount(numbers, np.asarray(probability, np.float64))
        share = share / share.sum()
        if self.starts == 1 or len(share) == 1:
            return share, "", new
        if _equally_likely(share, self.starts):
            equal = np.full(len(share), 1 / len(share))
            resets = f"{self.starts:,} resets, with equal chances"
            return equal, f"first states ({resets})", new
        return share, f"first states ({self.starts:,} resets)", new

    def table(self) -> Table:
        """Lists all states."""
        first, sampled_starts, frontier = self.begin()
        sampled = [sampled_starts] if sampled_starts else []
        if self.sampled:
            sampled.append(f"outcomes of steps ({self.tries:,} tries of each action in each state)")
        edges: list[tuple[np.ndarray, ...]] = []
        chunk = max(1, ROWS // (self.actions * self.tries))
        done = 0
        while count := len(frontier[1]):
            fresh = []
            for at in range(0, count, chunk):
                state, legal = _rows(frontier, slice(at, at + chunk))
                new, columns = self._expand(state, legal, done, chunk)
                done += len(legal)
                fresh.append(new)
                edges.append(columns)
            frontier = _joined(fresh)
        obs, legal = _joined(self.listed)
        start = np.pad(first, (0, len(legal) - len(first)))
        *columns, tried = _joined(edges)
        table = _merged(columns, start, legal, obs)
        number = min(PARTS, self.tries) if self.sampled else 0
        chosen = ([column[tried % number == part] for column in columns] for part in range(number))
        parts = tuple(_merged(part, start, legal, obs) for part in chosen)
        return table._replace(sampled=" and ".join(sampled), parts=parts)

    def _expand(
        self, state: PyTree, legal: np.ndarray, first: int, chunk: int
    ) -> tuple[PyTree, tuple[np.ndarray, ...]]:
        """Takes all actions in states numbered from ``first``.

        Returns:
          The new states with their legal actions, and the columns of ``_merged`` with the number of
          the try.
        """
        count, actions = legal.shape
        small = max(1, chunk // 16)
        size = chunk if count > small else small  # two programs
        padded = jax.tree.map(
            lambda x: np.repeat(x[np.arange(size) % count], actions, axis=0), state
        )
        action = np.tile(np.arange(actions, dtype=np.int32), size)
        probability, *after = _to_host(
            self.branch(padded, action, jax.random.fold_in(self.key, 2 + first))
        )
        probability = probability[: count * actions]
        _check_probabilities(self.env, "outcomes", probability[legal.reshape(-1)])
        probability = np.where(legal.reshape(-1, 1), probability, 0)
        outcomes = probability.shape[1]
        rows = np.flatnonzero(probability)
        after, obs, reward, going = _rows(after, rows)
        target = np.zeros(len(rows), np.int64)
        on = going != 0
        target[on], new = self.numbered(_rows(after, on), _rows(obs, on))
        pair = first * actions + rows // outcomes
        numbers = (x.astype(np.float64) for x in (probability.ravel()[rows], reward, going))
        return new, (pair, target, *numbers, rows % outcomes)


def _check_probabilities(env: DeviceEnv, method: str, probability: np.ndarray) -> None:
    """Checks the probabilities ``[N, K]`` that an environment names.

    Raises:
      ConfigError: some are negative, or their sum is not 1.
    """
    whole = np.abs(probability.sum(axis=1, dtype=np.float64) - 1) < 1e-3
    wrong = (probability < 0).any(axis=1) | ~whole
    if wrong.any():
        raise ConfigError(
            f"{method} of {label_of(env.spec)} gives the probabilities "
            f"{probability[wrong][0].tolist()}; their sum must be 1"
        )


def _merged(
    columns: Sequence[np.ndarray], start: np.ndarray, legal: np.ndarray, obs: PyTree
) -> Table:
    """Makes the table of outcomes, and joins equal ones.

    Args:
      columns: the state and action as ``s * A + a``, next state, probability, reward and ``going``
        of each outcome, ``[E]``.
    """
    pair, target, probability, reward, going = columns
    states, actions = legal.shape
    # float32 sums to 1 only almost
    probability = probability / np.bincount(pair, probability)[pair]
    ends = np.unique(going)
    code = (pair * states + target) * len(ends) + np.searchsorted(ends, going)
    codes, inverse = np.unique(code, return_inverse=True)
    pairs = codes // len(ends) // states
    place = np.arange(len(codes)) - np.searchsorted(pairs, pairs)

    def filled(values: np.ndarray) -> np.ndarray:
        whole = np.zeros((states * actions, int(place.max()) + 1), values.dtype)
        whole[pairs, place] = values
        return whole.reshape(states, actions, -1)

    return Table(
        next=filled(codes // len(ends) % states),
        probability=filled(np.bincount(inverse, probability)),
        reward=np.bincount(pair, probability * reward, states * actions).reshape(states, actions),
        going=filled(ends[codes % len(ends)]),
        start=start,
        legal=legal,
        obs=obs,
    )


def _equally_likely(share: np.ndarray, count: int) -> bool:
    """Returns whether the shares of ``count`` samples agree with equal probabilities, by a
    chi-square test.
    """
    from scipy.stats import chisquare

    return count >= 5 * len(share) and bool(chisquare(share * count).pvalue > PLAUSIBLE)


def _keys_in(state: PyTree) -> dict[int, bool]:
    """Returns the leaves of a state ``[N, ...]`` that hold random keys, by dtype or by shape and
    name, and whether each is typed.
    """
    keys = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        name = jax.tree_util.keystr(path[-1:]).lower()
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        named = "key" in name or "rng" in name
        if typed or (named and x.dtype == np.uint32 and x.shape[1:] == (2,)):
            keys[i] = typed
    return keys


def _to_host(tree: PyTree) -> PyTree:
    """Returns numpy arrays; for typed keys, which no step will read, zeros."""

    def fetched(x: jax.Array) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return np.zeros(len(x))
        return np.asarray(x)

    return jax.tree.map(fetched, tree)


def _rows(tree: PyTree, rows: Any) -> PyTree:
    return jax.tree.map(lambda x: x[rows], tree)


def _joined(parts: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)
