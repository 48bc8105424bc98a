"""Chooses the devices that learn and act."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax

from jaxrl_dist.checks import check_divides, counted, flag, parse_devices
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers

PER_CORE = 8
"""Maximum number of devices for each core of a CPU."""


def all_devices() -> list[jax.Device]:
    """Returns the devices of all processes, process 0's first."""
    if peers.world():
        return sorted(jax.devices(), key=lambda device: device.process_index)
    return jax.local_devices()


def first_devices(count: int | None) -> list[jax.Device]:
    """Returns the first ``count`` devices, the same number from each process; None: all of them.

    Raises:
      ConfigError: there are fewer, or they do not divide over the processes.
    """
    devices = all_devices()
    processes = peers.count()
    if count is not None and count > len(devices):
        if devices[0].platform == "cpu":
            raise ConfigError(
                f"--num-devices {count}, but the run has {_counted(devices)}; "
                f"JAX_NUM_CPU_DEVICES={count} makes as many"
            )
        raise ConfigError(f"--num-devices {count}, but the run has {_counted(devices)}")
    if count is None or processes == 1:
        return devices[:count]
    check_divides("num_devices", count, (processes, "processes"))
    return [
        device
        for at in range(processes)
        for device in _of_process(devices, at)[: count // processes]
    ]


def _of_process(devices: Sequence[jax.Device], process: int) -> list[jax.Device]:
    return [device for device in devices if device.process_index == process]


def _counted(devices: Sequence[jax.Device]) -> str:
    return counted(len(devices), f"{devices[0].platform} device")


def check_evenly(devices: Sequence[jax.Device], task: str) -> None:
    """Checks that each process has the same number of these devices.

    Raises:
      ConfigError: they do not.
    """
    numbers = [len(_of_process(devices, process)) for process in range(peers.count())]
    if len(set(numbers)) > 1:
        raise ConfigError(
            f"all processes must have equally many devices {task}, but they have "
            f"{', '.join(map(str, numbers))}; set --num-devices"
        )


def divide_cpu(members: int) -> None:
    """Divides the CPU into devices for a population, one or more a core,
    unless the user has said how many there are.

    Small products keep one core busy, so members compute faster side by side. A single run computes
    more slowly on several of them, so this is for processes that train nothing else. It must be
    called before JAX is used.
    """
    if members > 1 and peers.world() is None and "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # JAX has begun with the devices that it has
            jax.config.update("jax_num_cpu_devices", cpu_devices(members))


def cpu_devices(members: int) -> int:
    """Returns into how many devices a CPU is divided for a population."""
    cores = len(os.sched_getaffinity(0))
    return next(
        (n for n in range(cores, PER_CORE * cores + 1) if members % n == 0), min(members, cores)
    )


def undivided(config: Train, members: int) -> str:
    """Says how a population gets several devices where JAX has
    begun with one for a CPU of several cores; else "".
    """
    count = cpu_devices(members)
    chosen = (
        config.num_devices is not None
        or config.learner_devices
        or "JAX_NUM_CPU_DEVICES" in os.environ
    )
    alone = jax.device_count() == 1 and jax.devices()[0].platform == "cpu"
    if chosen or not alone or not PLANS[config.plan].compiled or count == 1 or members % count:
        return ""
    return (
        f"{members} members train on one CPU device, which may leave cores idle; "
        f"call jax.config.update('jax_num_cpu_devices', {count}) before anything uses JAX"
    )


def learner_devices(config: Train, members: int | None = None) -> list[jax.Device]:
    """Returns the devices that learn; by default all,
    and of a CPU as many as have whole ``members`` of a program.

    Raises:
      ConfigError: there are fewer than the config asks for.
    """
    numbers = parse_devices("learner_devices", config.learner_devices)
    if numbers is None:
        devices = first_devices(config.num_devices)
        on_cpu = devices[0].platform == "cpu" and not peers.world()
        if members and config.num_devices is None and on_cpu:
            # With environments on the host, the members act in one call,
            # and several devices make it slower.
            most = len(devices) if PLANS[config.plan].compiled else 1
            devices = devices[: max(n for n in range(1, most + 1) if members % n == 0)]
    elif config.num_devices in (None, len(numbers)):
        devices = numbered("learner_devices", numbers)
    else:
        raise ConfigError(
            f"--learner-devices {config.learner_devices} contradicts --num-devices "
            f"{config.num_devices}; remove one"
        )
    check_evenly(devices, "that learn")
    return devices


def numbered(name: str, numbers: Sequence[int]) -> list[jax.Device]:
    """Returns the devices with these numbers, counted over all processes.

    Args:
      name: the field that holds the numbers.

    Raises:
      ConfigError: there are fewer.
    """
    devices = all_devices()
    if max(numbers) >= len(devices):
        raise ConfigError(
            f"{flag(name)} names device {max(numbers)}, but the run has {_counted(devices)}, counted from 0"
        )
    return [devices[number] for number in numbers]


def reserve_memory(fraction: float | None) -> None:
    """Reserves a fraction of the GPU's memory; must be called before JAX first uses the GPU."""
    if fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
