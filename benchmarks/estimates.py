"""Do the 95 % intervals of `jaxrl-dist estimate` hold the
truth? On small MDPs a linear solve in float64 knows it.

    python benchmarks/estimates.py

Each table is of an MDP, drawn at random, and a behaviour between the target and a uniform one.
Every episode ends by itself. The table says of how many data sets the interval holds the truth, how
wide it is in the median, in parts of the range between the returns of the worst and the best
policy, and how far estimates are from the truth: in the median, and their mean.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_dist
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.envs.source import RECORDS, EnvSource
from jaxrl_dist.exact import solve
from jaxrl_dist.exact.table import Table
from jaxrl_dist.nn.distributions import Categorical
from jaxrl_dist.protocols import Hyperparameters
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables

LONGEST = 400
"""Steps after which an episode would be cut; the probability of that is below 1e-9."""

ROWS = (
    (5, 2, 0.2, 0.9, 0.7, 1000),
    (5, 2, 0.2, 0.9, 0.3, 3000),
    (8, 3, 0.2, 0.95, 0.6, 3000),
    (6, 4, 0.3, 0.99, 0.5, 1000),
    (10, 2, 0.1, 0.99, 0.8, 2000),
)
"""States, actions, mean probability that a step ends the episode, discount, the target's share in
the behaviour, and episodes of a data set: more where the behaviour is far from the target, so that
few of them count."""


def play(table: Table, rng: np.random.Generator, behaviour: np.ndarray, episodes: int) -> Dataset:
    """Plays in a table of ``Table.random`` from uniform states, all episodes side by side."""
    states, actions = table.shape
    s, over, rows = rng.integers(states, size=episodes), np.zeros(episodes, bool), []
    moves, policy, end = (
        table.probability.cumsum(axis=2),
        behaviour.cumsum(axis=1),
        1 - table.going[:, :, 0],
    )
    while not over.all():
        assert len(rows) < LONGEST
        a = np.minimum((rng.random(episodes)[:, None] > policy[s]).sum(1), actions - 1)
        reward = table.reward[s, a] + 0.1 * rng.normal(size=episodes)
        ends = rng.random(episodes) < end[s, a]
        after = np.minimum((rng.random(episodes)[:, None] > moves[s, a]).sum(1), states - 1)
        rows.append((s, a, reward, ~over, after))
        s, over = after, over | ends
    states_, actions_, rewards, valid, last = (np.stack(x, axis=1) for x in zip(*rows, strict=True))
    parts = []
    for number, length in enumerate(valid.sum(axis=1)):
        seen, acts = states_[number, :length], actions_[number, :length]
        obs = np.eye(states, dtype=np.float32)[np.append(seen, last[number, length - 1])]
        probability = np.log(behaviour[seen, acts])
        parts.append(
            {
                "obs": obs,
                "action": acts,
                "reward": rewards[number, :length],
                "log_prob": probability,
            }
        )
    kinds = {"observation_space": observation(states), "action_space": Discrete(actions)}
    return Dataset.from_episodes([{**part, "terminated": True} for part in parts], **kinds)


def extreme(table: Table, sign: int, discount: float) -> float:
    """The mean return of the best policy (1) or the worst one (-1)."""
    signed = table._replace(reward=sign * table.reward)
    return sign * solve.start_value(
        table, solve.state_values(table, solve.optimal(signed, discount))
    )


def observation(states: int) -> Box:
    return Box(
        (states,), np.dtype(np.float32), np.zeros(states, np.float32), np.ones(states, np.float32)
    )


@dataclasses.dataclass(frozen=True)
class Tabular(Hyperparameters):
    """Policies with a logit for each state and action; their parameters are the logits."""

    discount: float = 0.9

    def make(self, spec: EnvSpec) -> Algorithm:
        def choices(variables: Variables, obs: PyTree) -> Categorical:
            return Categorical(variables.params[jnp.argmax(obs, axis=-1)])

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            chosen = choices(variables, obs)
            return chosen.mode() if context.keys is None else chosen.sample(context.keys), core, {}

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            return choices(variables, obs).log_prob(action)

        def nothing(*_: Any) -> Any:
            return jnp.zeros(1), jnp.ones(1, bool), Aux({})

        return Algorithm(nothing, policy, nothing, nothing, None, log_prob=log_prob)  # type: ignore[arg-type]


def policy_of(target: np.ndarray, discount: float) -> jaxrl_dist.Policy:
    """Returns a policy that samples by the probabilities [S, A]."""
    states, actions = target.shape
    spec = EnvSpec("table", RECORDS, RECORDS, observation(states), Discrete(actions), None)
    config = jaxrl_dist.Train(Tabular(discount), env="table")
    return jaxrl_dist.Policy(
        config, EnvSource(spec, {}), Variables(jnp.log(jnp.asarray(target, jnp.float32)), ())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)))
    parser.add_argument("--data-sets", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[16])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number in options.rows:
        row = ROWS[number]
        states, actions, end, discount, share, episodes = row
        rng = np.random.default_rng((options.seed, number))
        table = Table.random(rng, states, actions, end)
        target = rng.dirichlet(np.ones(actions), states)
        truth = solve.start_value(table, solve.values(table, target, discount))
        spread = extreme(table, 1, discount) - extreme(table, -1, discount)
        policy, made = policy_of(target, discount), dict[str, list[tuple[float, float, float]]]()
        for seed in range(options.data_sets):
            data = play(table, rng, share * target + (1 - share) / actions, episodes)
            sizes = {"hidden_sizes": tuple(options.hidden_sizes), "updates": options.updates}
            for name, x in jaxrl_dist.estimate(
                policy, data, sampled=True, seed=seed, **sizes
            ).estimates.items():
                made.setdefault(name, []).append((x.value, *x.interval))
        fields = zip(
            ("states", "actions", "end", "discount", "target's share", "episodes"), row, strict=True
        )
        print(
            f"\n{', '.join(f'{name} {value}' for name, value in fields)}; truth {truth:.4f}, range {spread:.4f}\n"
        )
        print(
            "| estimator | covered | width / range | median error | error of the mean |\n|---|---:|---:|---:|---:|"
        )
        for name, numbers in made.items():
            value, low, high = np.asarray(numbers).T
            covered = f"{np.sum((low <= truth) & (truth <= high))} of {len(value)}"
            width, errors = (
                np.median(high - low) / spread,
                np.abs(np.append(value, value.mean()) / truth - 1),
            )
            print(
                f"| {name} | {covered} | {width:.3f} | {np.median(errors[:-1]):.1%} | {errors[-1]:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
