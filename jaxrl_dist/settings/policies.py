"""Several policies in one run: the config of each, which of them train, and errors by name.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar

from jaxrl_dist.algorithms import label_of
from jaxrl_dist.config.train import OWN, Train
from jaxrl_dist.config.values import PolicyConfigs, check_hyperparameters
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.still import Still

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Policies(PolicyConfigs):
    """The algorithms of several policies, in the place of a single policy's hyperparameters."""

    stored_as: ClassVar[str] = "Policies"
    """Its name in ``config.json``."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a value of a policy is out of range."""
        for name, config in self.configs.items():
            with naming(name):
                check_hyperparameters(config.algorithm)


def by_policy(config: Train) -> dict[str, Train]:
    """Returns the config of each policy: the run's, with the policy's own algorithm and fields.

    A single policy has the name ``""``.
    """
    if not isinstance(config.algorithm, Policies):
        return {"": config}
    configs = {}
    for name, part in config.algorithm.configs.items():
        policy_fields = {field: getattr(part, field) for field in OWN}
        configs[name] = dataclasses.replace(
            config, algorithm=part.algorithm, policies={}, **policy_fields
        )
    return configs


def learner_name(config: Train) -> str | None:
    """Returns the name of the only policy of several that trains; None: the run has one
    policy, or several train.
    """
    policies = by_policy(config)
    learning = [name for name, part in policies.items() if not isinstance(part.algorithm, Still)]
    if len(policies) > 1 and len(learning) == 1:
        return learning[0]
    return None


def label(algorithm: object) -> str:
    """Returns how an algorithm is shown, for its config or config class; with several policies,
    their labels, such as ``ppo+dqn``.
    """
    if not isinstance(algorithm, Policies):
        return label_of(algorithm)
    return "+".join(label_of(part.algorithm).lower() for part in algorithm.configs.values())


@contextlib.contextmanager
def naming(policy: str) -> Iterator[None]:
    """Names the policy in errors about its settings, whose flags are then ``--prey.batch-size``.

    A single policy has no name, and its errors stay as they are.
    """
    try:
        yield
    except ConfigError as error:
        if not policy:
            raise
        raise error.within(f"policy {policy}", policy) from None
