"""Accelerators that need not be present: JAX's plugins compile for them without the hardware.

Source: ``jax.experimental.topologies``, https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Never

import jax
from jax.experimental import topologies

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.errors import ConfigError, one_line
from jaxrl_dist.run.machine import memory_size


class GPU(NamedTuple):
    """Properties of an NVIDIA GPU that XLA's compiler needs:
    fields of XLA's ``GpuDeviceInfoProto``.

    Sources: NVIDIA's data sheets, and the table "technical specifications per compute capability"
    of the CUDA programming guide.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    memory: int
    """Bytes."""
    bandwidth: int
    """Bytes/s."""
    l2_cache: int
    """Bytes."""
    clock: float
    """GHz."""
    shared_memory: int
    """Bytes of a core; a block may have 1 KiB less."""

    def describe(self) -> str:
        """Returns a ``GpuTargetConfigProto`` in protobuf's text format."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory - 1024}
              shared_memory_per_core: {self.shared_memory}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
              compile_time_toolkit_version: "12.8.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
            """


GPUS = {
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 80 << 30, 2039 * 10**9, 40 << 20, 1.41, 164 << 10
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 80 << 30, 3352 * 10**9, 50 << 20, 1.98, 228 << 10
    ),
    "h200": GPU(
        "NVIDIA H200", (9, 0), 132, 128, 141 << 30, 4800 * 10**9, 50 << 20, 1.98, 228 << 10
    ),
}
TPUS = {"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30}
"""Generations of TPUs, and the bytes of memory of a chip:
https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm"""
EXAMPLES = "here, h200, h200x8, v5e:2x4, v5e:16x16 or v4:4x4x8"


class Target(NamedTuple):
    """Devices to compile for."""

    name: str
    platform: str | None
    """``cuda`` or ``tpu``; None: the platform of this machine."""
    memory: int
    """Bytes of a device."""
    topology: Mapping[str, Any]
    """Arguments of ``topologies.get_topology_desc``."""
    options: Mapping[str, Any]
    """XLA's options for the compiler."""

    def devices(self) -> list[jax.Device]:
        """Returns the devices of this machine, or descriptions of others,
        which no array can be put on.

        For others, it must be called before this process uses JAX: JAX then sees only CPUs, and
        does not use a GPU of this machine.

        Raises:
          ConfigError: JAX's plugin for the platform cannot describe them, or there is none.
        """
        if self.platform is None:
            return jax.local_devices()
        jax.config.update("jax_platforms", "cpu")
        if self.platform == "tpu":
            for name, value in LIBTPU.items():
                os.environ.setdefault(name, value)
        try:
            return list(
                topologies.get_topology_desc(platform=self.platform, **self.topology).devices
            )
        except Exception as error:
            raise ConfigError(f"JAX cannot compile for {self.name}: {one_line(error)}") from error


LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server, for which libtpu would wait
    "TPU_WORKER_HOSTNAMES": "localhost",
    # the machine that libtpu assumes; the topology names its own
    "TPU_ACCELERATOR_TYPE": "v4-8",
    # compiling holds no chip, so two processes may do it at a time
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment of libtpu without a TPU."""


def target(name: str) -> Target:
    """Returns the target of a name such as ``h200``, ``h200x8`` or ``v5e:2x4``:
    a GPU and how many, or a TPU's slice.

    ``here`` is all devices of this machine.

    Raises:
      ConfigError: there is no such target.
    """
    if name == "here":
        return Target(name, None, _memory_here(), {}, {})
    return _tpu(name) or _gpu(name) or _refuse(name)


def _tpu(name: str) -> Target | None:
    kind, _, slice_ = name.partition(":")
    if kind not in TPUS or not re.fullmatch(r"\d+x\d+(x\d+)?", slice_):
        return None
    topology = {"topology_name": name}
    if kind == "v4":
        # As a TPU VM sets it: both cores of a chip are one device.
        topology["chip_config_name"] = "megacore"
    return Target(name, "tpu", TPUS[kind], topology, {})


def _gpu(name: str) -> Target | None:
    match = re.fullmatch(r"([a-z0-9]+?)(?:x0*([1-9]\d*))?", name)
    if match is None or match[1] not in GPUS:
        return None
    gpu = GPUS[match[1]]
    topology = {"target_config": gpu.describe(), "topology": f"1x1x{match[2] or 1}"}
    # Level 0 takes the first algorithm of each product: there is no GPU to time them on.
    return Target(name, "cuda", gpu.memory, topology, {"xla_gpu_autotune_level": 0})


def _refuse(name: str) -> Never:
    near = did_you_mean(re.split(r"[:x]", name)[0], [*GPUS, *TPUS])
    raise ConfigError(
        f"no target {name!r}{near}; such as {EXAMPLES}: a GPU and how many, or a TPU and its slice"
    )


def _memory_here() -> int:
    """Returns the bytes of memory of a device of this machine;
    devices that are CPUs share the machine's.
    """
    devices = jax.local_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return memory_size() // len(devices) if limit is None else int(limit)
