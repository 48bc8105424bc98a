"""Reads the curves of other libraries from CSV files."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Collection, Sequence

from jaxrl_dist.commands.plot.reading import AXES, LARGEST, Config, Curve, Plot
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import np
from jaxrl_dist.run.storage import read_plain

SUFFIX = ".csv"
STEPS = ("env_steps", "step", "global_step")
"""Columns that may hold the env steps; the first one that a file has does."""
_MAX_BYTES = 2**28


def read_table(
    path: pathlib.Path, wanted: Plot, envs: Collection[str]
) -> dict[str, tuple[Curve, Config]]:
    """Returns the curve and config of each seed in a CSV file, by name; skips rows without a value.

    Args:
      envs: environments of the runs beside it; the only one stands for a missing column ``env``.

    Raises:
      ConfigError: a column is missing, or a value is not a number.
    """
    if wanted.score == "evaluation":
        raise ConfigError(f"{path} has no evaluations; remove it, or use --score training")
    text = read_plain(path, _MAX_BYTES).decode("utf-8-sig", "replace")
    rows = csv.DictReader(io.StringIO(text))
    step, value = _columns(path, rows.fieldnames or (), wanted)
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        if not row[value]:
            continue
        try:
            seed = int(row.get("seed") or 0)
            point = (float(row[step]), float(row[value]))
        except (TypeError, ValueError):
            point = (np.nan, np.nan)
        if not all(abs(number) <= LARGEST for number in point):
            raise ConfigError(
                f"{path}, line {rows.line_num}: {step}, {value} and seed must be numbers"
            )
        env = _env(path, row.get("env") or "", envs)
        points.setdefault((env, seed), []).append(point)
    if not points:
        raise ConfigError(f"{path} has no value of {value}; remove it")
    curves: dict[str, tuple[Curve, Config]] = {}
    for (env, seed), pairs in points.items():
        run = {"env": env, "seed": seed}
        config = {"algorithm": path.name, "hyperparameters": {}, "run": run}
        curves[f"{path}: {env} seed {seed}"] = Curve(*np.array(sorted(pairs)).T), config
    return curves


def _columns(path: pathlib.Path, names: Sequence[str], wanted: Plot) -> tuple[str, str]:
    """Returns the columns of the horizontal and of the vertical axis."""
    value = "return" if wanted.metric == "episode/return" else wanted.metric
    axis, _ = AXES[wanted.x]
    steps = STEPS if wanted.x == "steps" else (axis,)
    step = next((name for name in steps if name in names), axis)
    for name in (step, value):
        if name not in names:
            raise ConfigError(
                f"{path} has no column {name}; name its columns {step}, {value} and, if there are "
                f"several, seed and env, not {', '.join(names)}"
            )
    return step, value


def _env(path: pathlib.Path, name: str, envs: Collection[str]) -> str:
    """Returns the environment of a row, by the name that the runs beside it have."""
    same = [env for env in envs if name in ("", env, env.split(":", 1)[-1])]
    if len(same) == 1:
        return same[0]
    if not name:
        raise ConfigError(
            f"{path} must say in a column env of which environment it is; the runs beside it are of "
            f"{', '.join(sorted(envs)) or 'none'}"
        )
    return name
