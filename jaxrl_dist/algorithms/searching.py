"""Tree search by mctx, for algorithms that plan with a model or with the environment itself."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxrl_dist.algorithms import name_of
from jaxrl_dist.checks import MAX_SIZE, check_used, install_extra
from jaxrl_dist.config.inherit import Inherits
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, mctx, observations
from jaxrl_dist.types import Array, PyTree


class Found(NamedTuple):
    """What a search finds for each root."""

    action: jax.Array
    """[B] int32  the action to take."""
    weights: jax.Array
    """[B, A] float32  probabilities of an improved policy, which the network imitates."""
    value: jax.Array
    """[B] float32  value of the root under this policy."""
    depth: jax.Array
    """[B] float32  steps from the root to its deepest state."""


Step = Callable[[PyTree, Array, Array, PyTree], tuple[Array, ...]]
"""``(params, keys [N], action [N], state [N, ...]) -> (reward [N], discount [N], logits [N, A],
value [N], state)``: a step of the model, and the policy and value of the state after it; the
discount is 0 after an end, and negative where the other side of a game moves next."""


@dataclasses.dataclass(frozen=True)
class SearchConfig(Inherits):
    """Flags of the tree search; algorithms inherit them."""

    search: Literal["gumbel", "puct"] = "gumbel"
    """How the tree grows: with Gumbel's search, which improves the network's policy with any number
    of simulations (Danihelka et al. 2022), or with PUCT and noise at the root (Schrittwieser et al.
    2020, appendix B)."""
    num_simulations: int = setting(16, low=1, high=10**4)
    """Steps of the model that each search takes."""
    max_considered_actions: int = setting(16, low=2, high=MAX_SIZE)
    """Actions that Gumbel's search compares at the root."""
    value_bounds: Literal["node", "tree"] = "node"
    """The range that a search scales to 0 .. 1: the values around each state, as mctx does, or the
    values of the whole tree (Schrittwieser et al. 2020, equation 5), where small differences count
    little."""
    dirichlet_alpha: float = setting(0.3, above=0)
    """Concentration of the noise in the root's prior, with PUCT."""
    dirichlet_fraction: float = setting(0.25, low=0, high=1)
    """Share of the noise in the root's prior, with PUCT."""

    def validate(self) -> None:
        super().validate()
        noise = "dirichlet_alpha", "dirichlet_fraction"
        check_used(self, *noise, active=self.search == "puct", needed="--search puct")
        check_used(
            self, "max_considered_actions", active=self.search == "gumbel", needed="--search gumbel"
        )


def check_installed(config: object) -> None:
    """Raises ``ConfigError`` if mctx, which does the search, is not installed."""
    if importlib.util.find_spec("mctx") is None:
        raise ConfigError(
            f"{name_of(config)} searches with mctx, which is not installed: {install_extra('planning')}"
        )


def unsearched(logits: jax.Array, value: jax.Array, keys: jax.Array | None) -> Found:
    """Returns what the network alone says, where there is nothing to search: see ``search``."""
    choices = distributions.Categorical(logits)
    action = choices.mode() if keys is None else choices.sample(keys)
    return Found(action, jax.nn.softmax(logits), value, jnp.zeros_like(value))


def search(
    config: SearchConfig,
    step: Step,
    params: PyTree,
    logits: jax.Array,
    value: jax.Array,
    state: PyTree,
    legal: jax.Array | None,
    keys: jax.Array | None,
    temperature: jax.Array | float = 1.0,
) -> Found:
    """Plans from each of ``B`` roots, with its own key:
    what it finds does not depend on the other rows.

    Danihelka et al. (2022), "Policy improvement by planning with Gumbel",
    https://openreview.net/forum?id=bERaNdoegnO, or Schrittwieser et al. (2020),
    https://arxiv.org/abs/1911.08265.

    Args:
      logits: ``[B, A]``, the network's policy at the roots.
      value: ``[B]``, the network's value of the roots.
      state: ``[B, ...]``, what ``step`` steps.
      legal: ``[B, A]`` bool, which actions may be taken at the root; None: all.
      keys: ``[B]``; None: the best action, without noise: with PUCT the most visited, of equal ones
        that of the highest value. With 0 simulations, the network acts alone.
      temperature: scalar or ``[B]``: 0 is greedy. Gumbel's noise, or with PUCT the logarithm of the
        share of visits, is scaled by it or by its inverse.
    """
    logits = observations.masked(logits, legal)
    if not config.num_simulations:
        return unsearched(logits, value, keys)
    greedy = keys is None
    rows = value.shape
    if keys is None:  # the same for all rows, since they may be any part of a batch
        keys = jnp.broadcast_to(jax.random.key(0), rows)
        temperature = 0.0
    if legal is None:
        illegal = jnp.zeros(logits.shape, bool)
    else:
        illegal = ~legal
    scale = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows)

    def expand(
        params: PyTree, key: jax.Array, action: jax.Array, state: PyTree
    ) -> tuple[Any, PyTree]:
        depth, state = state
        reward, discount, logits, value, state = step(params, key[None], action, state)
        made = mctx.RecurrentFnOutput(
            reward=reward, discount=discount, prior_logits=logits, value=value
        )
        return made, (depth + 1.0, state)

    def one(key: jax.Array, scale: jax.Array, *row: PyTree) -> Found:
        logits, value, state, illegal = jax.tree.map(lambda x: x[None], row)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=(jnp.zeros(1), state))
        given: dict[str, Any] = {
            "num_simulations": config.num_simulations,
            "invalid_actions": illegal,
        }
        if config.search == "gumbel":
            given |= {
                "max_num_considered_actions": config.max_considered_actions,
                "gumbel_scale": scale,
            }
            given |= {"qtransform": _gumbel_scores} if config.value_bounds == "tree" else {}
            found = mctx.gumbel_muzero_policy(params, key, root, expand, **given)
        else:
            if not greedy:
                root = root.replace(
                    prior_logits=_noisy(config, jax.random.fold_in(key, 2), logits, illegal)
                )
            # mctx's noise is of illegal actions, too
            given |= {"dirichlet_fraction": 0.0, "temperature": scale}
            given |= {"qtransform": _puct_scores} if config.value_bounds == "tree" else {}
            found = mctx.muzero_policy(params, key, root, expand, **given)
        summary = found.search_tree.summary()
        weights = found.action_weights[0]
        action = found.action[0]
        q = jnp.where(summary.visit_counts > 0, summary.qvalues, summary.value[:, None])[0]
        if greedy and config.search == "puct":
            action = jnp.argmax(jnp.where(weights == jnp.max(weights), q, -jnp.inf))
        depth = jnp.max(found.search_tree.embeddings[0])
        return Found(action.astype(jnp.int32), weights, jnp.sum(weights * q), depth)

    with jax.numpy_rank_promotion("allow"):
        return jax.vmap(one)(keys, scale, logits, value, state, illegal)


def _noisy(
    config: SearchConfig, key: jax.Array, logits: jax.Array, illegal: jax.Array
) -> jax.Array:
    """Returns the logits ``[1, A]`` of a root's prior with Dirichlet noise over its legal actions
    (Silver et al. 2017, https://doi.org/10.1038/nature24270)."""
    noise = jax.random.loggamma(key, config.dirichlet_alpha, logits.shape)
    noise = jax.nn.softmax(observations.masked(noise, ~illegal))
    share = config.dirichlet_fraction
    return jnp.log(
        (1 - share) * jax.nn.softmax(logits) + share * noise + jnp.finfo(noise.dtype).tiny
    )


LEAST_RANGE = 0.01
"""Range below which a tree's values count as equal (Ye et al. 2021,
https://arxiv.org/abs/2111.00210, appendix)."""


def _bounds(tree: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the lowest value of a tree, of its states and of the actions tried,
    and the range of values.
    """
    q = tree.children_rewards + tree.children_discounts * tree.children_values
    values = jnp.concatenate([tree.node_values, q.reshape(-1)])
    seen = jnp.concatenate([tree.node_visits, tree.children_visits.reshape(-1)]) > 0
    low = jnp.min(jnp.where(seen, values, jnp.inf))
    high = jnp.max(jnp.where(seen, values, -jnp.inf))
    return low, jnp.maximum(high - low, LEAST_RANGE)


def _gumbel_scores(tree: Any, node: jax.Array) -> jax.Array:
    """Returns ``sigma(Q) [A]`` of a state's actions (Danihelka et al. 2022, equation 8),
    scaled by the whole tree.
    """
    _, size = _bounds(tree)
    scores = mctx.qtransform_completed_by_mix_value(tree, node, rescale_values=False)
    return (scores - jnp.min(scores)) / size


def _puct_scores(tree: Any, node: jax.Array) -> jax.Array:
    """Returns the values ``[A]`` of a state's actions, scaled by the whole tree."""
    low, size = _bounds(tree)
    return mctx.qtransform_by_min_max(tree, node, min_value=low, max_value=low + size)
