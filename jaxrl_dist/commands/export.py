"""``jaxrl-dist export``: writes a trained policy as a file that runs without this package."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

from jaxrl_dist.checks import MAX_SIZE
from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.run.storage import check_no_link


@dataclasses.dataclass(frozen=True)
class Export(evaluate.Trained):
    """Writes the trained policy of a run as a file that runs without this package:
    StableHLO for JAX, or ONNX.
    """

    out: Annotated[str | None, help.Alias("-o")] = None
    """The file to write; None: policy.stablehlo or policy.onnx in the run directory."""
    format: Literal["stablehlo", "onnx"] | None = None
    """Format of the file: StableHLO runs wherever JAX does, ONNX in any ONNX runtime. None: what
    the file's ending names, .onnx or .stablehlo, and StableHLO for other names."""
    batch: int | None = setting(None, low=1, high=MAX_SIZE)
    """Number of environments per call of the exported policy; None: any number."""
    platforms: tuple[Literal["cpu", "cuda", "rocm", "tpu"], ...] = ()
    """Platforms on which the file can run, such as cpu cuda tpu; none: this machine's."""
    policy: str | None = None
    """Name of the policy to export, if the run has several."""


def run(args: Sequence[str]) -> int:
    """Runs ``export RUN_DIR [FLAGS]``."""
    options = flags.parse(Export, args, "jaxrl-dist export")
    if not options.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist export runs/NAME")

    from jaxrl_dist.play.export import export, format_of

    format = format_of(options.out or "", options.format)
    out = pathlib.Path(options.out or pathlib.Path(options.run_dir, f"policy.{format}"))
    if options.out is None:
        check_no_link(out)
    policy = options.load(options.policy)
    done = export(policy, out, batch=options.batch, platforms=options.platforms, format=format)
    inputs = ", ".join(done.inputs)
    outputs = ", ".join(done.outputs)
    lines = [f"wrote {out}: {done.bytes:,} bytes"]
    lines.append(f"a function of obs, core and start, {inputs}, to action and core, {outputs}")
    if done.parts:
        lines.append(
            f"the parts of obs: {', '.join(f'{path} {kind}' for path, kind in done.parts.items())}"
        )
    if done.core and format == "stablehlo":
        lines.append(f"the layout of core: {done.core}")
    if policy.algorithm.searches:
        lines.append("it acts without a search, like evaluate --num-simulations 0")
    print(visible("\n".join(lines)))
    return 0
