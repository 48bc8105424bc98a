"""Flags of the optimiser, which algorithms inherit, and the optimiser that they select."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxrl_dist.checks import check_used
from jaxrl_dist.config.inherit import Inherits
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import jax, jnp, optax

OptimizerName = Literal[
    "adabelief",
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "nadamw",
    "radam",
    "rmsprop",
    "sgd",
]
ROOTS = ("adam", "adamw", "lamb", "nadam", "nadamw", "radam")
"""Optimisers that take the square root of a mean of squared gradients."""
ROOT = 1e-37
"""Added to this mean, so that the root has a derivative at 0, such as the gradients of a unit that
is always off. Rounding hides it otherwise."""
DECOUPLED = ("adamw", "lamb", "lion", "muon", "nadamw")
"""Optimisers that decay the parameters apart from the
gradient (Loshchilov and Hutter 2019, algorithm 2)."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Inherits):
    """Flags of the optimiser; ``learning_rate`` is a field of the algorithm,
    which sets its default.
    """

    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How step sizes change: not at all, or to zero over `--learning-rate-steps`, linearly or as
    half a cosine wave (Loshchilov and Hutter 2017, equation 5)."""
    learning_rate_steps: int | None = setting(None, low=1, high=10**15)
    """Env steps over which the schedule takes step sizes to zero, where they stay."""
    optimizer: OptimizerName | None = None
    """Optimiser by optax's name, with optax's defaults; None: the algorithm's,
    with the algorithm's settings."""
    weight_decay: float | None = setting(None, low=0)
    """Multiple of the parameters by which they shrink: apart from the gradient with adamw, lamb,
    lion, muon and nadamw, added to the gradient with others; None: the optimiser's default, which
    is 0 for others."""

    def validate(self) -> None:
        super().validate()
        scheduled = self.learning_rate_schedule != "constant"
        check_used(
            self,
            "learning_rate_steps",
            active=scheduled,
            needed="--learning-rate-schedule linear or cosine",
        )
        if scheduled and self.learning_rate_steps is None:
            raise ConfigError(
                f"--learning-rate-schedule {self.learning_rate_schedule} needs "
                "--learning-rate-steps, the env steps after which the learning rate is zero"
            )

    def make_optimizer(
        self, default_name: str, learning_rate: float | jax.Array, **options: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the optimiser that the flags select, by default
        ``optax.DEFAULT_NAME(learning_rate, **options)``.

        Its ``update`` needs the extra argument ``env_step`` where the step size has a schedule.

        Args:
          default_name: optax's name of the algorithm's optimiser.
          learning_rate: the step size at the start, which may be traced.
          options: of the algorithm's optimiser, for when the flags name none.
        """
        name = self.optimizer or default_name
        if self.optimizer is not None:
            # even if it names the algorithm's own: a name always means optax's defaults
            options = {}
        parts = []
        if self.weight_decay is not None and name in DECOUPLED:
            options["weight_decay"] = self.weight_decay
        elif self.weight_decay is not None:
            parts.append(optax.add_decayed_weights(self.weight_decay))
        if name in ROOTS:
            options.setdefault("eps_root", ROOT)
        library = optax.contrib if name == "muon" else optax
        parts.append(getattr(library, name)(learning_rate, **options))
        if self.learning_rate_schedule != "constant":
            parts.append(self._scheduled())
        chained = optax.chain(*parts) if len(parts) > 1 else parts[0]
        return optax.with_extra_args_support(chained)

    def _scheduled(self) -> optax.GradientTransformationExtraArgs:
        """Scales updates by the part of the step size that is left after ``env_step`` env steps."""
        assert self.learning_rate_steps is not None, "validate requires it"
        steps = float(self.learning_rate_steps)

        def update(
            updates: Any, state: Any, params: Any = None, *, env_step: jax.Array, **extra: Any
        ) -> Any:
            done = jnp.clip(env_step / steps, 0.0, 1.0)
            if self.learning_rate_schedule == "linear":
                left = 1 - done
            else:
                left = 0.5 * (1 + jnp.cos(math.pi * done))
            return jax.tree.map(lambda leaf: leaf * left.astype(leaf.dtype), updates), state

        return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
