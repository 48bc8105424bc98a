"""Conservative Q-learning, for data that others recorded: Kumar et al. (2020),
https://arxiv.org/abs/2006.04779.

Its floor makes it Cal-QL: Nakamoto et al. (2023), https://arxiv.org/abs/2303.05479.
"""

from __future__ import annotations

import dataclasses

from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jnp
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import Acted, Algorithm, Context, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class ConservativeConfig(ReplayConfig):
    """Flags of conservative Q-learning."""

    cql_weight: float | None = setting(None, low=0)
    """alpha of conservative Q-learning, which lowers the values of actions that the data does not
    contain (Kumar et al. 2020, equation 4); None: none."""
    cql_floor: bool = setting(False, needs="cql_weight")
    """Do not lower a value below the return that followed in the data, so that later learning from
    new experience does not start with values that are far too low (Cal-QL: Nakamoto et al. 2023,
    section 5)."""

    def validate(self) -> None:
        super().validate()
        if self.cql_floor and self.core != "none":
            raise ConfigError(f"--cql-floor does not work with --core {self.core}; remove one")

    def with_floor(self, algorithm: Algorithm) -> Algorithm:
        """Adds ``return [N]`` to batches of transitions: -infinity of the run's own,
        whose episodes may go on.
        """
        if not self.cql_floor:
            return algorithm
        assert algorithm.replay is not None

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            action, core, extras = algorithm.policy(variables, obs, core, context)
            return action, core, {**extras, "return": jnp.full(action.shape[:1], -jnp.inf)}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            batch = algorithm.postprocess(variables, rollout._replace(extras={}), context)
            return {**batch, "return": rollout.extras["return"][0]}

        # A number, and an error if it is traced:
        # members of a population that differ in it have data of their own.
        replay = dataclasses.replace(algorithm.replay, return_discount=float(self.discount))
        return dataclasses.replace(algorithm, policy=policy, postprocess=postprocess, replay=replay)
