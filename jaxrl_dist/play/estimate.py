"""Estimates the return of a policy from what another one has experienced, without playing."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxrl_dist import rng, spaces
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, check_samples
from jaxrl_dist.actors.step import reads_of_core
from jaxrl_dist.data.dataset import Dataset, check_spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.nn import observations
from jaxrl_dist.play import fitted
from jaxrl_dist.play.importance import Episodes, quotient
from jaxrl_dist.play.policy import Policy, load_policy
from jaxrl_dist.spaces import Box, Discrete, clipped
from jaxrl_dist.training.compile_cache import keep_programs
from jaxrl_dist.types import Array, Context, PyTree, Variables

RESAMPLES = 1000
"""Data sets, drawn from the episodes with replacement, whose estimates give an interval where
nothing is fitted."""
DRAWS = 4
"""Actions that the target draws in each state, where they are not categories."""
RARE = 0.001
"""Share of steps without a choice that ratios bear: probabilities of a confident policy round to
1."""
LOWEST = 0.01
"""Importance ratio of a step below which the target hardly ever takes its action."""
NAMES = {
    "behaviour": "mean of the data",
    "is": "importance sampling",
    "pdis": "per decision",
    "wis": "self-normalised",
    "pdwis": "per decision, self-normalised",
    "fqe": "fitted Q evaluation",
    "dr": "doubly robust",
}
"""The estimators."""
NOT_FITTED = ["behaviour", "is", "pdis", "wis", "pdwis"]
"""The estimators without networks."""


class Estimate(NamedTuple):
    """What one estimator says of the mean discounted return."""

    value: float
    interval: tuple[float, float]
    """95 %."""
    effective_episodes: float | None = None
    """(sum w)^2 / sum w^2 of the episodes' ratios w (Kong 1992)."""


class Estimates(NamedTuple):
    """The estimates of a policy's mean discounted return from the starts of the data's episodes."""

    discount: float
    episodes: int
    estimates: Mapping[str, Estimate]
    """By the names of ``NAMES``."""
    assumptions: tuple[str, ...]
    """What holds, and what does not."""

    def summary(self) -> dict[str, Any]:
        """Returns the numbers as JSON."""
        return {
            **self._asdict(),
            "estimates": {name: x._asdict() for name, x in self.estimates.items()},
        }


@in_32_bits
def estimate(
    policy: Policy | str | pathlib.Path,
    data: Dataset | str | pathlib.Path,
    *,
    checkpoint: str | int | None = None,
    discount: float | None = None,
    sampled: bool | None = None,
    refits: int = 20,
    updates: int = 5_000,
    hidden_sizes: tuple[int, ...] = (64, 64),
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Estimates:
    """Estimates the mean discounted return of a policy, the target, from the starts of the data's
    episodes.

        jaxrl_dist.estimate("runs/new", "data/old").estimates["fqe"].interval

    Args:
      policy: a policy or the directory of a run.
      data: a data set or its directory.
      checkpoint: of the run, as for ``load_policy``.
      discount: None: the run's.
      sampled: the target samples its actions, or takes the best ones; None: as the run's
        ``evaluation_policy`` says.
      refits: networks fitted to resampled episodes, for the intervals of ``fqe`` and ``dr``.
      updates: of each network.
      hidden_sizes: widths of their hidden layers.
      seed: of the networks, the batches and the resampled episodes.
      progress: called with the number of updates done.

    Importance sampling needs the behaviour's probability of each action and a target that samples;
    without, there is only ``fqe``. It counts what an episode returns until a time limit cuts it;
    ``fqe`` and ``dr`` look beyond.

    Raises:
      ConfigError: the policy is recurrent or one of several, the data has other spaces, or a fit
        has no end.
      DivergedError: fitted values are not finite.
    """
    policy, data = _load(policy, data, checkpoint)
    if policy.config.compile_cache:
        keep_programs()
    if sampled is None:
        sampled = policy.config.evaluation_policy == "sampled"
    _check_target(policy, sampled=sampled)
    _check_data(policy, data)
    discount = _discount(policy, discount)
    _check_fits(updates, refits)

    log_prob, choices = _target(policy, data, seed, sampled=sampled)
    lost = _never_tried(policy, data, log_prob)
    known = sampled and log_prob is not None and data.log_prob is not None and not lost
    episodes = Episodes(data, discount, log_prob if known else None)
    generator = np.random.default_rng(seed)
    estimates = _resampled(episodes, generator, NOT_FITTED if known else ["behaviour"])
    lines = _assumptions(policy, data, episodes, updates, lost, sampled=sampled, known=known)
    if discount == 1.0 and data.truncated.any():
        lines.append("time limits cut episodes, so with discount 1 fqe has no values")
        return Estimates(discount, episodes.size, estimates, tuple(lines))

    shares = np.full(episodes.size, 1 / episodes.size)
    counts = generator.multinomial(episodes.size, shares, size=refits)
    counts = np.concatenate([np.ones((1, episodes.size)), counts])
    values = fitted.fit(
        policy.algorithm,
        observations.input_space(policy.source.spec),
        _steps(policy, data, episodes, choices),
        counts,
        hidden_sizes=hidden_sizes,
        updates=updates,
        seed=seed,
        progress=progress,
    )
    estimates["fqe"] = _refitted(values.state[:, episodes.first], counts)
    if known:
        estimates["dr"] = _refitted(episodes.doubly_robust(values), counts)
    return Estimates(discount, episodes.size, estimates, tuple(lines))


# --- Intervals ------------------------------------------------------------------------------------


def _resampled(
    episodes: Episodes, generator: np.random.Generator, names: Sequence[str]
) -> dict[str, Estimate]:
    """Estimates with bootstrap-t intervals (Efron 1979; Hall 1988), which allow for the skewness of
    ratios.

    The estimates of resampled episodes are taken as linear in how often each episode counts.
    """
    size = episodes.size
    values, influences = zip(*(episodes.estimate(name) for name in names), strict=True)
    influence = np.stack(influences, axis=1)
    deviation = influence.std(axis=0)
    square = np.square(influence)
    drawn = []
    for _ in range(RESAMPLES):
        shares = generator.multinomial(size, np.full(size, 1 / size)) / size
        mean = shares @ influence
        variance = np.maximum(shares @ square - mean**2, 1e-12 * deviation**2)
        drawn.append(quotient(mean, np.sqrt(variance)))
    below, above = np.percentile(drawn, (2.5, 97.5), axis=0) * deviation
    intervals = zip((values - above).tolist(), (values - below).tolist(), strict=True)
    estimates = dict(zip(names, map(Estimate, values, intervals), strict=True))
    for name in ("is", "wis"):
        if name in estimates:
            estimates[name] = estimates[name]._replace(effective_episodes=episodes.effective())
    return estimates


def _refitted(values: np.ndarray, counts: np.ndarray) -> Estimate:
    """Estimates by the first of ``M`` networks, with an interval from the spread of the others:
    values ``[M, E]``.
    """
    means = np.sum(values * counts, axis=1, dtype=np.float64) / counts.sum(axis=1)
    mean = float(means[0])
    half = float(special.stdtrit(len(means) - 2, 0.975) * means[1:].std(ddof=1))
    return Estimate(mean, (mean - half, mean + half))


# --- The target -----------------------------------------------------------------------------------


def _load(
    policy: Policy | str | pathlib.Path,
    data: Dataset | str | pathlib.Path,
    checkpoint: str | int | None,
) -> tuple[Policy, Dataset]:
    if not isinstance(policy, Policy):
        policy = load_policy(policy, checkpoint=checkpoint)
    if not isinstance(data, Dataset):
        data = Dataset.load(data)
    return policy, data


def _check_target(policy: Policy, *, sampled: bool) -> None:
    spec = policy.source.spec
    several = spec.policies or spec.num_agents > 1 or policy.source.wrappers.policies
    if several or spec.frame_stack > 1:
        raise ConfigError("estimates need one agent's policy, without stacked frames")
    if getattr(policy.config.algorithm, "core", "none") != "none":
        raise ConfigError(
            "estimates do not support policies with a recurrent core; use a run without --core"
        )
    if policy.algorithm.searches:
        raise ConfigError(
            "this policy searches before it acts, which an estimate does not; estimate its network "
            "alone with --num-simulations 0, or load_policy(run_dir, num_simulations=0) in Python"
        )
    if sampled:
        check_samples({"": policy.algorithm})
        if reads_of_core(policy.algorithm, spec, policy.variables)[0]:
            raise ConfigError(
                "this run explores with actions or noise that last for several steps, which an "
                "estimate does not follow; use --evaluation-policy greedy"
            )


def _check_data(policy: Policy, data: Dataset) -> None:
    spec = policy.source.spec
    check_spaces("the data set", data, spec.observation, spec.action)
    if spec.both_sides or data.interface.both_sides:
        raise ConfigError(
            "estimates need one side of a game, but one agent moves for both sides here; compare "
            "the policy with others in `jaxrl-dist match`"
        )


def _check_fits(updates: int, refits: int) -> None:
    if updates < 1:
        raise ConfigError(f"--updates {updates} is too few; networks need 1 or more")
    if refits < 2:
        raise ConfigError(f"--refits {refits} is too few; an interval needs 2 or more")


def _discount(policy: Policy, discount: float | None) -> float:
    """Returns the discount, by default the run's."""
    if discount is None:
        discount = getattr(policy.config.algorithm, "discount", None)
    if discount is None:
        raise ConfigError("this run has no discount; set one, such as --discount 0.99")
    if not 0 <= discount <= 1:
        raise ConfigError(f"--discount {discount} must be from 0 to 1")
    return discount


def _target(
    policy: Policy, data: Dataset, seed: int, *, sampled: bool
) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns the target's log-probability ``[L]`` of the data's actions, and its
    ``fitted.Steps.choices``.
    """
    algorithm = policy.algorithm
    spec = policy.source.spec
    key = rng.stream(seed, rng.Stream.ACT)
    log_prob = algorithm.log_prob if sampled else None

    def at(
        variables: Variables, key: Array, obs: PyTree, action: PyTree, number: Array
    ) -> tuple[jax.Array, jax.Array]:
        size = len(number)
        core = algorithm.initial_core(size)
        step = jnp.float32(END_OF_SCHEDULES)
        keys = jax.vmap(
            lambda row: jax.random.split(jax.random.fold_in(key, row), DRAWS), out_axes=1
        )(number)
        known = jnp.zeros(size)
        if log_prob is not None:
            known = log_prob(variables, obs, core, action, Context(keys[0], step))
        if log_prob is not None and isinstance(spec.action, Discrete):
            each = jnp.arange(spec.action.n, dtype=jnp.int32)
            of = functools.partial(log_prob, variables, obs, core)
            of_each = jax.vmap(
                lambda action: of(jnp.full(size, action), Context(keys[0], step)), out_axes=1
            )
            return known, jnp.exp(of_each(each))

        def draw(keys: jax.Array | None) -> jax.Array:
            drawn, _, _ = algorithm.policy(variables, obs, core, Context(keys, step))
            return _vectors(clipped(spec.action, drawn), spec.action)

        if sampled:
            drawn = jax.vmap(draw, out_axes=1)(keys)
        else:
            drawn = draw(None)[:, None]
        if isinstance(spec.action, Discrete):
            return known, drawn.mean(axis=1)
        return known, drawn

    acting = jax.jit(at)
    known, choices = fitted.in_chunks(
        lambda *x: acting(policy.variables, key, *x),
        data.obs,
        data.action,
        np.arange(len(data.reward), dtype=np.uint32),
    )
    if log_prob is None:
        return None, choices
    return known, choices


def _never_tried(policy: Policy, data: Dataset, log_prob: np.ndarray | None) -> float:
    """Returns the share of steps whose action had all the probability, while the target takes
    others; 0 if it is ``RARE``.
    """
    parts = spaces.leaves(policy.source.spec.action).values()
    if data.log_prob is None or log_prob is None or any(isinstance(part, Box) for part in parts):
        return 0.0
    tries_others = log_prob < math.log1p(-LOWEST)
    share = float(np.mean((data.log_prob >= 0) & tries_others, where=data.valid))
    return share if share > RARE else 0.0


def _vectors(action: PyTree, space: spaces.Space) -> jax.Array:
    """Returns actions as vectors ``[..., A]``, in which categories are one-hot."""
    return observations.side_by_side(observations.preprocess(action, space, jnp.float32), space)


def _steps(policy: Policy, data: Dataset, episodes: Episodes, choices: np.ndarray) -> fitted.Steps:
    space = policy.source.spec.action
    episode = np.zeros(len(data.reward), np.int32)
    episode[episodes.rows] = episodes.episode
    vectors = jax.jit(lambda action: _vectors(action, space))
    if isinstance(space, Discrete):
        action = data.action
    else:
        action = fitted.in_chunks(vectors, data.action)
    discount = (episodes.discount * ~data.terminated).astype(np.float32)
    return fitted.Steps(data.obs, action, choices, data.reward, discount, data.valid, episode)


def _assumptions(
    policy: Policy,
    data: Dataset,
    episodes: Episodes,
    updates: int,
    lost: float,
    *,
    sampled: bool,
    known: bool,
) -> list[str]:
    """Says what the estimates rest on."""
    lines = []
    if not sampled:
        lines.append(
            "the target is deterministic, so ratios are 0 after the first other action, or do not "
            "exist: only fqe; estimate the sampling policy with --evaluation-policy sampled"
        )
    elif lost:
        lines.append(
            f"the behaviour had no choice in {lost:.1%} of the steps, for example where it repeats "
            "actions, but the target takes others there, so ratios know nothing about them: only "
            "fqe; record data with `record --random-share`"
        )
    elif known:
        lines += _ratio_lines(policy, data, episodes)
    elif data.log_prob is None:
        lines.append("the data lack the behaviour's action probabilities: only fqe")
    else:
        lines.append("the target's action probabilities have no closed form: only fqe")
    horizon = min(1 / max(1 - episodes.discount, 1e-9), float(episodes.lengths.mean()))
    needed = math.ceil(4 * horizon / fitted.TARGET_RATE)
    if updates < needed:
        lines.append(
            f"--updates {updates} may be too few for the values of fqe and dr to settle; try "
            f"{needed}"
        )
    if data.truncated.any():
        share = float(np.mean(data.truncated[data.ends]))
        beyond = ", which only fqe and dr look beyond" if known else ""
        lines.append(f"time limits cut {share:.1%} of the episodes{beyond}")
    return lines


def _ratio_lines(policy: Policy, data: Dataset, episodes: Episodes) -> list[str]:
    """Says how far the importance ratios can be trusted."""
    share = float(np.mean(episodes.of_step < LOWEST))
    mean = float(episodes.weight.mean())
    effective = episodes.effective()
    lines = [
        f"the probabilities are stored; {share:.1%} of the steps have a ratio below {LOWEST}; the "
        f"ratios of episodes average {mean:.3g} (1 is expected); {effective:.1f} of "
        f"{episodes.size} episodes count"
    ]
    if effective < 10:
        lines.append("is, pdis, wis and pdwis rest on few episodes; do not trust their intervals")
    actions = spaces.leaves(data.action)
    at_bound = 0.0
    for path, part in spaces.leaves(policy.source.spec.action).items():
        if isinstance(part, Box):
            action = actions[path][episodes.rows]
            at_bound = max(at_bound, np.mean((action == part.low) | (action == part.high)))
    if at_bound:
        lines.append(
            f"{at_bound:.1%} of the action values lie on a bound, where ratios use the density "
            "before clipping"
        )
    return lines
