"""Training as a pure function, which the user compiles, maps over keys and hyperparameters,
or differentiates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import returns, rng
from jaxrl_dist.actors.step import NO_FAULT
from jaxrl_dist.checks import flag, shown
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.plans import compiled, initial, iteration
from jaxrl_dist.plans.report import metrics_of
from jaxrl_dist.rng import Stream
from jaxrl_dist.settings.members import tunable
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.compile_cache import keep_programs
from jaxrl_dist.training.job import make_session
from jaxrl_dist.types import Array, PyTree, TrainState

IMPURE = {
    **dict.fromkeys(
        ("run_dir", "tensorboard", "wandb", "record", "video_interval", "keep_best"),
        "writes nothing",
    ),
    **dict.fromkeys(
        ("seeds", "vary"), "trains one member, and jax.vmap maps it over keys and hyperparameters"
    ),
    "data": "learns from new experience alone",
    "coordinator": "runs in one process",
    "stop_at_return": "makes a fixed number of iterations",
    **dict.fromkeys(("evaluation_interval", "exact"), "makes no evaluations"),
    "init_from": "begins with its key alone",
}
"""Fields of ``Train`` for what a pure function does not do, with what it does."""
MAX_STEPS = 2**31 - 1
"""Most env steps that an int32 counts."""


class PureTrain(Protocol):
    """The function that ``make_train`` returns."""

    def __call__(
        self, key: jax.Array, hyper: Mapping[str, Array] = {}, /
    ) -> tuple[TrainState, dict[str, jax.Array]]: ...


@in_32_bits
def make_train(config: Train) -> PureTrain:
    """Returns training as a pure function ``(key, hyper) -> (state, metrics)``,
    for ``jax.jit``, ``vmap`` and ``jvp``.

    With ``jax.random.key(seed)`` and without ``hyper`` the state is that of ``train`` with this
    seed, bit for bit, and metrics are equal up to rounding. It makes
    ``total_env_steps / (num_envs * rollout_length)`` iterations, rounded up; ``train`` does not
    count steps that only reset, and makes a few more.

    ``hyper`` maps names of the algorithm's float hyperparameters to scalars, which replace those of
    the config and may be traced; no range is checked. Names are as in ``--vary``:
    ``POLICY.FIELD`` with several policies.

    ``state`` is the last ``TrainState``, with parameters in ``state.variables``. Each of
    ``metrics`` has a row for each report interval, ``[reports]``: ``env_steps``, ``updates`` and
    ``iteration`` so far, int32, and the metrics of a report, float32, NaN where a report has None.
    ``env/faults`` counts iterations in which an environment gave NaN or infinity, for which
    ``train`` raises an error.

    Derivatives with respect to ``hyper`` are those of forward mode. They pass through targets and
    advantages, which losses take as constant, and not through sampled actions that are categories.
    Convolutions on a CPU have none.

    Raises:
      ConfigError: the environment is not a pure function, or the config asks for what one does not
        do. The function raises it while it is traced, for hyperparameters that it does not
        have or cannot trace.
    """
    config, source = resolved(config)
    _check(config)
    if config.compile_cache:
        keep_programs()
    session = make_session(config, source)
    job = session.job
    names = tunable(config)
    iterations = -(-config.total_env_steps // job.steps_per_iteration)
    lengths = np.diff([*range(0, iterations, session.iterations_per_report), iterations]).astype(
        np.int32
    )

    def train(
        key: jax.Array, hyper: Mapping[str, Array] = {}, /
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_arguments(key, hyper, names)
        hyper = {name: jnp.asarray(value, jnp.float32) for name, value in hyper.items()}
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        keys = tuple(rng.stream(key, stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN))
        act, learn = iteration.make_iteration(job, 1)
        actor = initial.start(job)(keys[1], hyper)
        state = job.variant(hyper)[1].init(rng.stream(key, Stream.INIT))
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), (state, actor, keys, hyper)
        )
        blank = jax.tree.map(jnp.asarray, compiled.blank_sums(job, act, learn, *inputs))

        def iterate(_: Array, carry: PyTree) -> PyTree:
            state, actor, since, steps, faults = carry
            actor, experience, (new_steps, episodes, fault) = act(state, actor, keys, hyper)
            state, since = iteration.learned(learn, state, since, experience, episodes, keys, hyper)
            faulty = jnp.any(fault.where != NO_FAULT)
            return state, actor, since, steps + new_steps.sum(axis=0), faults + faulty

        def interval(carry: PyTree, length: jax.Array) -> PyTree:
            state, actor, steps = carry
            begin = state, actor, blank, steps, jnp.float32(0)
            state, actor, since, steps, faults = jax.lax.fori_loop(0, length, iterate, begin)
            updates = jnp.sum(jnp.stack(jax.tree.leaves(state.updates)))
            metrics = {
                "env_steps": steps[0],
                "updates": updates,
                "iteration": state.iteration,
                **metrics_of(since, jnp, _ratio),
                "env/faults": faults,
            }
            return (state, actor, steps), metrics

        begin = state, actor, jnp.zeros(2, jnp.int32)
        (state, _, _), metrics = jax.lax.scan(interval, begin, jnp.asarray(lengths))
        return job.bare(state), metrics

    @in_32_bits
    def traced(
        key: jax.Array, hyper: Mapping[str, Array] = {}, /
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        try:
            with returns.within_training():
                return train(key, hyper)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            if not hyper:
                raise
            raise ConfigError(
                f"one of {', '.join(hyper)} must be a number in the config, because a program "
                "cannot trace it"
            ) from error

    return traced


def _check_arguments(key: Any, hyper: Any, names: Collection[str]) -> None:
    """Raises ``ConfigError`` for what is not a key,
    and for hyperparameters that do not exist or are not scalars.
    """
    old = getattr(key, "dtype", None) == np.uint32 and key.shape == (2,)
    new = (
        isinstance(key, jax.Array)
        and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        and key.shape == ()
    )
    if not (old or new):
        raise ConfigError(
            f"training starts from one key, such as jax.random.key(0), not from {key!r:.80}"
        )
    if not isinstance(hyper, Mapping):
        raise ConfigError(f"hyperparameters must be a dict of scalars by name, not {hyper!r:.80}")
    for name, value in hyper.items():
        if name not in names:
            raise ConfigError(
                f"{shown(name)} is not a float hyperparameter of this run{hint(name, names)}"
            )
        if np.shape(value):
            raise ConfigError(
                f"{name} must be one number, not of shape {np.shape(value)}; use vmap for several"
            )


def _ratio(total: jax.Array, number: Array, count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, total / jnp.maximum(number, 1), jnp.nan)


def _check(config: Train) -> None:
    blank = Train(config.algorithm)
    for name, instead in IMPURE.items():
        if getattr(config, name) != getattr(blank, name):
            raise ConfigError(
                f"make_train makes a pure function, which {instead}; remove {flag(name)}"
            )
    if not PLANS[config.plan].compiled:
        raise ConfigError(
            f"make_train needs --plan on_device and an environment of JAX, not --plan {config.plan}"
        )
    if config.total_env_steps > MAX_STEPS:
        raise ConfigError(
            f"make_train counts env steps as int32, but --total-env-steps {config.total_env_steps} "
            "is more"
        )
