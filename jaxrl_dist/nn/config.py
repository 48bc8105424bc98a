"""Flags of neural networks, which algorithms inherit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_dist.checks import MAX_SIZE, check_range
from jaxrl_dist.inherit import Inherits

if TYPE_CHECKING:
    Torso = Any
else:  # what a flag can say; in Python also a pair (init, apply)
    Torso = Literal["auto", "mlp", "minatar", "nature", "impala"]


@dataclasses.dataclass(frozen=True)
class TorsoConfig(Inherits):
    """The part of a neural network that reads observations; algorithms inherit these flags."""

    torso: Torso = "auto"
    """What reads observations; 'auto': an MLP for vectors, the MinAtar CNN for small images, Nature's for large; in
    Python also a network of your own, a pair (init, apply)."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the MLP torso; the CNNs have the widths of their papers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation function of the torso."""
    layer_norm: bool = False
    """Normalise the outputs of the torso's layers before the activation function (Ba et al. 2016)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network's layers; parameters, losses and optimiser state stay float32."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a value is out of range."""
        check_range(self, "hidden_sizes", low=1, high=MAX_SIZE)


@dataclasses.dataclass(frozen=True)
class NetworkConfig(TorsoConfig):
    """The neural network of an actor-critic, which may have a memory."""

    initial_std: float = 1.0
    """Standard deviation of continuous actions before training, which then changes it."""
    core: Literal["none", "gru"] = "none"
    """Recurrent core before the heads; 'gru' gives the policy a memory that is reset with each episode."""
    core_size: int = 64
    """Width of the recurrent core's state."""

    def validate(self) -> None:
        super().validate()
        check_range(self, "initial_std", above=0)
        check_range(self, "core_size", low=1, high=MAX_SIZE)
