"""Chooses the devices that learn and act."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_dist.checks import counted, flag, parse_devices
from jaxrl_dist.config import Train
from jaxrl_dist.errors import ConfigError


def local_devices(count: int | None) -> list[jax.Device]:
    """Returns the first ``count`` local devices; None: all of them.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        hint = f"; JAX_NUM_CPU_DEVICES={count} forces as many" if devices[0].platform == "cpu" else ""
        raise ConfigError(
            f"--num-devices {count}, but there are {counted(len(devices), devices[0].platform + ' device')}{hint}"
        )
    return devices[:count]


def learner_devices(config: Train[Any]) -> list[jax.Device]:
    """Returns the devices that learn.

    Raises:
      ConfigError: there are fewer than the config asks for.
    """
    numbers = parse_devices("learner_devices", config.learner_devices)
    if numbers is None:
        return local_devices(config.num_devices)
    if config.num_devices not in (None, len(numbers)):
        raise ConfigError(f"--learner-devices {config.learner_devices} contradicts --num-devices {config.num_devices}")
    return numbered("learner_devices", numbers)


def numbered(name: str, numbers: Sequence[int]) -> list[jax.Device]:
    """Returns the local devices with these numbers.

    Args:
      name: the field that holds the numbers.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.local_devices()
    if max(numbers) >= len(devices):
        there = counted(len(devices), f"{devices[0].platform} device")
        raise ConfigError(f"{flag(name)} names device {max(numbers)}, but there are {there}, counted from 0")
    return [devices[number] for number in numbers]


def reserve_memory(fraction: float | None) -> None:
    """Reserves a fraction of the GPU's memory; must be called before JAX first uses the GPU."""
    if fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
