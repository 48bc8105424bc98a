"""Most flags of a training run, in the groups that help shows: a flag is declared here,
and nowhere else.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_dist.checks import MAX_SIZE, MAX_STEPS
from jaxrl_dist.config.values import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """How environments run, and what policies see of them."""

    env_workers: Literal["threads", "processes"] = setting("threads", resumable=True)
    """Where Gymnasium environments run; 'processes' suit slow Python code,
    but take longer to start."""
    env_timeout: float = setting(120.0, above=0, high=10**6, resumable=True)
    """Seconds within which an environment on the host must answer."""
    atari_preset: Literal["baselines", "machado"] | None = None
    """Atari protocol: Mnih et al. 2015 as in OpenAI baselines (Atari's default),
    or Machado et al. 2018."""
    frame_stack: int | None = setting(None, low=1, high=1000)
    """Frames stacked into one observation; None: the environment's own number,
    4 on Atari and 1 elsewhere."""
    action_repeat: int = setting(1, low=1, high=10**4)
    """Times to repeat each action; rewards are summed, and all repeats count as one env step."""
    time_limit: int | None = setting(None, low=1, high=10**9)
    """Env steps after which an episode is truncated; None: only the environment's own limit,
    which always applies."""
    hide: str | None = None
    """Entries of a vector observation to hide from policies, by index, such as 1,3; 'velocities'
    hides the velocities of classic control."""
    info_metrics: str | None = None
    """Numbers of the environment's info to report as means over episodes, such as success,score:
    the last value of an episode, or with :sum, as in fuel:sum, its sum."""
    normalize_observations: bool = setting(
        without_preset=False, varies=True, per_policy=True, needs_rollouts=True
    )
    """Normalise observations by their running mean and standard deviation over all devices."""
    scale_rewards: bool = setting(
        without_preset=False, varies=True, per_policy=True, needs_rollouts=True
    )
    """Divide rewards by the running standard deviation of the discounted return; under --plan
    offline, multiply them so that the returns of the data span 1,000, as the authors of IQL do."""
    clip_rewards: str | None = setting(None, varies=True, per_policy=True)
    """Clip rewards for learning to a bound such as 1 or a range such as -1,1;
    reported returns stay raw."""
    her: float | None = setting(
        None, above=0, high=1, varies=True, per_policy=True, needs_rollouts=True
    )
    """Share of the replayed steps that get another goal, one that the episode reached later
    (hindsight experience replay, Andrychowicz et al. 2017: 0.8); needs observations with the parts
    achieved_goal and desired_goal."""
    her_horizon: int = setting(50, low=1, high=10**4, needs="her", varies=True, per_policy=True)
    """Steps within which the later goal is drawn; an episode's length or less."""
    goal_reward: str | None = setting(None, needs="her", varies=True, per_policy=True)
    """What a replaced goal pays: near:DISTANCE is 0 within the distance and -1 beyond,
    within:DISTANCE is 1 and 0; None: the environment's own function `goals`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Recorded experience to learn from."""

    data: str | None = setting(None, resumable=True)
    """Directory of a data set, as `jaxrl-dist record` makes it. Learn from it alone with --plan
    offline, or from it and new experience with a data share."""
    total_updates: int = setting(100_000, low=1, high=10**9, resumable=True, compiled=False)
    """Updates to train for, under --plan offline."""
    data_memory: Literal["device", "host"] = setting("device", needs="data", resumable=True)
    """Where to keep the data: on the devices, or on the host, which then gathers each batch;
    results are the same."""
    record: str | None = setting(None, resumable=True, compiled=False)
    """New directory for a data set of all steps that are played, with the probability of each
    action if it is known; a resumed run adds a number to the name."""
    data_share: float | None = setting(None, above=0, below=1, needs="data")
    """Share of each batch that comes from the data set (Ball et al. 2023);
    the rest comes from replayed experience."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Devices, and their memory and programs."""

    num_devices: int | None = setting(None, low=1, high=MAX_SIZE, resumable=True, of_machine=True)
    """Devices to train on, counted over all processes; None: all."""
    mem_fraction: float | None = setting(None, above=0, high=1, resumable=True)
    """Fraction of a GPU's memory to reserve at the start; None: JAX's default (0.75)."""
    compile_cache: bool = setting(True, resumable=True, compiled=False)
    """Keep compiled programs for later runs, below ~/.cache/jaxrl_dist or in
    JAX_COMPILATION_CACHE_DIR if it is set."""
    learner_devices: str | None = setting(None, resumable=True, of_machine=True)
    """Devices that learn, such as 2-7; None: the first `--num-devices` devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actors:
    """Actors that run beside the learner."""

    num_actors: int | None = setting(without_preset=2, low=1, high=1000)
    """Actor threads of the plans 'asynchronous', 'own_pace' and 'gradients', which share the
    environments; presets: 2 or 4."""
    actor_devices: str | None = setting(None, resumable=True, of_machine=True, needs_actors=True)
    """Devices that act under the plans with actor threads, such as 0,1 or 0-3; None:
    the devices that learn."""
    actors_on: Literal["ray"] | None = setting(
        None, needs_actors=True, resumable=True, compiled=False
    )
    """Where actors run: ray, each in a process of the Ray cluster that RAY_ADDRESS names, or of a
    new one on this machine; None: in threads of this process."""
    actor_cpus: float = setting(
        1.0, low=0, high=10**4, needs="actors_on", resumable=True, compiled=False
    )
    """CPUs that Ray counts for each actor."""
    actor_gpus: float = setting(
        0.0, low=0, high=100, needs="actors_on", resumable=True, compiled=False
    )
    """GPUs of each actor, which acts on the first of them; 0: on a CPU."""
    max_lag: int | None = setting(
        None, low=0, high=10**6, needs_actors=True, timed=True, skips=True
    )
    """Drop experience from policies more than this many versions behind the learner; None: use all
    experience."""
    lockstep: bool = setting(False, needs_actors=True, needs_rollouts=True)
    """Keep actors a fixed lag behind the learner, so that thread timing does not change results."""
    lag: int = setting(1, low=0, high=1000, needs="lockstep")
    """Policy versions that actors in lockstep stay behind the learner."""
    free_running: bool = setting(False, timed=True)
    """Keep learning from the replay memory while no new experience arrives,
    beyond the replay ratio."""
    gather: int | None = setting(
        None, low=1, high=1000, needs_actors=True, timed=True, skips=True, needs_rollouts=True
    )
    """Rollouts that suffice for an update once the gather deadline has passed, one per actor;
    None: wait for all."""
    gather_deadline: float = setting(1.0, above=0, high=10**6, needs="gather")
    """Seconds to wait for the other actors' rollouts after the first one."""
    on_actor_error: Literal["raise", "restart"] = setting(
        "raise", resumable=True, needs_actors=True
    )
    """If an environment fails: end the run, or recreate its actor's environments and continue."""
    max_restarts: int = setting(100, low=0, high=10**6, resumable=True)
    """Restarts allowed for each actor; the next failure ends the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """Runs that train together."""

    vary: dict[str, str] = setting({})
    """Values of hyperparameters, such as learning-rate=1e-4,3e-4 or hidden-sizes=64,64x64:
    a population with every combination of them."""
    zip: bool = setting(False, needs="vary")
    """Combine the first values of all varied hyperparameters, then the second values, and so on,
    instead of all with all."""
    evolve: Literal["pbt", "halving"] | None = None
    """Select among the members: population-based training, or successive halving;
    see --evolve-interval."""
    evolve_interval: int | None = setting(None, low=1, high=10**15, needs="evolve")
    """Env steps of a member between two selections; with halving, env steps up to the first
    selection, and each later rung takes twice as many. None: 20,000, or 40,000 with halving."""
    average_every: int | None = setting(None, low=1, high=10**9)
    """Rollouts after which the networks of all members are averaged (local SGD); all members start
    with the first one's network."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the policy is evaluated."""

    ema_steps: int = setting(
        without_preset=0, low=0, high=10**15, varies=True, per_policy=True, needs_rollouts=True
    )
    """Env steps over which greedy actions average the parameters (exponential moving average);
    0: the newest ones."""
    evaluation_policy: Literal["greedy", "sampled"] = setting(
        "greedy", needs="evaluation_episodes", resumable=True, compiled=False
    )
    """Actions in evaluations: the best ones, or sampled as in
    training after all exploration schedules have ended."""
    evaluation_max_steps: int | None = setting(
        None, low=1, high=10**9, needs="evaluation_episodes", resumable=True, compiled=False
    )
    """Env steps after which an evaluation episode is cut off; None: 27,000,
    or the environment's limit if longer."""
    return_window: int = setting(
        without_preset=10_000, low=1, high=MAX_STEPS, resumable=True, compiled=False
    )
    """Window, in env steps and whole reports, over which training returns are averaged to stop
    runs, select members and choose checkpoints; at most an --evolve-interval."""
    exact: bool = setting(False, resumable=True, compiled=False)
    """Compare the policy with the exact optimum at each report, if the environment's states can be
    listed; the metrics exact/* are what jaxrl-dist exact prints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What a run saves, and what it starts from."""

    checkpoint_interval: int = setting(
        1_000_000, low=0, high=10**15, resumable=True, compiled=False
    )
    """Environment steps between two checkpoints, each saved with the next report; 0: no checkpoints
    by steps."""
    checkpoint_minutes: float = setting(10.0, low=0, high=10**6, resumable=True, compiled=False)
    """Minutes after which the next report saves another checkpoint; 0: no checkpoints by time."""
    keep_checkpoints: int = setting(2, low=1, high=10**6, resumable=True, compiled=False)
    """Number of newest checkpoints to keep, besides the one with the highest return."""
    keep_best: Literal["training", "evaluation"] | None = setting(None, compiled=False)
    """Which mean return picks the best checkpoint: that of training, or of evaluations, which then
    each save a checkpoint. None: training, or under --plan offline evaluation, if there is an
    evaluation interval."""
    checkpoint_replay: bool | None = setting(None, resumable=True, compiled=False)
    """Save the replay memory in checkpoints; otherwise a resumed run has to refill it. None: save
    it if it is smaller than 2 GB."""
    init_from: str | None = setting(None, compiled=False)
    """Run directory with the trained variables to start from."""
    init_parts: str | None = setting(None, needs="init_from", compiled=False)
    """Parts of the stored networks to load, such as torso,core; other parts start untrained. None:
    all variables."""
