"""``jaxrl-dist export``: writes a trained policy as a file that runs without this package."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

from jaxrl_dist.checks import MAX_SIZE, check_range
from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.directories import check_no_link


@dataclasses.dataclass(frozen=True)
class Export:
    """Writes the trained policy of a run as a file that runs without this package: StableHLO for JAX, or ONNX."""

    run_dir: Annotated[str, help.Argument("RUN_DIR")] = ""
    """Directory of the run, such as runs/NAME."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """The file to write; None: policy.stablehlo or policy.onnx in the run directory."""
    format: Literal["stablehlo", "onnx"] = "stablehlo"
    """Format of the file: StableHLO runs wherever JAX does, ONNX in any ONNX runtime."""
    batch: int | None = None
    """Number of environments per call of the exported policy; None: any number."""
    platforms: tuple[str, ...] = ()
    """Platforms on which the file can run, such as cpu cuda tpu; none: this machine's."""
    policy: str | None = None
    """Name of the policy to export, if the run has several."""
    env: str | None = None
    """The run's environment, if it has the form my_module:make."""
    algorithm: str | None = None
    """File of the algorithm, if the run trained your own."""
    checkpoint: str | None = None
    """Export the policy of this checkpoint: best or its env steps, as in evaluate; None: the trained policy."""


def run(args: Sequence[str]) -> int:
    """Runs ``export RUN_DIR [FLAGS]``."""
    asked = flags.parse(Export, args, "jaxrl-dist export")
    if not asked.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist export runs/NAME")
    check_range(asked, "batch", low=1, high=MAX_SIZE)
    known = ("cpu", "cuda", "rocm", "tpu")
    for platform in asked.platforms:
        if platform not in known:
            raise ConfigError(f"--platforms {platform} is none of {', '.join(known)}")
    out = pathlib.Path(asked.out or pathlib.Path(asked.run_dir, f"policy.{asked.format}"))
    if asked.out is None:
        check_no_link(out)
    whose = evaluate.Evaluate(asked.run_dir, env=asked.env, algorithm=asked.algorithm, checkpoint=asked.checkpoint)
    policy = evaluate.asked_policy(whose, asked.policy)

    from jaxrl_dist.play.export import export

    done = export(policy, out, batch=asked.batch, platforms=asked.platforms, format=asked.format)
    print(f"wrote {out}: {done.bytes:,} bytes")
    print(f"a function of obs, core and start, {', '.join(done.inputs)}, to action and core, {', '.join(done.outputs)}")
    if done.parts:
        print(f"the parts of obs: {', '.join(f'{path} {kind}' for path, kind in done.parts.items())}")
    if done.core and asked.format == "stablehlo":
        print(f"the layout of core: {done.core}")
    return 0
