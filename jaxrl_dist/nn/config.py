"""Flags of neural networks, which algorithms inherit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.inherit import Inherits
from jaxrl_dist.config.values import OR_OBJECT, setting
from jaxrl_dist.errors import ConfigError

TorsoName = Literal["auto", "mlp", "minatar", "nature", "impala"]
CoreName = Literal["none", "gru", "lstm", "attention", "linear"]
if TYPE_CHECKING:
    from jaxrl_dist.protocols import CoreLike, TorsoLike

    Torso = TorsoName | TorsoLike
    Core = CoreName | CoreLike
else:  # the names that a flag accepts; Python also accepts functions
    Torso = Annotated[TorsoName, OR_OBJECT]
    Core = Annotated[CoreName, OR_OBJECT]


@dataclasses.dataclass(frozen=True)
class TorsoConfig(Inherits):
    """Flags of the torso, the part of a network that reads observations; algorithms inherit
    them.
    """

    torso: Torso = "auto"
    """Network that reads observations; 'auto': an MLP for vectors, the MinAtar CNN for small
    images, Nature's for large ones; in Python also your own, a pair (init, apply)."""
    hidden_sizes: tuple[int, ...] = setting((64, 64), low=1, high=MAX_SIZE)
    """Widths of the hidden layers of the MLP torso; the CNNs have the widths of their papers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation function of the MLP torso; the CNNs always use relu."""
    layer_norm: bool = False
    """Normalise the outputs of the torso's layers before the activation function (Ba et al.
    2016)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of all layers except the heads; parameters,
    losses and optimiser state stay float32."""


@dataclasses.dataclass(frozen=True)
class CriticConfig(Inherits):
    """Flags of algorithms whose critic may see more than their policy;
    these algorithms inherit them.
    """

    critic_sees: str | None = None
    """Parts of a Dict observation, separated by commas, that the critic reads and the policy does
    not; a trained policy acts without them (Pinto et al. 2018, arXiv:1710.06542)."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """Returns the parts that the policy does not read."""
        return tuple(name.strip() for name in (self.critic_sees or "").split(",") if name.strip())


@dataclasses.dataclass(frozen=True)
class DistributionConfig(Inherits):
    """Flags of what value networks predict; algorithms inherit them."""

    num_atoms: int = setting(1, low=1, high=MAX_SIZE)
    """Atoms of the return distribution (Bellemare et al. 2017, C51: 51; Dabney et al. 2018,
    QR-DQN: 200); 1: only its mean."""
    quantiles: Literal["none", "fixed", "implicit"] = "none"
    """What the atoms are. 'none': fixed returns with learned probabilities; 'fixed': returns at
    fixed fractions of the distribution; 'implicit': returns at random fractions that the network
    reads (Dabney et al. 2018, IQN)."""
    quantile_huber: float = setting(1.0, above=0)
    """Errors of quantiles up to this have a squared loss, larger ones a linear loss (Dabney et al.
    2018, section 3.1: kappa). Quantiles that lie closer together are biased, and so is their mean:
    returns that spread little need a smaller one."""
    value_min: float = setting(-10.0, low=-1e9, high=1e9)
    """Return of the lowest atom."""
    value_max: float = setting(10.0, low=-1e9, high=1e9)
    """Return of the highest atom."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "quantiles", active=self.num_atoms > 1, needed="--num-atoms above 1")
        learned = self.quantiles != "none"
        check_used(self, "quantile_huber", active=learned, needed="--quantiles fixed or implicit")
        bounded = self.num_atoms > 1 and self.quantiles == "none"
        needed = "--num-atoms above 1 and --quantiles none"
        check_used(self, "value_min", "value_max", active=bounded, needed=needed)
        if bounded and not self.value_min < self.value_max:
            raise ConfigError(
                f"--value-min {self.value_min:g} must be below --value-max {self.value_max:g}"
            )


@dataclasses.dataclass(frozen=True)
class CriticsConfig(DistributionConfig):
    """Flags of several critics' predictions; algorithms inherit them."""

    drop_quantiles: int = setting(0, low=0)
    """Largest quantiles that a target leaves out for each critic, so that it does not overestimate
    (Kuznetsov et al. 2020, TQC: 2 of 25, and 5 for Hopper)."""

    def validate(self) -> None:
        super().validate()
        if self.quantiles == "implicit":
            raise ConfigError(
                "--quantiles implicit needs a network of action values, as dqn has; "
                "use --quantiles fixed"
            )
        learned = self.quantiles != "none"
        check_used(self, "drop_quantiles", active=learned, needed="--quantiles fixed")
        if self.drop_quantiles >= self.num_atoms:
            raise ConfigError(
                f"--drop-quantiles {self.drop_quantiles} leaves none of --num-atoms "
                f"{self.num_atoms}; lower it"
            )


@dataclasses.dataclass(frozen=True)
class NoiseConfig(Inherits):
    """Flag of policies that draw continuous actions; algorithms inherit it."""

    noise_correlation: float | None = setting(None, low=0, below=1)
    """Correlation between the noise of consecutive continuous actions; None: each action has
    independent noise. Correlated noise explores further (Hollenstein et al. 2024,
    arXiv:2312.11091)."""

    def noise_size(self, components: int) -> int:
        """Returns how many numbers of noise a policy keeps for ``components`` of actions.

        Raises:
          ConfigError: there are no such components.
        """
        if self.noise_correlation is not None and not components:
            raise ConfigError(
                "--noise-correlation needs continuous actions, which this environment does not "
                "have; remove it"
            )
        return 0 if self.noise_correlation is None else components


@dataclasses.dataclass(frozen=True)
class CoreConfig(TorsoConfig):
    """Flags of the recurrent core, which gives a policy a memory; algorithms inherit them."""

    core: Core = "none"
    """Recurrent core before the heads; each episode resets it. 'attention' sees the last
    ``core_window`` steps, 'linear' is a linear recurrent unit; in Python also your own, three
    functions (init, step, initial)."""
    core_size: int = setting(64, low=1, high=MAX_SIZE)
    """Width of the recurrent core's state."""
    core_window: int = setting(32, low=1, high=MAX_SIZE)
    """Earlier steps that the attention core sees."""
    core_inputs: Literal["none", "action", "reward", "action,reward"] = "none"
    """Inputs of the recurrent core beside the features: the previous action and its reward, which
    are 0 when an episode starts (Ni et al. 2022, section 4)."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "core_window", active=self.core == "attention", needed="--core attention")
        check_used(self, "core_size", "core_inputs", active=self.core != "none", needed="--core")


@dataclasses.dataclass(frozen=True)
class NetworkConfig(CoreConfig):
    """Flags of an actor-critic's network, which may have a recurrent core."""

    initial_std: float = setting(1.0, above=0)
    """Standard deviation of continuous actions at the start,
    in units where finite bounds are -1 and 1; training changes it."""
