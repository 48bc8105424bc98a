"""``jaxrl-dist doctor --compile-for TARGET ALGO --env ID [FLAGS]``:
compiles a run for devices not on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from jaxrl_dist.checks import flag
from jaxrl_dist.commands import accelerators, flags, request
from jaxrl_dist.commands.profile import heading
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.hosts import stdout

if TYPE_CHECKING:
    from jaxrl_dist.profiling.targets import Target

FLAG = "--compile-for"
Report = dict[str, Any]
"""A compiled run, its target and its memory, for JSON."""


@dataclasses.dataclass(frozen=True)
class CompileFor:
    """Compiles the run that train would start, for accelerators that this machine may lack, and
    prints its memory per device."""

    compile_for: str = ""
    """The target, such as h200, h200x8 or v5e:2x4; here is this machine."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Compiles the run that ``args`` name, parsed as by ``train``, and prints its memory.

    Raises:
      ConfigError: the target is unknown, its compiler is not installed,
        or the run cannot be compiled for it.
    """
    target = flags.value_of(args, FLAG)
    if not target or target.startswith("-"):
        from jaxrl_dist.profiling import targets

        raise ConfigError(f"{FLAG} which accelerator? Such as {targets.EXAMPLES}")
    options, args = flags.split(
        CompileFor, args, "jaxrl-dist doctor --compile-for TARGET ALGO --env ID"
    )
    if not args:
        raise ConfigError(
            f"which run? Such as: jaxrl-dist doctor {FLAG} {target} ppo --env CartPole-v1"
        )
    with stdout.kept_for(options.json):
        train = request.parse(args)
        request.output_flags(train.fields)
        program = report(options.compile_for, train)
    print(json.dumps(program, indent=2) if options.json else visible("\n".join(memory(program))))
    return 0


def report(name: str, train: request.Request) -> Report:
    """Compiles a run for the target of this name.

    Returns:
      The run, the target, the seconds of compiling, and the bytes of memory per device.

    Raises:
      ConfigError: the target is unknown, its compiler is not installed, the plan is not
        ``on_device``, or the run is a population, names devices of this machine, or does not divide
        over the target's devices.
    """
    from jaxrl_dist.profiling import targets

    target = targets.target(name)
    _check_compiler(target)
    devices = target.devices()

    from jaxrl_dist.plans.compiled import lower
    from jaxrl_dist.profiling import timing
    from jaxrl_dist.training.job import make_job

    config, source = train.resolved()
    _check_run(config, name)
    job = make_job(config, source, devices=devices)
    began = time.perf_counter()
    program = lower(job).compile(compiler_options=dict(target.options))
    seconds = time.perf_counter() - began
    memory = program.memory_analysis()
    assert memory is not None, "XLA says what its programs need"
    return {
        **timing.described(config, devices),
        "algorithm": train.name,
        "target": name,
        "compile_seconds": seconds,
        "memory": {
            "device": target.memory,
            "state": memory.argument_size_in_bytes,
            "new_state": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "program": memory.generated_code_size_in_bytes,
        },
    }


def _check_compiler(target: Target) -> None:
    if target.platform is None:
        return
    extras = [extra for extra in accelerators.PLUGINS if extra.startswith(target.platform)]
    if not any(accelerators.version(accelerators.PLUGINS[extra]) for extra in extras):
        raise ConfigError(
            f"compiling for {target.name} needs JAX's compiler for it, though not the device; "
            f"{accelerators.install_plugin(extras[0])}"
        )


def _check_run(config: Train, target: str) -> None:
    if not PLANS[config.plan].compiled:
        raise ConfigError(
            f"--compile-for needs --plan on_device, but this run has --plan {config.plan}"
        )
    if config.seeds > 1 or config.vary:
        raise ConfigError("--compile-for compiles one run; remove --seeds and --vary")
    for field in marked(Train, of_machine=True):
        if getattr(config, field) is not None:
            raise ConfigError(
                f"{flag(field)} names devices of this machine, but --compile-for uses the whole "
                f"{target}; remove it"
            )


def memory(report: Report) -> list[str]:
    """Formats the run and its memory per device."""
    sizes = dict(report["memory"])
    available = sizes.pop("device")
    used = sum(sizes.values())
    uses = [f"{name.replace('_', ' ')} {decimal(size)}" for name, size in sizes.items() if size]
    shown = [
        f"{heading(report, 'compiled for')} in {report['compile_seconds']:.1f} s",
        f"memory of a device: {decimal(used)} of {decimal(available)} ({', '.join(uses)})",
    ]
    if used > available:
        shown.append(
            f"it does not fit: it needs {decimal(used)}, and a device has {decimal(available)}"
        )
    return shown
