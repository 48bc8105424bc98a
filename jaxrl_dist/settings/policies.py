"""Several policies in one environment, and those that do not train: random actions,
copies, policies of other runs.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

from jaxrl_dist.algorithms import having, name_of
from jaxrl_dist.config.train import OWN, Train
from jaxrl_dist.config.values import Parts
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, np, observations, optax, spaces
from jaxrl_dist.protocols import Traits
from jaxrl_dist.types import Acted, Algorithm, Context, EnvSpec, Policy, PyTree, Variables

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Policies(Parts):
    """The algorithms of several policies; it takes the place of a single policy's
    hyperparameters.
    """

    stored_as: ClassVar[str] = "Policies"
    """Its name in ``config.json``."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a value of a policy is out of range."""
        for name, part in self.parts.items():
            with naming(name):
                Traits.of(part.algorithm).validate()


def by_policy(config: Train) -> dict[str, Train]:
    """Returns the config of each policy: the run's, with its own algorithm;
    a single policy has the name ``""``.
    """
    if not isinstance(config.algorithm, Policies):
        return {"": config}
    configs = {}
    for name, part in config.algorithm.parts.items():
        policy_fields = {field: getattr(part, field) for field in OWN}
        configs[name] = dataclasses.replace(
            config, algorithm=part.algorithm, policies={}, **policy_fields
        )
    return configs


def learner(config: Train) -> str | None:
    """Returns the only policy of several that trains; None: the run has one policy,
    or several train.
    """
    kinds = {name: part.algorithm for name, part in by_policy(config).items()}
    learning = [name for name, kind in kinds.items() if not isinstance(kind, Still)]
    if len(learning) == 1 < len(kinds):
        return learning[0]
    return None


def label(algorithm: Any) -> str:
    """Returns the name of an algorithm's config; with several policies, their names,
    such as ``ppo+dqn``.
    """
    if not isinstance(algorithm, Policies):
        return name_of(algorithm)
    return "+".join(name_of(part.algorithm).lower() for part in algorithm.parts.values())


@contextlib.contextmanager
def naming(policy: str) -> Iterator[None]:
    """Puts the policy's name, if it has one, before an error's
    message and into its flags: ``--prey.batch-size``.
    """

    def named(match: re.Match[str]) -> str:
        field = match[2].replace("-", "_")
        if field in OWN or having(field):
            return f"--{match[1]}{policy}.{match[2]}"
        return match[0]

    try:
        yield
    except ConfigError as error:
        if not policy:
            raise
        flags = re.sub(r"--(no-|)([a-z][a-z0-9-]*)(?!\.?[\w-])", named, error.with_flags)
        raise ConfigError(f"policy {policy}: {flags}") from None


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
        head = distributions.policy_head(spec.action)
        parts, tree = jax.tree.flatten(spec.action)

        def spread(space: Any, drawn: jax.Array, keys: jax.Array) -> jax.Array:
            """Replaces what is normally distributed where there are two bounds."""
            if not isinstance(space, spaces.Box):
                return drawn
            low = np.asarray(space.low, np.float32)
            high = np.asarray(space.high, np.float32)
            # bounds near float32's largest number do not count
            with np.errstate(over="ignore", invalid="ignore"):
                bounded = np.isfinite(high - low)
            low = np.where(bounded, low, 0)
            high = np.where(bounded, high, 1)
            uniform = jax.vmap(
                lambda key: jax.random.uniform(key, space.shape, minval=low, maxval=high)
            )(keys)
            return jnp.where(jnp.broadcast_to(bounded, drawn.shape), uniform, drawn)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            if context.keys is None:
                raise ConfigError(
                    "this policy only samples: call it in Python, as policy(obs, core, key)"
                )
            outputs = jnp.zeros((len(context.keys), head.num_outputs + head.log_std_size))
            keys, others = jax.vmap(jax.random.split, out_axes=1)(context.keys)
            drawn = head.distribution(outputs, observations.legal(spec, obs)).sample(keys)
            actions = [
                spread(space, x, jax.vmap(jax.random.fold_in, in_axes=(0, None))(others, i))
                for i, (space, x) in enumerate(zip(parts, jax.tree.leaves(drawn), strict=True))
            ]
            return jax.tree.unflatten(tree, actions), core, {}

        return _still(lambda key: Variables({}, ()), policy)


@dataclasses.dataclass(frozen=True)
class Fixed(Still):
    """The policy of a finished run, which samples actions as at the end of that run."""

    stored_as = "Fixed"

    run_dir: str = ""
    """Its directory."""
    policy: str | None = None
    """Which policy of that run; None: its only one, or the only one that trains."""
    checkpoint: str | None = None
    """Env steps of a checkpoint of that run, or "best", as for ``load_policy``; None:
    its trained variables."""

    def validate(self) -> None:
        if not self.run_dir:
            raise ConfigError("fixed needs the directory of a run, as in fixed(runs/NAME)")

    def pinned(self) -> Fixed:
        """Returns the same policy with the env steps of its checkpoint:
        the best one may change while its run trains.

        Raises:
          ConfigError: the run has no such checkpoint.
        """
        if self.checkpoint is None:
            return self

        from jaxrl_dist.run import checkpoint, storage  # here, not above: it imports JAX

        storage.check_run_dir(pathlib.Path(self.run_dir))
        path = checkpoint.chosen(pathlib.Path(self.run_dir), self.checkpoint)
        return dataclasses.replace(self, checkpoint=str(checkpoint.number_of(path)))

    def of(self, algorithm: Algorithm, variables: Variables) -> Algorithm:
        """Returns the algorithm that acts as that run's does at its end,
        with these variables of it.
        """
        return _at_the_end(algorithm, lambda key: jax.tree.map(jnp.asarray, variables))


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
        if not 1 <= self.every <= 2**30:
            raise ConfigError(
                f"copy({self.policy},{self.every}) needs 1 to {2**30} updates between two copies"
            )
        if not 1 <= self.size <= MAX_COPIES:
            raise ConfigError(
                f"copy({self.policy},{self.every},{self.size}) needs a pool of 1 to {MAX_COPIES} copies"
            )

    def of(self, algorithm: Algorithm) -> Algorithm:
        """Returns the algorithm of the copied policy, which acts as at the end of all schedules."""
        from jaxrl_dist.learners import league  # here, not above: it imports JAX

        made = _at_the_end(algorithm, algorithm.init)
        if self.size == 1:
            return made
        return league.drawn(made, self.size)


MAX_COPIES = 1000
"""All of them act at every step."""
STILL: dict[Any, type[Still]] = {kind.stored_as: kind for kind in (Random, Fixed, Copy)}
"""These config classes, by the names that ``config.json`` has for them."""


def still(text: str) -> Still | None:
    """Reads ``random``, ``fixed(RUN_DIR[@CHECKPOINT][,POLICY])`` or
    ``copy(POLICY[,UPDATES[,SIZE]])``.

    Returns None if the text is something else.

    Raises:
      ConfigError: the text in parentheses is wrong or missing.
    """
    kind, parenthesis, rest = text.partition("(")
    inside = rest.removesuffix(")")
    if kind == "random" and not parenthesis:
        return Random()
    if kind == "fixed":
        if inside:
            return of_run(inside)
        raise ConfigError(
            f"{text!r} is not a policy; fixed(RUN_DIR) and fixed(RUN_DIR@CHECKPOINT,POLICY) are"
        )
    if kind == "copy":
        if arguments := re.fullmatch(r"([\w-]+)(?:,([0-9]{1,9}))?(?:,([0-9]{1,9}))?", inside):
            return Copy(
                arguments[1], int(arguments[2] or Copy.every), int(arguments[3] or Copy.size)
            )
        forms = "copy(POLICY), copy(POLICY,UPDATES) and copy(POLICY,UPDATES,SIZE)"
        raise ConfigError(f"{text!r} is not a policy; {forms} are")
    return None


def of_run(text: str) -> Fixed:
    """Reads ``RUN_DIR[@CHECKPOINT][,POLICY]``;
    a directory whose own name has an ``@`` is taken whole.
    """
    if not text:
        raise ConfigError("a run's directory is missing, as in runs/NAME")
    run_dir, policy = re.fullmatch(r"(.+?)(?:,([\w-]+))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if os.path.isdir(run_dir):
        at = None
    else:
        at = re.fullmatch(r"(.+)@([^@/]+)", run_dir, re.DOTALL)
    if at:
        return Fixed(at[1], policy, at[2])
    return Fixed(run_dir, policy)


def _at_the_end(algorithm: Algorithm, init: Callable[[jax.Array], Variables]) -> Algorithm:
    """Returns an algorithm that acts as another one at the end of all schedules, and never
    learns.
    """
    from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES  # here, not above: it imports JAX

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        return algorithm.policy(
            variables, obs, core, context._replace(env_step=jnp.float32(END_OF_SCHEDULES))
        )

    return dataclasses.replace(
        _still(init, policy), initial_core=algorithm.initial_core, feedback=algorithm.feedback
    )


def _still(init: Callable[[jax.Array], Variables], policy: Policy) -> Algorithm:
    """Returns an algorithm that never learns."""

    def none(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError("this policy does not train")

    return Algorithm(
        init, policy, postprocess=none, loss=none, optimizer=optax.identity(), trains=False
    )
