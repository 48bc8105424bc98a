"""Evolution strategies: Salimans et al. (2017), https://arxiv.org/abs/1703.03864."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import (
    distributions,
    jax,
    jnp,
    mesh,
    networks,
    observations,
    optax,
    perturbation,
    returns,
    rng,
)
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.optimizers import OptimizerConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class ES(TablePresets, TorsoConfig, OptimizerConfig):
    """Evolution strategies (Salimans et al. 2017): antithetic pairs of perturbed policies,
    compared by their returns.

    Each environment acts with a separate policy, so ``num_envs`` is the population.
    """

    presets = "es"
    own_optimizer: ClassVar[str] = "adam"

    learning_rate: float = setting(0.01, above=0)
    """Step size of the optimiser (the authors' code, configurations/humanoid.json)."""
    noise_std: float = setting(0.02, above=0)
    """Standard deviation of the noise on the parameters (same source)."""
    weight_decay: float | None = 0.25
    """Multiple of the parameters that is added to the gradient before Adam: the source's 0.005
    divided by its ``noise_std``, because the source does not divide its gradient by it."""

    @classmethod
    def preset(cls, spec: EnvSpec) -> dict[str, Any]:
        """Returns the table's flags; a rollout is a whole episode, or 1000 steps of a longer
        one.
        """
        return super().preset(spec) | {"rollout_length": min(spec.max_episode_steps or 1000, 1000)}

    def weigh(self, fitness: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the weights ``[N]`` of the environments' noise, given their returns,
        and which count, ``[N]`` bool.

        Equation 1 of the paper with centred ranks in place of the returns (section 2.1).
        """
        return centred_ranks(fitness) / self.noise_std, jnp.ones_like(fitness, bool)

    def make(self, spec: EnvSpec) -> Algorithm:
        head = distributions.policy_head(spec.action)
        network = networks.policy_network(self, observations.input_space(spec), head.num_outputs)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            outputs = network.apply(variables.params, obs)
            # actions are the distribution's mode
            unused = jnp.zeros((outputs.shape[0], head.log_std_size))
            both = jnp.concatenate([outputs, unused], axis=-1)
            return head.distribution(both, observations.legal(spec, obs)).mode(), core, {}

        def initial_core(num_envs: int) -> dict[str, jax.Array]:
            index = jnp.arange(num_envs, dtype=jnp.int32)
            noise = jnp.zeros((num_envs, 2), jnp.uint32)  # a key's data
            return {
                "pair": index // 2,
                "sign": 1.0 - 2.0 * (index % 2).astype(jnp.float32),
                "noise": noise,
            }

        def behaviour(
            variables: Variables, core: PyTree, context: Context
        ) -> tuple[PyTree, PyTree]:
            keys = rng.per_index(context.keys, core["pair"])
            perturb = jax.vmap(perturbation.perturbed, (None, 0, 0))
            params = perturb(variables.params, keys, self.noise_std * core["sign"])
            return params, core | {"noise": jax.random.key_data(keys)}

        def postprocess(
            variables: Variables, rollout: Rollout, context: Context
        ) -> dict[str, jax.Array]:
            fitness = returns.episode_return(*rollout.outcomes)
            weight, used = self.weigh(mesh.gathered(fitness))
            index = mesh.global_index(len(fitness))
            return {
                "fitness": fitness,
                "noise": rollout.core["noise"],
                "weight": rollout.core["sign"] * weight[index],
                "used": used[index],
            }

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            """A surrogate that is linear in the parameters: only its gradient matters,
            which is the paper's.
            """

            # draws the noise again for the gradient, instead of storing it for all examples
            @jax.checkpoint
            def surrogate(example: tuple[jax.Array, jax.Array]) -> jax.Array:
                data, weight = example
                direction = perturbation.noise(variables.params, jax.random.wrap_key_data(data))
                return -weight * optax.tree.vdot(direction, variables.params)

            at_once = min(perturbation.copies_at_once(variables.params), len(batch["weight"]))
            losses = jax.lax.map(surrogate, (batch["noise"], batch["weight"]), batch_size=at_once)
            return losses, batch["used"], Aux({"fitness": batch["fitness"]})

        return Algorithm(
            init=lambda key: Variables(network.init(key), ()),
            policy=policy,
            postprocess=postprocess,
            loss=loss,
            optimizer=self.make_optimizer(self.own_optimizer, self.learning_rate),
            initial_core=initial_core,
            behaviour=behaviour,
            episodic=True,
            paired=True,
        )


def centred_ranks(x: jax.Array) -> jax.Array:
    """Returns the ranks of ``x [N]``, scaled to -0.5 .. 0.5, float32;
    equal values share the mean of their ranks.

    Wierstra et al. (2014), section 3.1, as in Salimans et al. (2017), section 2.1.
    """
    order = jnp.sort(x)
    first = jnp.searchsorted(order, x)
    last = jnp.searchsorted(order, x, side="right") - 1
    return 0.5 * (first + last).astype(jnp.float32) / max(len(x) - 1, 1) - 0.5
