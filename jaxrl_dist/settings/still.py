"""Policies that do not train: random actions, policies of finished runs, copies for self-play.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, np, observations, optax, spaces
from jaxrl_dist.types import Acted, Algorithm, Context, EnvSpec, Policy, PyTree, Variables

MAX_COPIES = 1000
"""Most copies in a pool: all of them act at every step."""


@dataclasses.dataclass(frozen=True)
class Still:
    """A policy that does not train."""

    stored_as: ClassVar[str]
    """Its name in ``config.json``."""


@dataclasses.dataclass(frozen=True)
class Random(Still):
    """Uniformly random legal actions; normally distributed ones where a component lacks a bound."""

    stored_as = "Random"

    def make(self, spec: EnvSpec) -> Algorithm:
        """Returns the algorithm that acts in an environment."""
        head = distributions.policy_head(spec.action)
        components, tree = jax.tree.flatten(spec.action)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            if context.keys is None:
                raise ConfigError(
                    "this policy only samples actions; call it in Python, as policy(obs, core, key)"
                )
            outputs = jnp.zeros((len(context.keys), head.num_outputs + head.log_std_size))
            keys, other_keys = jax.vmap(jax.random.split, out_axes=1)(context.keys)
            drawn = head.distribution(outputs, observations.legal(spec, obs)).sample(keys)
            actions = []
            for number, (space, action) in enumerate(
                zip(components, jax.tree.leaves(drawn), strict=True)
            ):
                own_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(other_keys, number)
                actions.append(_uniform_within_bounds(space, action, own_keys))
            return jax.tree.unflatten(tree, actions), core, {}

        return _never_learning(lambda key: Variables({}, ()), policy)


def _uniform_within_bounds(space: spaces.Part, action: jax.Array, keys: jax.Array) -> jax.Array:
    """Replaces numbers of an action ``[N, ...]`` by uniform ones where they have two bounds."""
    if not isinstance(space, spaces.Box):
        return action
    low = np.asarray(space.low, np.float32)
    high = np.asarray(space.high, np.float32)
    # Bounds near float32's largest number do not count.
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = np.isfinite(high - low)
    low = np.where(bounded, low, 0)
    high = np.where(bounded, high, 1)

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, space.shape, minval=low, maxval=high)

    return jnp.where(jnp.broadcast_to(bounded, action.shape), jax.vmap(draw)(keys), action)


@dataclasses.dataclass(frozen=True)
class Fixed(Still):
    """The policy of a finished run, which samples actions as at the end of that run."""

    stored_as = "Fixed"

    run_dir: str = ""
    """Its directory."""
    policy: str | None = None
    """Which policy of that run; None: its only one, or the only one that trains."""
    checkpoint: str | None = None
    """A checkpoint of that run by its env steps, or "best", as for ``load_policy``; None: the
    trained variables."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if there is no directory."""
        if not self.run_dir:
            raise ConfigError("fixed needs the directory of a run, as in fixed(runs/NAME)")

    def pinned(self) -> Fixed:
        """Returns the same policy with the env steps of its checkpoint: the best one may change
        while its run trains.

        Raises:
          ConfigError: the run has no such checkpoint.
        """
        if self.checkpoint is None:
            return self

        from jaxrl_dist.run import checkpoint, storage  # here, not above: it imports JAX

        run_dir = pathlib.Path(self.run_dir)
        storage.check_run_dir(run_dir)
        path = checkpoint.chosen(run_dir, self.checkpoint)
        return dataclasses.replace(self, checkpoint=str(checkpoint.number_of(path)))

    def acting_with(self, algorithm: Algorithm, variables: Variables) -> Algorithm:
        """Returns the algorithm that acts with these variables of the run, as at its end."""
        return _acting_at_the_end(algorithm, lambda key: jax.tree.map(jnp.asarray, variables))


@dataclasses.dataclass(frozen=True)
class Copy(Still):
    """An earlier copy of another policy of the run: an opponent for self-play."""

    stored_as = "Copy"

    policy: str = ""
    """The policy that is copied."""
    every: int = 100
    """Updates of that policy between two copies."""
    size: int = 1
    """Number of newest copies to keep; each agent draws one of them for each episode."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a number is out of range."""
        if not 1 <= self.every <= 2**30:
            raise ConfigError(
                f"copy({self.policy},{self.every}) needs 1 to {2**30} updates between two copies"
            )
        if not 1 <= self.size <= MAX_COPIES:
            raise ConfigError(
                f"copy({self.policy},{self.every},{self.size}) needs a pool of 1 to {MAX_COPIES} copies"
            )

    def acting_as(self, algorithm: Algorithm) -> Algorithm:
        """Returns the algorithm of the copied policy, which acts as at the end of all schedules."""
        from jaxrl_dist.learners import league  # here, not above: it imports JAX

        acting = _acting_at_the_end(algorithm, algorithm.init)
        if self.size == 1:
            return acting
        return league.drawn(acting, self.size)


STILL: dict[str, type[Still]] = {kind.stored_as: kind for kind in (Random, Fixed, Copy)}
"""These config classes, by the names that ``config.json`` has for them."""


def _acting_at_the_end(algorithm: Algorithm, init: Callable[[jax.Array], Variables]) -> Algorithm:
    """Returns an algorithm that acts as another one at the end of all schedules."""
    from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES  # here, not above: it imports JAX

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = context._replace(env_step=jnp.float32(END_OF_SCHEDULES))
        return algorithm.policy(variables, obs, core, context)

    return dataclasses.replace(
        _never_learning(init, policy),
        initial_core=algorithm.initial_core,
        feedback=algorithm.feedback,
    )


def _never_learning(init: Callable[[jax.Array], Variables], policy: Policy) -> Algorithm:
    """Returns an algorithm that acts and never learns."""

    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError("this policy does not train")

    return Algorithm(
        init, policy, postprocess=refuse, loss=refuse, optimizer=optax.identity(), trains=False
    )


# --- Notation -------------------------------------------------------------------------------------


def read_still(text: str) -> Still | None:
    """Reads ``random``, ``fixed(RUN_DIR[@CHECKPOINT][,POLICY])`` or
    ``copy(POLICY[,UPDATES[,SIZE]])``; returns None for another text.

    Raises:
      ConfigError: the text in parentheses is wrong or missing.
    """
    if text == "random":
        return Random()
    kind, _, rest = text.partition("(")
    inside = ""
    if rest.endswith(")"):
        inside = rest.removesuffix(")")
    if kind == "fixed":
        if not inside:
            raise ConfigError(
                f"{text!r} is not a policy; fixed(RUN_DIR) and fixed(RUN_DIR@CHECKPOINT,POLICY) are"
            )
        return read_fixed(inside)
    if kind == "copy":
        arguments = re.fullmatch(r"([\w-]+)(?:,([0-9]{1,9}))?(?:,([0-9]{1,9}))?", inside)
        if arguments is None:
            raise ConfigError(
                f"{text!r} is not a policy; copy(POLICY), copy(POLICY,UPDATES) and "
                "copy(POLICY,UPDATES,SIZE) are"
            )
        policy, every, size = arguments.groups()
        return Copy(policy, int(every or Copy.every), int(size or Copy.size))
    return None


def read_fixed(text: str) -> Fixed:
    """Reads ``RUN_DIR[@CHECKPOINT][,POLICY]``.

    A directory whose own name has an ``@`` is taken whole.

    Raises:
      ConfigError: the text is empty.
    """
    parsed = re.fullmatch(r"(.+?)(?:,([\w-]+))?", text, re.DOTALL)
    if parsed is None:
        raise ConfigError("a run's directory is missing, as in runs/NAME")
    run_dir, policy = parsed.groups()
    checkpoint = None
    at = re.fullmatch(r"(.+)@([^@/]+)", run_dir, re.DOTALL)
    if at is not None and not os.path.isdir(run_dir):
        run_dir, checkpoint = at.groups()
    return Fixed(run_dir, policy, checkpoint)
