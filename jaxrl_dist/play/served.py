"""A trained policy that answers single observations, several of them in one compiled program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.actors.step import read_later
from jaxrl_dist.envs.wire.spaces import space_to_json
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.play import observations
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.protocols import Traits
from jaxrl_dist.settings.policies import label
from jaxrl_dist.types import Array, PyTree, Variables

EXTRAS = ("log_prob", "value")
"""What an algorithm may say of an action besides the action, a number each."""


class Row(NamedTuple):
    """An observation that waits for an action."""

    obs: PyTree
    """As ``encoding.read`` returns it."""
    core: PyTree = None
    """The policy's state from the last action; None: an episode begins."""
    reward: float = 0.0
    """What the last action was rewarded with; 0 where an episode begins."""
    draw: tuple[int, int] = (0, 0)
    """Two uint32 by which actions are sampled: of the episode, and of the step in it."""


class Chosen(NamedTuple):
    """An action for an observation."""

    action: PyTree
    """As the environment has it: numpy arrays, in dicts and tuples."""
    core: PyTree
    """The policy's state for the next ``Row`` of the episode."""
    extras: dict[str, np.ndarray]
    """Numbers by their name in ``EXTRAS``."""


class ServedPolicy:
    """Chooses actions for up to ``max_batch`` rows together.

    A row's action does not depend on the rows beside it, except for the rounding of floats.
    """

    def __init__(
        self, policy: Policy, max_batch: int, *, sampled: bool = False, seed: int = 0
    ) -> None:
        """Compiles a program for each power of two up to ``max_batch``, so that no row has to wait
        for it.

        Args:
          max_batch: a power of two.
          sampled: sample actions by ``seed`` instead of taking the best ones.

        Raises:
          ConfigError: the policy cannot act on observations alone.
        """
        if problem := policy.unable():
            raise ConfigError(f"{problem}; serve the policy of another algorithm")
        self._policy = policy
        self._sampled = sampled
        self._seed = seed
        traits = Traits.of(policy.config.algorithm)
        self._hidden = traits.hidden
        self.reads_reward = "reward" in traits.core_inputs
        self.max_batch = max_batch
        self._first = jax.tree.map(lambda x: np.asarray(x[0]), policy.initial_core(1))
        self.has_core = self._reads_core()
        """Whether an action depends on the earlier steps of its episode."""
        self._programs = self._compiled()
        self.extras = tuple(self([self._blank()])[0].extras)

    @property
    def observation(self) -> spaces.Space:
        """The space of the observations, without the parts that only the critic sees."""
        space: spaces.Space = self._policy.observation
        return space

    @property
    def tuples(self) -> tuple[str, ...]:
        """As ``EnvSpec.tuples``."""
        return self._policy.source.spec.tuples

    def describe(self) -> dict[str, Any]:
        """Returns in JSON what a client needs to know."""
        spec = self._policy.source.spec
        return {
            "algorithm": label(self._policy.config.algorithm),
            "observation": space_to_json(self.observation),
            "action": space_to_json(spec.action),
            "mask": spec.mask,
            "tuples": list(self.tuples),
            "remembers": self.has_core,
            "reads_reward": self.reads_reward,
            "extras": list(self.extras),
        }

    @in_32_bits
    def __call__(self, rows: Sequence[Row]) -> list[Chosen]:
        """Chooses an action for each of 1 to ``max_batch`` rows."""
        size = 1 << (len(rows) - 1).bit_length()
        padded = [*rows, *[rows[0]] * (size - len(rows))]
        program = self._programs[size]
        outputs = jax.device_get(program(self._policy.variables, *self._batch(padded)))
        return [Chosen(*_row(outputs, number)) for number in range(len(rows))]

    def _batch(self, rows: Sequence[Row]) -> tuple[PyTree, PyTree, np.ndarray, np.ndarray]:
        """Returns the inputs of a program ``[B, ...]``."""
        return (
            jax.tree.map(lambda *parts: np.stack(parts), *[row.obs for row in rows]),
            jax.tree.map(lambda *parts: np.stack(parts), *map(self._core, rows)),
            np.asarray([row.reward for row in rows], np.float32),
            np.asarray([row.draw for row in rows], np.uint32),
        )

    def _core(self, row: Row) -> PyTree:
        if row.core is None:
            return self._first
        return row.core

    @in_32_bits
    def _compiled(self) -> dict[int, Any]:
        sizes = [1 << power for power in range(self.max_batch.bit_length())]
        batches = {size: self._batch([self._blank()] * size) for size in sizes}
        act = jax.jit(self._act)
        return {
            size: act.lower(self._policy.variables, *batch).compile()
            for size, batch in batches.items()
        }

    @in_32_bits
    def _reads_core(self) -> bool:
        obs, core, reward, draw = self._batch([self._blank()])

        def step(core: PyTree) -> tuple[PyTree, PyTree]:
            action, after, _ = self._act(self._policy.variables, obs, core, reward, draw)
            return action, after

        return bool(read_later(step, core))

    def _blank(self) -> Row:
        def least(part: spaces.Part) -> np.ndarray:
            zeros = np.zeros((1, *part.shape), part.dtype)
            row: np.ndarray = spaces.native(part, zeros)[0]
            return row

        return Row(jax.tree.map(least, self.observation))

    def _act(
        self, variables: Variables, obs: PyTree, core: PyTree, reward: Array, draw: Array
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        spec = self._policy.source.spec
        obs = spaces.tupled(obs, self.tuples, "observation")
        obs, _ = observations.checked(obs, spec, self._hidden)
        if self.reads_reward:
            core = self._policy.rewarded(obs, core, reward)
        keys = None
        if self._sampled:
            keys = jax.vmap(_key, (None, 0))(jax.random.key(self._seed), draw)
        action, core, extras = self._policy.choose(variables, obs, core, keys)
        told = {}
        if isinstance(extras, dict):
            told = {name: extras[name] for name in EXTRAS if name in extras}
        return action, core, told


def _key(key: jax.Array, draw: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, draw[0]), draw[1])


def draw_of(episode: str) -> int:
    """Returns the number, uint32, by which an episode samples."""
    return int.from_bytes(hashlib.sha256(episode.encode("utf-8", "replace")).digest()[:4], "little")


def _row(outputs: PyTree, number: int) -> PyTree:
    """Returns a row that does not keep the others in memory."""
    return jax.tree.map(lambda x: np.array(x[number]), outputs)
