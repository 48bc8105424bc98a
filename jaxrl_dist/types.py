"""The vocabulary of the package, on one page.

Axes: ``T`` steps of a rollout, ``B`` environments, ``N`` independent examples that a loss sees.
Terms: an *env step* is a step of an environment, however many agents act in it; an *agent step* is
one agent's transition, a valid row; a reset is neither. An *update* is a gradient step, an
*iteration* a rollout and its updates.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxrl_dist.heavy import jax, np, optax
from jaxrl_dist.simulator import Simulator as Simulator

if TYPE_CHECKING:  # ``--help`` reads algorithm files, which name these types, without numpy
    from jaxrl_dist.spaces import Interface, Space

PyTree = Any
"""A nest of arrays; each use says what it holds."""
Array = Any
"""A ``jax.Array``, or on the host a numpy array of the same shape and dtype."""
Algorithms = Any
"""The ``Algorithm`` of each policy in an environment, a dict keyed by policy;
a single policy has the name ``""``."""
Acted = tuple[PyTree, PyTree, PyTree]
"""Output of a policy: action, core, and extras, which are stored with the action."""
Goals = Callable[[PyTree, PyTree], tuple[Any, Any]]
"""``(achieved, desired) -> (reward, terminated)``: what a step pays that achieved one goal, each
``[...]``, where the other was desired, and whether it ends the episode; scalars, of pure JAX
code."""


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The properties of an environment that an algorithm may use."""

    id: str
    """Its id without the backend's prefix: ``CartPole-v1``, ``my_module:make``,
    or ``object:MyEnv`` from Python."""
    backend: str
    """``gymnax``, ``envpool``, ``gymnasium``, ``remote``, or one of ``config.envs.LIBRARIES``."""
    family: str
    """Its group in its backend, such as ``classic_control``, ``minatar`` or ``mujoco``;
    presets depend on it."""
    observation: Space
    action: Space
    max_episode_steps: int | None
    """Steps after which episodes are truncated; None: the backend names no time limit."""
    frame_stack: int = 1
    """Frames in an observation, concatenated along the channels of an image or else the first axis,
    newest last; if there are several, host environments return single frames (``frames.Frame``)."""
    mask: str | None = None
    """Part of the observation that says which actions are legal,
    as ``observations.legal`` reads it; None: all are."""
    num_agents: int = 1
    """Agents of an environment; each is a row of the batch, next to the others of its
    environment."""
    unread_mask: str = ""
    """Why policies cannot use the action masks that the environment seems to have;
    empty: they can, or there are none."""
    inside: str = ""
    """What wrappers inside the environment do that harms policies or returns; empty: nothing."""
    info_metrics: tuple[str, ...] = ()
    """Numbers of its info in episode statistics, as ``envs.episodes.parse`` returns them."""
    fps: float | None = None
    """Steps that a film shows in a second; None: the environment does not say."""
    both_sides: bool = False
    """The agent moves for both sides of a game: rewards and observations are the mover's."""
    tuples: tuple[str, ...] = ()
    """Paths of the dicts that the environment has as a ``Tuple``,
    each below ``observation`` or ``action``."""
    logs_actions: bool = False
    """Whether ``Timestep.action`` says which actions were taken, in place of the policy's."""
    goals: Goals | None = dataclasses.field(default=None, compare=False)
    """What its goals pay, for hindsight; None: not known."""
    policies: Mapping[str, EnvSpec] = dataclasses.field(default_factory=dict, hash=False)
    """The spec of each of several policies, and the spaces above are dicts keyed by policy;
    empty: one policy."""

    @property
    def interface(self) -> Interface:
        """The part of it that belongs to its spaces."""
        from jaxrl_dist.spaces import Interface

        return Interface(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Interface)}
        )

    @property
    def by_policy(self) -> Mapping[str, EnvSpec]:
        """The spec of each policy; a single one has the name ``""``."""
        return self.policies or {"": self}

    def keyed(self, tree: PyTree) -> Any:
        """Returns what the environment takes or returns as a dict keyed by policy."""
        return tree if self.policies else {"": tree}

    def bare(self, tree: PyTree) -> Any:
        """The inverse of ``keyed``: what environments, reports and files have."""
        return tree if self.policies else tree[""]


# --- Experience -----------------------------------------------------------------------------------


class Timestep(NamedTuple):
    """The result of one step of ``B`` environments.

    Environments reset on the *next* step: after ``terminated`` or ``truncated``, the following step
    ignores its action, has reward 0 and ``valid`` False, and its observation is the first one of
    the new episode.
    """

    obs: PyTree
    """``[B, ...]``: the observation after the step."""
    reward: Array
    """``[B]`` float32."""
    terminated: Array
    """``[B]`` bool: the task ended."""
    truncated: Array
    """``[B]`` bool: the time limit cut the episode."""
    valid: Array
    """``[B]`` bool: False on the step in which an environment resets."""
    action: PyTree = ()
    """``[B, ...]``: the actions that were taken; (): the policy's own."""


class Rollout(NamedTuple):
    """``T`` steps of ``B`` environments; the successor of step ``t`` is always ``obs[t + 1]``."""

    obs: PyTree
    """``[T + 1, B, ...]``: the observations before each step, and the one after the last."""
    action: PyTree
    """``[T, B, ...]``: actions in the environment's units, in the dtype of its action space."""
    reward: jax.Array
    """``[T, B]`` float32: the reward of the step, clipped or scaled if a flag says so."""
    terminated: jax.Array
    """``[T, B]`` bool: the task ended, so bootstrap with 0."""
    truncated: jax.Array
    """``[T, B]`` bool: the time limit cut the episode, so bootstrap from ``obs[t + 1]``."""
    valid: jax.Array
    """``[T, B]`` bool: False on the step in which an environment resets."""
    extras: PyTree
    """``[T, B, ...]``: the policy's other outputs, such as float32 ``log_prob`` and ``value``."""
    core: PyTree
    """``[B, ...]``: the policy's state before step 0; () if it has none."""
    final_core: PyTree
    """``[B, ...]``: the policy's state after step ``T - 1``, for the bootstrap."""

    @property
    def obs_before(self) -> PyTree:
        """The observations ``[T, B, ...]`` that the actions respond to."""
        return jax.tree.map(lambda x: x[:-1], self.obs)

    @property
    def last_obs(self) -> PyTree:
        """The observations ``[B, ...]`` after the last step."""
        return jax.tree.map(lambda x: x[-1], self.obs)

    @property
    def outcomes(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """``reward, terminated, truncated, valid``: the inputs of ``returns``."""
        return self.reward, self.terminated, self.truncated, self.valid

    def with_inner_core(self) -> Rollout:
        """Returns it with the inner policy's state where the core is ``(own, inner)``;
        replayed windows carry none.
        """
        if self.core:
            return self._replace(core=self.core[1], final_core=self.final_core[1])
        return self

    def env_major(self) -> Rollout:
        """Returns it as ``[B, T, ...]``, an example per environment, and back;
        ``core`` and ``final_core`` stay.
        """
        swapped: Rollout = swap_axes(self._replace(core=(), final_core=()))
        return swapped._replace(core=self.core, final_core=self.final_core)


def swap_axes(tree: PyTree) -> PyTree:
    """Swaps the first two axes of all arrays: ``[T, B, ...]`` to ``[B, T, ...]``, or back."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended in some experience; float32, all of one shape."""

    episodes: Array
    return_sum: Array
    """Of raw returns: before clipping and scaling."""
    length_sum: Array
    """In env steps, of several agents those in which the episode's agent takes part."""
    return_min: Array
    """+inf if no episode ended."""
    return_max: Array
    """-inf if no episode ended."""
    info: Mapping[str, tuple[Array, Array]] = {}
    """Sum of each metric of the info, and the episodes that reported it."""

    @staticmethod
    def stack(parts: Sequence[EpisodeStats]) -> EpisodeStats:
        """Stacks host statistics of one shape along a new leading axis, as numpy arrays."""
        return jax.tree.map(lambda *fields: np.stack(fields), *parts)

    def merge(self, axis: int | None = None) -> EpisodeStats:
        """Combines the statistics of all entries along an axis; None: of all, to scalars."""
        sums = [field.sum(axis) for field in (self.episodes, self.return_sum, self.length_sum)]
        info = {
            name: (total.sum(axis), count.sum(axis)) for name, (total, count) in self.info.items()
        }
        return EpisodeStats._make(
            [*sums, self.return_min.min(axis), self.return_max.max(axis), info]
        )


# --- Algorithms -----------------------------------------------------------------------------------


class Variables(NamedTuple):
    """Trained parameters and running statistics, with which a policy acts."""

    params: PyTree
    stats: PyTree
    """() if none."""


class Context(NamedTuple):
    """Further inputs of a policy, a postprocessor or a loss, besides variables and data."""

    keys: Array = None
    """``[B]`` or ``[N]`` random keys, one for each environment or example, or a single one for
    ``behaviour``; None: act greedily."""
    env_step: Array = 0.0
    """Float32 scalar, for schedules: the env steps so far as rollouts times environments times
    rollout length, resets included."""
    target: PyTree = ()
    """Output of ``Algorithm.target``, such as target parameters; () for a policy."""
    simulator: Simulator | None = None
    """The environments ``[B]`` as a model to plan with, for a policy; None: there is none,
    as on the host."""


class Aux(NamedTuple):
    """Further outputs of a loss; every array is per example, shaped as the losses."""

    metrics: Mapping[str, jax.Array]
    priority: jax.Array | None = None
    """[N] float32, at least 0, for prioritised replay."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """The replay settings of an algorithm; sizes are totals over all devices."""

    capacity: int
    """Agent steps that the memory holds: its rows."""
    batch_size: int
    """Windows per update."""
    ratio: float
    """Updates per agent step, a row of each rollout."""
    learning_starts: int
    """Env steps before the first update."""
    priority_exponent: float | None = None
    """Alpha of prioritised replay (Schaul et al. 2016, eq. 1); None: uniform."""
    importance_exponent: float | jax.Array = 0.0
    """Beta of its importance weights (section 3.4), 0 .. 1."""
    return_discount: float | None = None
    """Discount, 0 .. 1, of the returns that recorded steps hold as ``extras["return"]``; None:
    they hold no returns."""


class Policy(Protocol):
    """Acts: ``obs [B, ...]`` to ``(action [B, ...], core [B, ...], extras)``;
    without ``context.keys``, greedily.
    """

    def __call__(
        self, variables: Variables, obs: PyTree, core: PyTree, context: Context
    ) -> Acted: ...


class Postprocess(Protocol):
    """Makes a batch, whose leading axis holds ``N`` independent examples.

    They are in environment-major order: all examples of environment 0,
    then all of environment 1, and so on.
    """

    def __call__(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree: ...


class Loss(Protocol):
    """Returns losses, a mask and ``Aux``, all per example (leading axis ``N``).

    The learner forms ``sum(losses * mask) / sum(mask)`` over all devices and differentiates it with
    respect to ``variables.params``. The mask is bool, or holds weights, which count as constants.
    """

    def __call__(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]: ...


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An RL algorithm: a policy, a trajectory postprocessor and a loss,
    all pure functions (RLlib, ICML 2018).

    An algorithm knows no plan, device count or environment backend.
    Fields with a default may be left out.
    """

    init: Callable[[jax.Array], Variables]
    """``(key) -> variables``."""
    policy: Policy
    postprocess: Postprocess
    loss: Loss
    optimizer: optax.GradientTransformation
    """Turns gradients into updates of the parameters. If its ``update`` takes keyword arguments,
    it also gets ``env_step``, as in ``Context``, and ``updates_done``, the number of updates before
    this one."""
    window: int | None = None
    """Steps of an environment in one example: 1 for transitions; None: the whole rollout."""
    replay: Replay | None = None
    """How to replay experience; None: each rollout is used once, and then discarded."""
    num_epochs: int = 1
    """Passes of the learner over the batch of one rollout."""
    num_minibatches: int = 1
    """Updates into which the learner divides each pass."""
    done: Callable[[Mapping[str, jax.Array]], jax.Array] | None = None
    """``(means of an update's metrics) -> bool``, called before the update is applied: True skips
    this update and the rollout's later ones, as PPO's target KL does; None: no update is
    skipped."""
    corrects_lag: bool = False
    """Whether the loss allows for experience of older policies, as replayed one always is."""
    target: Callable[[PyTree, PyTree, jax.Array], PyTree] = lambda params, target, updates: target
    """``(params, target, updates) -> target`` after each update: a periodic copy or a Polyak
    average; default: the target stays."""
    initial_target: Callable[[PyTree], PyTree] = lambda params: ()
    """``(params) -> target``; default: no target."""
    update_stats: Callable[[Variables, Rollout, Context], PyTree] | None = None
    """``(variables, rollout, context) -> stats`` after each rollout;
    sums are ``mesh.global_sum``. None: keeps none."""
    initial_core: Callable[[int], PyTree] = lambda num_envs: ()
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode: recurrent state, constants
    of each environment."""
    feedback: Callable[[PyTree, PyTree, Timestep], PyTree] = lambda core, action, step: core
    """``(core, action, step) -> core``: stores a step's outcome in the policy state;
    default: stores nothing."""
    behaviour: Callable[[Variables, PyTree, Context], tuple[PyTree, PyTree]] | None = None
    """``(variables, core [B, ...], context) -> (params [B, ...], core)``, called before each
    rollout. It returns the parameters with which each of B environments acts in this rollout, such
    as perturbed ones, and the core that the rollout starts with. Called again with that core, it
    must return the same parameters: nobody stores them. None: all environments act with
    ``variables.params``."""
    episodic: bool = False
    """Whether each rollout begins with a new episode in every environment."""
    paired: bool = False
    """Whether environments ``2 i`` and ``2 i + 1`` belong together: their number must be even."""
    trains: bool = True
    """Whether it learns; of one that does not, only the functions that act are called."""
    searches: bool = False
    """Whether its policy needs ``context.simulator`` to train."""
    imitates: bool = False
    """Whether it learns from actions alone, whatever they were rewarded with."""
    action_values: Callable[[Variables, PyTree], tuple[jax.Array, Array]] | None = None
    """``(variables, obs [B, ...]) -> (values [B, A], temperature)`` of discrete actions, by raw
    rewards, and with the entropy at this temperature or at 0. None: it has no action values."""
    add_extras: Callable[[Rollout], Rollout] | None = None
    """``(windows [window, N, ...]) -> windows`` of a data set, with the extras that acting would
    store; None: there are none."""
    whole_windows: bool = False
    """Whether the loss of a window covers more of its steps than the first: windows of a data set
    then also begin before the data and on steps without a successor, so that each recorded step
    counts equally often."""
    log_prob: Callable[[Variables, PyTree, PyTree, PyTree, Context], jax.Array] | None = None
    """``(variables, obs [B, ...], core, action [B, ...], context) -> [B]`` float32: the
    log-probability with which the policy, acting with keys, draws these actions from this core at
    ``context.env_step``. Of continuous ones it is a density in the environment's units, before
    bounds clip it; correlated noise counts as independent. None: unknown."""

    def updated_stats(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        """Returns the running statistics after a rollout."""
        if self.update_stats is None:
            return variables.stats
        return self.update_stats(variables, rollout, context)


class TrainState(NamedTuple):
    """The state that learning changes; replicated over the mesh, except for the memory."""

    variables: Variables
    target: PyTree
    opt_state: PyTree
    updates: jax.Array
    """Int32 scalar, gradient steps so far."""
    iteration: jax.Array
    """Int32 scalar, rollouts consumed so far; keys derive from it."""
    env_step: jax.Array
    """Float32 scalar, nominal env steps so far, for schedules."""
    skipped: jax.Array
    """Int32 scalar, consecutive updates until now whose loss or gradient was not finite."""
    memory: PyTree = ()
    """[B, ...], sharded over the mesh: replayed experience; () if none."""

    def context(self, keys: jax.Array | None = None) -> Context:
        """Returns the context of postprocessing, loss and running statistics."""
        return Context(keys, self.env_step, self.target)


class Checkpoint(NamedTuple):
    """All that a run needs to continue as if it had never stopped: numpy arrays and JSON values."""

    state: TrainState
    actor: PyTree
    """State of compiled environments; () for host environments, which are restarted."""
    progress: Mapping[str, Any]
    """Counts, times, and sums since the last report; see ``plans.report``."""

    @property
    def env_steps(self) -> int:
        """Env steps so far."""
        return self.progress["env_steps"]


class Join(enum.Enum):
    """How a metric of several members becomes one of their population.

    A module whose metrics do not join to means lists them in ``JOINS``, by name without the
    policy's. A name that ends in ``/`` stands for all names that begin with it.
    """

    MEAN = enum.auto()
    SUM = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    SECONDS = enum.auto()
    """The longest of members that train together, added up over those that take turns."""
    RATE = enum.auto()
    """The sum over the members that have just reported."""


@dataclasses.dataclass(frozen=True)
class Report:
    """``train`` yields one per report interval; its numbers are on the host."""

    env_steps: int
    """Env steps so far, counted exactly."""
    updates: int
    iteration: int
    wall_time_s: float
    """Seconds since training began, including compilation, excluding evaluations."""
    metrics: Mapping[str, float | None]
    """Means since the last report; a missing value is None, not NaN."""
    variables: Callable[[], Variables]
    """Copies the current variables as numpy arrays; call it before the next report is taken."""
    checkpoint: Callable[[], Checkpoint]
    """Copies the state that a resumed run starts from; call it before the next report is taken."""
    evaluation: Mapping[str, float | int] | None = None
    """In the last report and at the evaluation interval: ``episodes`` played, ``return_mean``,
    ``return_std``, ``length_mean``, how many were ``cut``, and of a population ``members`` and, by
    n - 1, ``members_return_std``."""
    best_evaluation: Mapping[str, float | int] | None = None
    """In the last report if evaluations ``keep_best``: that of the best ``checkpoint``,
    in episodes that chose none."""
    ended_by: str | None = None
    """What ends the run with this report: a field of ``Train``, which is its total or
    ``stop_at_return``, or ``stop``, if the caller has called ``stop()``."""
    diverged: bool = False
    """Whether training ends because too many gradients in a row were not finite."""
    log: Callable[[Mapping[str, float | None]], None] = lambda values: None
    """Adds numbers to its line in ``metrics.jsonl`` and to the trackers, before the next report is
    taken; without a ``run_dir``, nothing. Raises ``ConfigError`` for names that the line has, and
    for what is not a number."""
    stop: Callable[[], None] = lambda: None
    """Ends the run with this report as if its total were reached. The caller then gets the report
    once more, with ``ended_by`` and the last evaluation. Of a population, it ends the members that
    train. With several processes, one call ends them all."""
    config: Any = None
    """The run's ``Train``, resolved: no field is left out. Of a population, as ``variables``."""
    agent_steps: int | None = None
    """Transitions of all agents so far, counted exactly; None if environments have one agent,
    or one team."""
    clock: str = "env_steps"
    """What the run counts: ``env_steps``, or ``updates`` if it steps no environment."""
    members: tuple[Report, ...] = ()
    """For a population, the newest report of each member that has one. The population's counts are
    sums, its metrics means over the members that have not diverged, and its variables those of the
    member with the highest return."""

    @property
    def step(self) -> int:
        """What the run's clock says."""
        return self.updates if self.clock == "updates" else self.env_steps
