"""The vocabulary of the package, on one page.

Axes: ``T`` steps of a rollout, ``B`` environments, ``N`` independent examples that a loss sees.
Terms: one *env step* is one transition, one *update* is one gradient step, one *iteration* is one
rollout and the updates made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # algorithm files name these types before anything needs JAX: ``--help`` reads them
    import jax
    import optax

    from jaxrl_dist.spaces import Space

PyTree = Any
"""A nest of arrays; each use says what it holds."""
Array = Any
"""A ``jax.Array``, or on the host a numpy array of the same shape and dtype."""
Acted = tuple[PyTree, PyTree, PyTree]
"""What a policy returns: action, core and extras, which are kept with the action."""


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What an algorithm may know of an environment."""

    id: str
    """The environment's id without the backend's prefix, such as ``CartPole-v1``, ``my_module:make`` or, of an object
    handed over from Python, ``object:MyEnv``."""
    backend: str
    """``gymnax``, ``envpool`` or ``gymnasium``."""
    family: str
    """The package its backend keeps it in: ``classic_control``, ``bsuite``, ``minatar``, ``atari``, ``mujoco`` ...;
    presets depend on it."""
    observation: Space
    action: Space
    max_episode_steps: int | None
    """The time limit in steps, at which episodes are truncated; None where the backend names none."""
    frame_stack: int = 1
    """An observation is so many frames, joined along the channels of an image or else the first axis, the newest last;
    host environments hand over single frames (``frames.Frame``) if there are several."""
    masked: bool = False
    """Whether it says which actions are legal, as far as is known before it is played; no policy heeds it yet."""


# --- Experience ---------------------------------------------------------------------------------------


class Timestep(NamedTuple):
    """What one step of ``B`` environments gives back.

    Environments reset on the *next* step: after ``terminated`` or ``truncated``, the following step ignores its
    action, has reward 0 and ``valid`` False, and its observation is the first one of the new episode.
    """

    obs: PyTree  # [B, ...]   the observation after the step
    reward: Array  # [B] float32
    terminated: Array  # [B] bool    the task ended
    truncated: Array  # [B] bool    the clock ran out
    valid: Array  # [B] bool    False on the step that an environment spends on its reset


class Rollout(NamedTuple):
    """``T`` steps of ``B`` environments; the successor of step ``t`` is always ``obs[t + 1]``."""

    obs: PyTree  # [T + 1, B, ...]
    action: PyTree  # [T, B, ...]  in the environment's units
    reward: jax.Array  # [T, B] float32
    terminated: jax.Array  # [T, B] bool  the task ended: bootstrap with 0
    truncated: jax.Array  # [T, B] bool  the clock ran out: bootstrap from obs[t + 1]
    valid: jax.Array  # [T, B] bool  False on the step that an environment spends on its reset
    extras: PyTree  # [T, B, ...]  what the policy returned beside the action (log_prob, value ...)
    core: PyTree  # [B, ...]     policy state before step 0; () if none
    final_core: PyTree  # [B, ...]     policy state after step T - 1, for the bootstrap

    @property
    def outcomes(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """``reward, terminated, truncated, valid``: what ``returns`` starts from."""
        return self.reward, self.terminated, self.truncated, self.valid

    def env_major(self) -> Rollout:
        """The same as ``[B, T, ...]``, one example an environment; ``core`` and ``final_core`` stay ``[B, ...]``."""
        swapped: Rollout = swap_axes(self._replace(core=(), final_core=()))
        return swapped._replace(core=self.core, final_core=self.final_core)

    def time_major(self) -> Rollout:
        """The inverse of ``env_major``."""
        return self.env_major()


def swap_axes(tree: PyTree) -> PyTree:
    """Arrays ``[T, B, ...]`` as ``[B, T, ...]``, or back."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended in some stretch of experience; float32, all of one shape."""

    episodes: Array
    return_sum: Array  # of raw returns: before clipping and scaling
    length_sum: Array  # in env steps
    return_min: Array  # +inf if no episode ended
    return_max: Array  # -inf if no episode ended

    @staticmethod
    def stack(parts: Sequence[EpisodeStats]) -> EpisodeStats:
        """Host statistics of one shape along a new leading axis, as numpy arrays."""
        import numpy as np

        return EpisodeStats._make(np.stack(field) for field in zip(*parts, strict=True))

    def merge(self, axis: int | None = None) -> EpisodeStats:
        """The statistics of all entries along an axis together; None: of all there are, as scalars."""
        return EpisodeStats(
            episodes=self.episodes.sum(axis),
            return_sum=self.return_sum.sum(axis),
            length_sum=self.length_sum.sum(axis),
            return_min=self.return_min.min(axis),
            return_max=self.return_max.max(axis),
        )


# --- Algorithms ---------------------------------------------------------------------------------------


class Variables(NamedTuple):
    """What acts: trained parameters and running statistics."""

    params: PyTree
    stats: PyTree  # () if none


class Context(NamedTuple):
    """What a policy, a postprocessor or a loss may use beside the variables and its data; each takes what it needs."""

    keys: Array = None
    """Random keys, one for each environment ``[B]`` or example ``[N]``; None asks a policy for its greedy actions."""
    env_step: Array = 0.0
    """The nominal number of env steps so far, a float32 scalar, for schedules."""
    target: PyTree = ()
    """What ``Algorithm.target`` has made of the parameters; () for a policy."""
    others: PyTree = ()
    """Experience of other policies in the same environments; () where there is one policy."""


class Aux(NamedTuple):
    """What a loss gives back beside the losses; every array is per example, shaped as the losses."""

    metrics: Mapping[str, jax.Array]
    priority: jax.Array | None = None  # [N] float32, for prioritised replay


def _keep_target(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
    del params, updates
    return target


def _keep_stats(stats: PyTree, rollout: Rollout) -> PyTree:
    del rollout
    return stats


def _keep_core(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
    del action, step
    return core


def no_core(num_envs: int) -> PyTree:
    """The policy state of a policy that has none."""
    del num_envs
    return ()


def reset_core(core: PyTree, initial: PyTree, valid: Array) -> PyTree:
    """``core [B, ...]`` where ``valid [B]`` is True, elsewhere ``initial [B, ...]``.

    An environment resets on the step after its episode's end. That step has ``valid`` False, and its policy still reads
    the old episode's last observation, so the core that it returns must not reach the new episode.
    """
    import jax
    import jax.numpy as jnp

    return jax.tree.map(
        lambda x, start: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, start), core, initial
    )


@dataclasses.dataclass(frozen=True)
class Replay:
    """How an algorithm that learns from replayed experience uses its memory; sizes are over all devices."""

    capacity: int
    """Env steps kept."""
    batch_size: int
    """Windows in an update."""
    ratio: float
    """Updates per env step."""
    learning_starts: int
    """Env steps before the first update."""
    priority_exponent: float | None = None
    """alpha of prioritised replay (Schaul et al. 2016, equation 1); None: uniform."""
    importance_exponent: float | jax.Array = 0.0
    """beta of the importance weights (section 3.4), at most 1, which corrects fully."""


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An RL algorithm: a policy, a trajectory postprocessor and a loss, all pure functions (RLlib, ICML 2018).

    Nothing here knows a plan, a device count or an environment backend. Fields with a default may be left out.
    """

    init: Callable[[jax.Array], Variables]
    """``(key) -> variables``."""

    policy: Callable[..., Acted]
    """``(variables, obs [B, ...], core [B, ...], context) -> (action [B, ...], core, extras)``."""

    postprocess: Callable[..., PyTree]
    """``(variables, rollout, context) -> batch``, whose leading axis holds ``N`` independent examples
    in environment-major order: all examples of environment 0, then all of environment 1, and so on."""

    loss: Callable[..., tuple[jax.Array, jax.Array, Aux]]
    """``(variables, batch, context) -> (losses, mask, aux)``, all per example (leading axis ``N``).
    The learner forms ``sum(losses * mask) / sum(mask)`` over all devices and differentiates it by
    ``variables.params``."""

    optimizer: optax.GradientTransformation

    window: int | None = None
    """Steps of an environment that one example spans: 1 for transitions; None: the whole rollout."""
    replay: Replay | None = None
    """How to use replayed experience; None: each rollout is used once, and then thrown away."""
    num_epochs: int = 1
    """How often the learner passes over the batch of one rollout."""
    num_minibatches: int = 1
    """Into how many updates it divides each pass."""
    corrects_lag: bool = False
    """Whether the loss allows for experience of a policy that is some versions behind; what is replayed always is."""

    target: Callable[[PyTree, PyTree, jax.Array], PyTree] = _keep_target
    """``(params, target, updates) -> target`` after each update: periodic copy, Polyak average; default: keep."""
    initial_target: Callable[[PyTree], PyTree] = lambda params: ()
    """``(params) -> target``; default: there is none."""

    observe: Callable[[PyTree, Rollout], PyTree] = _keep_stats
    """``(stats, rollout) -> stats`` after each rollout; sums over devices by ``mesh.global_sum``; default: keep."""

    initial_core: Callable[[int], PyTree] = no_core
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode (recurrent state, per-env constants)."""
    feedback: Callable[[PyTree, PyTree, Timestep], PyTree] = _keep_core
    """``(core, action, step) -> core``: what the policy state remembers of a step's outcome; default: nothing."""


class TrainState(NamedTuple):
    """All that learning changes; replicated over the mesh, but for the memory."""

    variables: Variables
    target: PyTree
    opt_state: PyTree
    updates: jax.Array  # int32 scalar, gradient steps so far
    iteration: jax.Array  # int32 scalar, rollouts consumed so far; keys derive from it
    env_step: jax.Array  # float32 scalar, nominal env steps so far, for schedules
    skipped: jax.Array  # int32 scalar, the latest gradients, one after another, that were not finite
    memory: PyTree = ()  # [B, ...], divided over the mesh: replayed experience; () if none

    def context(self, keys: jax.Array) -> Context:
        """What postprocessing and loss are given beside the variables."""
        return Context(keys, self.env_step, self.target)


class Learner(NamedTuple):
    """Pure functions that train; they run under ``jax.shard_map``, which ``learners.sharded`` arranges."""

    init: Callable[[jax.Array], TrainState]
    """``(key) -> state``."""
    update: Callable[..., tuple[TrainState, Mapping[str, jax.Array]]]
    """``(state, rollout, key) -> (state, metrics)``; where experience is replayed by priority, a fourth argument
    ``[T, B]`` may say those of the windows that end with each step."""
    relearn: Callable[[TrainState, jax.Array], tuple[TrainState, Mapping[str, jax.Array]]] | None = None
    """``(state, key) -> (state, metrics)``: the updates of one more iteration from what the memory holds already; None
    without a memory."""
    cut: Callable[[PyTree], PyTree] = lambda memory: memory
    """``(memory) -> memory`` before environments start anew: no window runs from the old episodes into the new."""
    midway: Callable[[PyTree], PyTree] = lambda memory: memory
    """``(memory) -> memory`` of an empty memory whose environments are in the middle of their episodes."""


# --- Reports ------------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """All that a run needs to go on as if it had never stopped: numpy arrays, and what JSON can hold."""

    state: TrainState
    actor: PyTree  # of environments inside a program; () where they live on the host, and start anew
    progress: Mapping[str, Any]  # counts, times, and what has happened since the last report; see ``plans.report``

    @property
    def env_steps(self) -> int:
        """Valid transitions so far."""
        return self.progress["env_steps"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``train`` yields once per report interval; numbers live on the host."""

    env_steps: int
    """Valid transitions so far, counted exactly."""
    updates: int
    iteration: int
    wall_time_s: float
    """Seconds since training began, compilation included and evaluations not."""
    metrics: Mapping[str, float | None]
    """Means since the last report; None where there is no value, never NaN for that."""
    variables: Callable[[], Variables]
    """Copies what acts now, as numpy arrays; must be called before the next report is taken."""
    checkpoint: Callable[[], Checkpoint]
    """Copies all that a resumed run would start from; must be called before the next report is taken."""
    evaluation: Mapping[str, float | int] | None = None
    """Of the last report, and of those at the evaluation interval: number of greedy episodes played, mean and standard
    deviation of their returns, mean length, and how many were cut before they had ended."""
    diverged: bool = False
    """Whether so many gradients in a row were not finite that no later one changes the parameters; ``train`` ends."""
