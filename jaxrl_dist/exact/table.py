"""Small Markov decision processes as tables of probabilities, rewards and ends, in float64 on the
host.

Source: Sutton and Barto (2018), chapter 4; Kitamura and Yonetani (2021, ShinRL),
https://arxiv.org/abs/2112.04123.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import sparse
from jaxrl_dist.types import PyTree

_HARMLESS = "TimeLimit", "OrderEnforcing", "PassiveEnvChecker"
"""Gymnasium's wrappers that leave rewards, observations and ends of the task as they are."""


class Table(NamedTuple):
    """``S`` states, ``A`` actions in each, and at most ``K`` outcomes of an action.

    A time limit is not part of it: episodes end where the task ends.
    """

    next: np.ndarray
    """[S, A, K] int: the state after an outcome; any where its probability or ``going`` is 0."""
    probability: np.ndarray
    """[S, A, K] float64, of sum 1 for each legal action."""
    reward: np.ndarray
    """[S, A] float64: the mean over outcomes."""
    going: np.ndarray
    """[S, A, K] float64: 1 where the episode continues, 0 where it ends, -1 where the other side
    moves."""
    start: np.ndarray
    """[S] float64 probabilities of the first state."""
    legal: np.ndarray
    """[S, A] bool; each state has a legal action."""
    obs: PyTree = None
    """[S, ...] what a policy sees in each state; None: not known."""
    sampled: str = ""
    """What is estimated from samples, for reading; empty: the table is exact."""
    parts: tuple[Table, ...] = ()
    """The table of each part of the tries, for errors, if the outcomes of steps are estimated."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of states and actions."""
        return self.reward.shape[0], self.reward.shape[1]

    def matrix(self, signed: bool = True) -> sparse.csr_array:
        """Returns the probabilities ``[S * A, S]`` with which the episode continues in a state.

        Its product with the values of the next states is the expected value after each action.

        Args:
          signed: probabilities are negative if the other side moves; False: who moves does not
            matter, as to visits.
        """
        going = self.going if signed else np.abs(self.going)
        weight = self.probability * going
        states, actions = self.shape
        rows = np.repeat(np.arange(states * actions), weight.shape[2])
        used = weight.ravel() != 0
        entries = weight.ravel()[used], (rows[used], self.next.ravel()[used])
        return sparse.csr_array(entries, shape=(states * actions, states))

    @classmethod
    def of_arrays(
        cls,
        probability: ArrayLike,
        reward: ArrayLike,
        *,
        next: ArrayLike | None = None,
        going: ArrayLike | None = None,
        start: ArrayLike | None = None,
        legal: ArrayLike | None = None,
        obs: PyTree = None,
    ) -> Table:
        """Makes a table of arrays.

        Args:
          probability: of the outcomes ``[S, A, K]``; it does not matter for illegal actions.
          reward: the mean ``[S, A]``, or the reward of each outcome ``[S, A, K]``.
          next: the state after each outcome ``[S, A, K]``; None: outcome ``k`` leads to state
            ``k``.
          going: as the field, ``[S, A, K]`` or what broadcasts to it; None: no episode ends.
          start: probabilities ``[S]``; None: all states are equally likely.
          legal: ``[S, A]`` bool; None: all actions are.

        Raises:
          ConfigError: shapes do not fit, or numbers are no probabilities or states; the message
            names the field.
        """
        probability = np.asarray(probability, np.float64)
        if probability.ndim != 3 or (next is None and probability.shape[2] != probability.shape[0]):
            wanted = "[S, A, S]" if next is None else "[S, A, K]"
            raise ConfigError(f"probability has shape {probability.shape}; {wanted} works")
        states, actions, outcomes = probability.shape
        if legal is None:
            legal = np.ones((states, actions), bool)
        legal = np.asarray(legal, bool)
        if legal.shape != (states, actions):
            raise ConfigError(f"legal has shape {legal.shape}; {(states, actions)} works")
        probability = np.where(legal[:, :, None], probability, 0)
        mean = np.asarray(reward, np.float64)
        if mean.shape == probability.shape:
            mean = np.einsum("sak,sak->sa", probability, mean)
        if next is None:
            next = np.broadcast_to(np.arange(outcomes), probability.shape)
        if start is None:
            start = np.full(states, 1 / states)
        if obs is not None:
            obs = jax.tree.map(np.asarray, obs, is_leaf=lambda x: not isinstance(x, dict))
        return cls(
            np.asarray(next),
            probability,
            mean,
            _broadcast_going(1 if going is None else going, probability.shape),
            np.asarray(start, np.float64),
            legal,
            obs,
        ).checked()

    def checked(self) -> Table:
        """Returns the table after checking that its numbers are probabilities, states and finite
        rewards.

        Raises:
          ConfigError: they are not; the message names the first such field and its place.
        """
        states, actions = self.probability.shape[:2]
        shapes = {"reward": (states, actions), "legal": (states, actions), "start": (states,)}
        shapes |= dict.fromkeys(("next", "going"), self.probability.shape)
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ConfigError(f"{name} has shape {getattr(self, name).shape}; {shape} works")
        if any(np.shape(x)[:1] != (states,) for x in jax.tree.leaves(self.obs)):
            raise ConfigError(f"obs needs an entry for each of {states} states")
        if not np.issubdtype(self.next.dtype, np.integer):
            raise ConfigError(f"next has numbers of {self.next.dtype}; integers work")
        whole = np.abs(self.probability.sum(axis=2) - 1) < 1e-9
        outside = (self.next < 0) | (self.next >= states)
        stuck = ~self.legal.any(axis=1, keepdims=True)
        wrong = {
            "probability must have the sum 1 over outcomes": self.legal & ~whole,
            "probability must be at least 0": (self.probability < 0).any(axis=2),
            f"next must be a state, 0 to {states - 1}": ((self.probability > 0) & outside).any(2),
            "going must be -1 to 1": ~(np.abs(self.going) <= 1).all(axis=2),
            "reward must be finite": ~np.isfinite(self.reward),
            "legal must allow an action": np.broadcast_to(stuck, self.legal.shape),
        }
        for rule, broken in wrong.items():
            if broken.any():
                state, action = np.argwhere(broken)[0]
                raise ConfigError(f"{rule}, which it does not in state {state} for action {action}")
        if not (self.start >= 0).all() or not abs(self.start.sum() - 1) < 1e-9:
            raise ConfigError(f"start must be probabilities of sum 1, not {self.start.sum():g}")
        return self

    @classmethod
    def of_gymnasium(cls, env: Any, *, mask: str | None = None) -> Table:
        """Makes the table of a Gymnasium environment that has ``P``, such as FrozenLake or Taxi.

        ``P[state][action]`` is a list of ``(probability, next, reward, terminated)``. The
        observation is the state.

        Args:
          mask: part of the observation that says which actions are legal, as in ``EnvSpec``; None:
            all actions are.

        Raises:
          ConfigError: it has no ``P``, a wrapper changes it, or its first states are not known.
        """
        transitions, start = _transitions_of(env)
        states = len(transitions)
        actions = len(transitions[0])
        most = max(
            len(outcomes) for by_action in transitions.values() for outcomes in by_action.values()
        )
        outcomes_of = np.zeros((4, states, actions, most))
        for state, by_action in transitions.items():
            for action, outcomes in by_action.items():
                outcomes_of[:, state, action, : len(outcomes)] = np.array(outcomes, np.float64).T
        probability, following, reward, ended = outcomes_of
        obs: PyTree = np.arange(states, dtype=np.int32)
        legal = None
        if mask is not None:
            action_mask = env.unwrapped.action_mask
            legal = np.stack([np.asarray(action_mask(state), bool) for state in range(states)])
            obs = {"observation": obs, mask: legal}
        return cls.of_arrays(
            probability,
            reward,
            next=following.astype(np.int64),
            going=1 - ended,
            start=start,
            legal=legal,
            obs=obs,
        ).reachable()

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        states: int,
        actions: int,
        end: float = 0.0,
        spread: float = 0.5,
    ) -> Table:
        """Draws a table, whose first states are equally likely and whose observations are one-hot.

        Args:
          end: mean probability that a step ends the episode; the probability of each step lies
            within 30 % of it.
          spread: parameter of the Dirichlet distribution; if it is small, an action leads to few
            states.
        """
        moves = rng.dirichlet(np.full(states, spread), size=(states, actions))
        reward = rng.uniform(size=(states, actions))
        ends = end * rng.uniform(0.7, 1.3, (states, actions))
        return cls.of_arrays(
            moves, reward, going=(1 - ends)[:, :, None], obs=np.eye(states, dtype=np.float32)
        )

    def reachable(self) -> Table:
        """Returns the table of the states that an episode can reach, in the same order."""
        reached = self.start > 0
        frontier = np.flatnonzero(reached)
        edges = (self.probability > 0) & (self.going != 0)
        while len(frontier):
            after = np.unique(self.next[frontier][edges[frontier]])
            frontier = after[~reached[after]]
            reached[frontier] = True
        number = np.cumsum(reached) - 1
        arrays = self._replace(sampled=None, parts=())  # type: ignore[arg-type]
        table: Table = jax.tree.map(lambda x: x[reached], arrays)
        following = np.where(edges[reached], number[table.next], 0)
        return table._replace(next=following, sampled=self.sampled)

    def mixed(self) -> int:
        """Returns the number of states that a policy without memory takes for another one."""
        if self.obs is None:
            return 0
        rows = as_bytes(jax.tree.leaves(self.obs))
        _, counts = np.unique(rows, return_counts=True)
        return int(counts[counts > 1].sum())


def _broadcast_going(going: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    going = np.asarray(going, np.float64)
    try:
        return np.broadcast_to(going, shape)
    except ValueError:
        raise ConfigError(f"going has shape {going.shape}; {shape} works") from None


def _transitions_of(env: Any) -> tuple[Mapping[int, Mapping[int, list[Any]]], np.ndarray]:
    """Returns ``P`` of a Gymnasium environment, and the probabilities of its first states."""
    wrapped = env
    while wrapped is not env.unwrapped:
        wrapper = type(wrapped)
        if wrapper.__name__ not in _HARMLESS or not wrapper.__module__.startswith("gymnasium."):
            raise ConfigError(
                f"{wrapper.__name__} changes {type(env.unwrapped).__name__}, but not its table P"
            )
        wrapped = wrapped.env
    env = env.unwrapped
    if getattr(env, "fickle_passenger", False):
        raise ConfigError(f"the table P of {type(env).__name__} does not know of fickle_passenger")
    transitions = getattr(env, "P", None)
    start = getattr(env, "initial_state_distrib", None)
    if isinstance(transitions, Mapping) and start is not None:
        return transitions, np.asarray(start, np.float64)
    missing = "initial_state_distrib" if isinstance(transitions, Mapping) else "P"
    raise ConfigError(f"{type(env).__name__} has no table: the attribute {missing} is missing")


def as_bytes(leaves: list[np.ndarray]) -> np.ndarray:
    """Returns the bytes of each row of arrays ``[N, ...]``, ``[N]``, for comparing rows."""

    def flat(x: np.ndarray) -> np.ndarray:
        if np.issubdtype(x.dtype, np.floating):
            x = x + 0.0  # -0.0 becomes 0.0
        return np.ascontiguousarray(x.reshape(len(x), math.prod(x.shape[1:]))).view(np.uint8)

    joined = np.ascontiguousarray(np.concatenate([flat(np.asarray(x)) for x in leaves], axis=1))
    # All have one length, so trailing zeros do not matter.
    return joined.view(f"S{joined.shape[1]}")[:, 0]
